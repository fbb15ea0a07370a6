"""The ONNX file of an artifact against its policy: exactly this policy's graph, or a refusal."""

from __future__ import annotations

from specctl.artifacts.manifest import TWIN
from specctl.artifacts.onnx_twin import twin_bytes
from specctl.errors import ArtifactError
from specctl.policy.records import Policy


def check_twin(policy: Policy, found: bytes | None) -> None:
    """Refuses a file that is not the twin of this policy, or one where none belongs (E_TWIN).

    The bytes must be those that `twin_bytes` builds of the record, so no graph of a stranger is
    ever parsed.
    """
    wanted = twin_bytes(policy)
    if found != wanted:
        raise ArtifactError(
            "E_TWIN", TWIN, expected=_words(wanted), found=_words(found, _parting(found, wanted))
        )


def _parting(found: bytes | None, wanted: bytes | None) -> int:
    pairs = zip(found or b"", wanted or b"", strict=False)
    same = (i for i, (a, b) in enumerate(pairs) if a != b)
    return next(same, min(len(found or b""), len(wanted or b"")))


def _words(data: bytes | None, parting: int | None = None) -> str:
    if data is None:
        return "no file"
    if parting is None:
        return f"the {len(data)} bytes of this policy's graph"
    return f"{len(data)} bytes, other from byte {parting} on"
