"""A registry under concurrent processes and random kills, on a folder and on an S3 server (moto).

Eight processes publish 250 versions each under one name and move one alias after every one, while
random ones are killed; a reader fetches whatever it sees. Counts are of laws held, not of speed:
the times are those of this machine with nine processes, and moto is no storage service.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import common  # noqa: E402
from registry_storm import audit, storm  # noqa: E402

from specctl.registry import init_registry, open_registry  # noqa: E402
from tests.servers import S3_ENVIRONMENT, make_bucket, s3_server  # noqa: E402


def main() -> None:
    options = common.parser((__doc__ or "").splitlines()[0])
    options.add_argument("--num-workers", type=int, default=8, help="processes")
    options.add_argument("--num-ops", type=int, default=250, help="publications of each")
    options.add_argument("--num-kills", type=int, default=60, help="SIGKILLs at random moments")
    options.add_argument("--store", default="local", help="local or s3")
    options.add_argument("--seed", type=int, default=0, help="of the kills")
    given = options.parse_args()
    # Not fork: obstore has threads of its own. A fork server's children start as fast, once it has
    # imported all; it looks for modules in PYTHONPATH alone.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["registry_storm", "common", "tests.servers"])
    sizes = {name: getattr(given, name) for name in ("num_workers", "num_ops", "num_kills", "seed")}
    with tempfile.TemporaryDirectory() as folder, place(given.store, Path(folder)) as url:
        init_registry(url)
        history = storm(url, **sizes, context=context)
        found = audit(open_registry(url), history)
    assert history.num_told["done"] == given.num_workers * given.num_ops
    result = {"machine": common.machine("cpu"), "store": given.store, **sizes, **found}
    result |= {"num_told": dict(sorted(history.num_told.items())), "wall_s": history.wall_s}
    text = json.dumps(result, indent=2) + "\n"
    (given.out / f"registry-{given.store}.json").write_text(text)
    print(text)


@contextmanager
def place(store: str, folder: Path) -> Iterator[str]:
    """The URL of an empty place."""
    if store == "local":
        yield str(folder / "registry")
        return
    with s3_server(folder) as endpoint:
        os.environ.update({**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint})
        make_bucket(endpoint, "storm")
        yield "s3://storm/registry"


if __name__ == "__main__":
    main()
