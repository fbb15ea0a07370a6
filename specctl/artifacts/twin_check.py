"""The ONNX file of an artifact against its policy: exactly this policy's graph, or a refusal.

Equality decides. The bytes must be the canonical ones of the graph that the record describes; a
file that is any other is read by our own walker, only to say what is wrong with it.
"""

from __future__ import annotations

from specctl.artifacts.files import check_format
from specctl.artifacts.manifest import TWIN
from specctl.artifacts.onnx.decode import NestingError, SizeError, decode
from specctl.artifacts.onnx.rules import check_rules, difference
from specctl.artifacts.onnx.schema import Message
from specctl.artifacts.onnx.wire import WireError, encode
from specctl.artifacts.onnx_scorer import ML_DOMAIN, ML_OPSET
from specctl.artifacts.onnx_twin import ALLOWED_OPERATORS, OPSET, twin_model
from specctl.errors import ArtifactError
from specctl.policy.records import Policy

OPERATORS = dict.fromkeys(ALLOWED_OPERATORS, "") | {"TreeEnsembleRegressor": ML_DOMAIN}
OPSETS = {"": OPSET, ML_DOMAIN: ML_OPSET}


def check_twin(policy: Policy, found: bytes | None) -> None:
    """Refuses a file that is not the twin of this policy, or one where none belongs.

    Raises:
        ArtifactError: E_FORMAT, E_ONNX_LOAD, E_ONNX_EXTERNAL, E_ONNX_OP, E_ONNX_SHAPE or
            E_ONNX_GRAPH.
    """
    wanted = twin_model(policy)
    if found is None or wanted is None:
        if found is not None or wanted is not None:
            raise _other(wanted, found)
        return
    canonical = encode(wanted)
    if found == canonical:
        return
    check_format(TWIN, found)
    given = read_model(found)
    check_rules(given, OPERATORS, OPSETS)
    raise _parted(given, wanted, len(found), len(canonical))


def read_model(data: bytes) -> Message:
    """The model in a file (E_ONNX_LOAD for other bytes, E_ONNX_GRAPH for too large a one)."""
    try:
        return decode(data)
    except WireError as error:
        large = isinstance(error, NestingError | SizeError)
        raise ArtifactError(
            "E_ONNX_GRAPH" if large else "E_ONNX_LOAD",
            TWIN,
            expected="a small graph" if large else "an ONNX model in protobuf",
            found=str(error),
        ) from None


def _parted(given: Message, wanted: Message, size: int, canonical: int) -> ArtifactError:
    where = difference(given, wanted)
    if where is None:
        where = ("encoding", f"the {canonical} canonical bytes", f"{size} others for one graph")
    path, expected, found = where
    return ArtifactError("E_ONNX_GRAPH", f"{TWIN}, {path}", expected=expected, found=found)


def _other(wanted: Message | None, found: bytes | None) -> ArtifactError:
    return ArtifactError(
        "E_ONNX_GRAPH",
        TWIN,
        expected="no file" if wanted is None else "the twin of this policy",
        found="no file" if found is None else f"a file of {len(found)} bytes",
    )
