"""The packages that the plugin needs in a serving image: with all others hidden it loads a policy
from a registry, drafts by it and logs. docs/vllm.md has the list."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.artifacts import Origin, save_artifact
from specctl.artifacts.signing import SigningKey, sign_folder
from specctl.engines.settings import PACKAGES, VARIABLE, PluginSettings, TraceSettings
from specctl.engines.vllm_tracing import pair_of
from specctl.logs.trace_set import TraceSet
from specctl.policy import FfnScorer, Policy, ScoredTree
from specctl.registry.opening import init_registry
from specctl.registry.publishing import Writer, promote, push, read_package
from specctl.registry.trust import Trust, TrustedKey
from tests.engines.made_up import OF_VLLM, K, models
from tests.hidden import ROOT, all_but, hide, python

SERVE = """
from tests.engines.made_up import serve
session = serve()
assert session.faults.total == 0, session.faults
assert all(not one.recorder.lost for one in session.tracers)
print(json.dumps([sorted({*HIDDEN} & {name.partition(".")[0] for name in sys.modules})]))
"""
LEARNED = Policy(
    shape=ScoredTree(
        scorer=FfnScorer(
            features=("joint_prob", "parent_entropy"),
            mean=(0.0, 0.0),
            scale=(1.0, 1.0),
            w1=((4.0, 0.0), (0.0, 1.0)),
            b1=(0.0, 0.0),
            w2=(1.0, -0.2),
            b2=(-0.3,),
        ),
        beta=0.5,
        depth=K,
        first_top_k=1,
        second_top_k=1,
        num_tokens=K + 1,
    )
)
"""A network, of which the artifact has an ONNX twin that serving does not need."""
LOCAL = [name for name in PACKAGES if name != "obstore"]
"""All but the one for `s3://`, to which this test cannot write."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry whose entries are signed, and a user who trusts the key."""
    place, key = tmp_path_factory.mktemp("image"), SigningKey.generate()
    pair, _ = pair_of(models(), torch.device("cpu"))
    save_artifact(place / "artifact", LEARNED, Origin(pair), card="C2T on a chain.")
    sign_folder(place / "artifact", key, "pair")
    trust = Trust(keys=(TrustedKey.of(key.public_key, names=("*",)),))
    file = place / "config" / "specctl" / "trust.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(trust.to_bytes())
    writer = Writer(init_registry(place / "registry"), trust, "tests", key)
    package = read_package(place / "artifact")
    push(writer, package, "pair")
    promote(writer, "pair", "prod", package.digest)
    return place


def served(place: Path, packages: list[str], out: Path) -> list[str]:
    """What is loaded of what was hidden, after the plugin has served."""
    settings = PluginSettings(
        policy=f"{place}/registry/pair@prod", trace=TraceSettings(out=str(out), dense_every=2)
    )
    homes = {f"XDG_{kind}_HOME": str(place / kind.lower()) for kind in ("CONFIG", "CACHE")}
    code = hide(all_but((*OF_VLLM, *packages))) + SERVE
    shown = python(code, environment={VARIABLE: settings.to_json(), **homes})
    [loaded] = json.loads(shown.splitlines()[-1])
    return list(loaded)


def test_the_plugin_serves_with_its_packages_alone(place: Path, tmp_path: Path) -> None:
    assert served(place, LOCAL, tmp_path / "set") == []
    for name in ("set", "set-dense"):
        assert len(TraceSet.open(str(tmp_path / name)).scan("rounds").collect()) > 0


@pytest.mark.parametrize("missing", LOCAL)
def test_a_package_that_is_not_here_is_named_at_the_start(
    place: Path, tmp_path: Path, missing: str
) -> None:
    """Not when the server has served for a while, without a log."""
    packages = [name for name in LOCAL if name != missing]
    with pytest.raises(AssertionError, match=rf"needs {missing}, .*\n?.*pip install {missing}"):
        served(place, packages, tmp_path / "set")


def test_the_page_has_the_list() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    [line] = re.findall(r"^pip install (?!-)(.*)$", page, re.MULTILINE)
    assert line.split() == LOCAL
    assert "`obstore`" in page


@pytest.mark.parametrize(
    ("given", "packages"),
    [
        ({"policy": "schedule:from_batch=1/5:num_draft_tokens=5/2"}, []),
        ({"policy": "team/registry/pair@prod"}, ["platformdirs", "cryptography"]),
        ({"trace": {"out": "traces"}}, ["pyarrow"]),
        ({"trace": {"out": "s3://bucket/traces"}}, ["pyarrow", "obstore"]),
    ],
)
def test_settings_need_the_packages_of_what_they_do(
    given: dict[str, Any], packages: list[str]
) -> None:
    assert PluginSettings(**given).packages == packages
