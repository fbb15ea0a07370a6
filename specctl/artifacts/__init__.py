"""Artifacts: fitted policies as folders with a schema, a version and a digest.

manifest, strict_json, files   read untrusted data; need no torch
tensors                        fitted numbers in `policy.safetensors`
load, save                     the one loader and the one writer
selftest, onnx_twin            stored decisions, and the policy for other runtimes
compatibility                  whether an artifact fits a run
card                           text about an artifact
signing                        keys and signatures
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specctl.artifacts.manifest import (
    Domain,
    Evidence,
    Metric,
    Origin,
    PairFingerprint,
    SplitSize,
)

if TYPE_CHECKING:
    from specctl.artifacts.card import describe_artifact
    from specctl.artifacts.load import Artifact, load_artifact
    from specctl.artifacts.save import save_artifact

_LATER = {
    "Artifact": "load",
    "describe_artifact": "card",
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


def __getattr__(name: str) -> Any:
    """Names that need torch, imported on first use (PEP 562)."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
