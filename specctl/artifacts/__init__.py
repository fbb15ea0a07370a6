"""Artifacts: fitted policies as folders with a schema, a version and a digest.

`manifest`, `strict_json` and `files` read what came from elsewhere and need no torch, `tensors`
moves fitted numbers, `load` and `save` are the two ways through all of it, `selftest` and
`onnx_twin` the decisions that travel along, `compatibility` says where an artifact fits, `card` and
`describe` put it in words, `signing` vouches for it.
"""

from typing import TYPE_CHECKING

from specctl.lazy import lazy_exports

if TYPE_CHECKING:
    from specctl.artifacts.describe import describe_artifact
    from specctl.artifacts.load import Artifact, load_artifact
    from specctl.artifacts.manifest import (
        Domain,
        Evidence,
        Metric,
        Origin,
        PairFingerprint,
        SplitSize,
    )
    from specctl.artifacts.save import save_artifact

_MODULES = {
    "Artifact": "load",
    "Domain": "manifest",
    "Evidence": "manifest",
    "Metric": "manifest",
    "Origin": "manifest",
    "PairFingerprint": "manifest",
    "SplitSize": "manifest",
    "describe_artifact": "describe",
    "load_artifact": "load",
    "save_artifact": "save",
}
__all__ = [
    "Artifact",
    "Domain",
    "Evidence",
    "Metric",
    "Origin",
    "PairFingerprint",
    "SplitSize",
    "describe_artifact",
    "load_artifact",
    "save_artifact",
]
__getattr__ = lazy_exports(__name__, _MODULES)
