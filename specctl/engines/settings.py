"""Settings of the plugin inside vLLM: one JSON file, which `specctl export --to vllm` writes.

    SPECCTL_VLLM=serve/specctl-vllm.json vllm serve ...

The variable may also hold the JSON itself. Without it the plugin is off.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from specctl.contents import utf8_of
from specctl.errors import EngineError, reason_of
from specctl.logs.trace_files import sample_place
from specctl.records import PositiveInt, Record, canonical_json, describe_violation, option, require
from specctl.stores import is_store_url

VARIABLE = "SPECCTL_VLLM"
FILE_NAME = "specctl-vllm.json"
PACKAGES = {
    "pyarrow": "writes a log",
    "platformdirs": "reads a registry",
    "cryptography": "checks a registry's signatures",
    "obstore": "reaches s3://",
}
"""Packages that the plugin needs and vLLM does not install, and the use of each."""


class TraceSettings(Record):
    """The log that the plugin writes.

    `out`, a folder or `s3://bucket/prefix`, is started or continued. A set has one sampling: other
    requests are only counted.
    """

    out: str = option(
        ...,
        "Log the rounds that vLLM runs into this trace set",
        name="--trace",
        default="no log",
        min_length=1,
    )
    dense: bool = option(
        False, "Draft after every emitted token and verify nothing: a dense log", name="--dense"
    )
    every: PositiveInt = option(1, "Record each N-th request")
    dense_every: PositiveInt | None = option(
        None, "Log each N-th request densely too, into TRACES-dense", default="none"
    )
    max_bytes: PositiveInt | None = option(None, "End the log there", default="no bound")
    tokens: Literal["keep", "drop"] = option("keep", "Token ids in the log: keep, or drop")
    workload: str | None = option(
        None, "Kind of the requests, such as chat; artifacts say it", default="unknown"
    )
    temperature: float = option(0.0, "Temperature of the requests to record; 0 is greedy", ge=0)
    top_k: int = option(0, "Likeliest tokens that they sample among; 0 for all", ge=0)
    top_p: float = option(1.0, "Their nucleus mass", gt=0, le=1)

    @model_validator(mode="after")
    def _one_dense(self) -> Self:
        both = self.dense and self.dense_every is not None
        require(not both, "dense_every needs a log of rounds: with dense, all requests are dense")
        return self

    @property
    def sample(self) -> TraceSettings | None:
        """The settings of the dense sample."""
        if self.dense_every is None:
            return None
        place = {"out": sample_place(self.out), "dense": True, "every": self.dense_every}
        return self.model_copy(update={**place, "dense_every": None})


class PluginSettings(Record):
    """The settings of the plugin.

    Attributes:
        policy: an artifact folder, `REGISTRY/NAME@ALIAS`, or words such as
            `confidence:threshold=0.4`. Folders and aliases are followed: later content takes over
            between two steps. None: the engine drafts as it was set up.
        allow_mismatch: accept artifacts that were fitted on other hardware, dtypes or loads.
        allow_version: run in a version of the engine that specctl was not tested in.
    """

    settings_version: Literal[1] = 1
    policy: Annotated[str, Field(min_length=1)] | None = None
    trace: TraceSettings | None = None
    allow_mismatch: bool = False
    allow_version: bool = False

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        require(self.policy is not None or self.trace is not None, "it has no policy and no trace")
        plain = self.trace is None or not self.trace.dense or self.policy is None
        require(plain, "a dense log verifies no drafts, so it leaves nothing to a policy")
        return self

    @property
    def packages(self) -> list[str]:
        """Those of `PACKAGES` that these settings need."""
        policy, places = self.policy or "", [self.policy or ""]
        if self.trace is not None:
            places.append(self.trace.out)
        is_registry = "@" in policy and not os.path.isdir(policy)
        needed = {
            "pyarrow": self.trace is not None,
            "platformdirs": is_registry,
            "cryptography": is_registry,
            "obstore": any(map(is_store_url, places)),
        }
        return [name for name in PACKAGES if needed[name]]

    def to_json(self) -> str:
        """The text of the file."""
        return canonical_json(self.model_dump(mode="json", exclude_none=True)) + "\n"


def read_settings(text: str) -> PluginSettings:
    """Reads settings.

    Args:
        text: a path, or JSON that begins with a brace.

    Raises:
        EngineError: a missing file, or other content.
    """
    is_json, hint = text.lstrip().startswith("{"), "write them with `specctl export --to vllm`"
    try:
        content = text if is_json else utf8_of(Path(text), EngineError, hint).decode()
        return PluginSettings.model_validate_json(content)
    except ValidationError as error:
        problem = describe_violation(error)
    except (OSError, ValueError) as error:
        problem = reason_of(error)
    where = VARIABLE if is_json else text
    raise EngineError(
        f"settings of the vLLM plugin, {where}, cannot be used: {problem}",
        hint=f"{hint}, or unset {VARIABLE} to run vLLM without specctl",
    )
