"""Artifacts: fitted policies as folders with a schema, a version and a digest.

`files` touches the disk, `manifest` and `strict_json` read what strangers wrote, `tensors` moves
fitted numbers, `checks` holds the loader's rules, `codec` is the main path, `onnx_twin` and
`onnx_scorer` the decision for other runtimes, `describe` the words for people.
"""

from typing import TYPE_CHECKING

from specctl.lazy import lazy_exports

if TYPE_CHECKING:
    from specctl.artifacts.codec import Artifact, load_artifact, save_artifact
    from specctl.artifacts.describe import describe_artifact
    from specctl.artifacts.manifest import (
        Domain,
        Evidence,
        Metric,
        Origin,
        PairFingerprint,
        SplitSize,
    )
    from specctl.artifacts.onnx_twin import twin_decisions, twin_log_odds

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
    "twin_decisions",
    "twin_log_odds",
]
__getattr__ = lazy_exports(
    __name__,
    {
        "Artifact": "codec",
        "Domain": "manifest",
        "Evidence": "manifest",
        "Metric": "manifest",
        "Origin": "manifest",
        "PairFingerprint": "manifest",
        "SplitSize": "manifest",
        "describe_artifact": "describe",
        "load_artifact": "codec",
        "save_artifact": "codec",
        "twin_decisions": "onnx_twin",
        "twin_log_odds": "onnx_twin",
    },
)
