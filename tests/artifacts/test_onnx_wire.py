"""Our own protobuf against Google's: the same bytes out, the same values in, and no surprises."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.artifacts.onnx.decode import MAX_NESTING, decode
from specctl.artifacts.onnx.schema import MESSAGES, Message
from specctl.artifacts.onnx.wire import WireError, encode, encode_varint, read_varint
from specctl.artifacts.onnx_twin import twin_bytes, twin_model
from specctl.policy.records import Policy, ScoredTree
from tests.artifacts.examples import POLICIES
from tests.policy.scorers import random_trees

GOLDEN = Path(__file__).parents[1] / "golden" / "artifacts-v1"
TWINS = ("hetero", "c2t_ffn", "c2t_trees", "echo")
TREES = Policy(shape=ScoredTree(scorer=random_trees(1, 20, 9), beta=0.1))


def twin(policy: Policy) -> bytes:
    data = twin_bytes(policy)
    assert data is not None
    return data


@pytest.mark.parametrize("name", TWINS)
def test_our_bytes_are_those_that_onnx_wrote(name: str) -> None:
    """The golden files were written by onnx.helper and Google's serialiser."""
    assert twin(POLICIES[name]) == (GOLDEN / name / "policy.onnx").read_bytes()


@pytest.mark.parametrize("policy", [*(POLICIES[name] for name in TWINS), TREES])
def test_bytes_are_canonical_and_read_back(policy: Policy) -> None:
    data = twin(policy)
    model = onnx.load_from_string(data)
    assert model.SerializeToString(deterministic=True) == data
    onnx.checker.check_model(model, full_check=True)
    assert decode(data) == twin_model(policy)


def test_the_table_of_messages_is_that_of_onnx() -> None:
    """Numbers, names, wire types, repetition: a field that we read otherwise would be a hole."""
    theirs = {
        "Model": onnx.ModelProto, "Graph": onnx.GraphProto, "Node": onnx.NodeProto,
        "Attribute": onnx.AttributeProto, "Tensor": onnx.TensorProto,
        "SparseTensor": onnx.SparseTensorProto, "Value": onnx.ValueInfoProto,
        "Type": onnx.TypeProto, "TensorType": onnx.TypeProto.Tensor,
        "Shape": onnx.TensorShapeProto, "Dimension": onnx.TensorShapeProto.Dimension,
        "OperatorSet": onnx.OperatorSetIdProto, "Function": onnx.FunctionProto,
        "Training": onnx.TrainingInfoProto, "Annotation": onnx.TensorAnnotation,
        "Strings": onnx.StringStringEntryProto,
    }  # fmt: skip
    assert theirs.keys() == MESSAGES.keys()
    kinds = {2: "float", 3: "int", 5: "int", 14: "int", 9: "text", 12: "bytes"}
    for name, cls in theirs.items():
        fields = cls.DESCRIPTOR.fields_by_number
        for number, (label, kind) in MESSAGES[name].items():
            field = fields[number]
            assert label == field.name + "*" * field.is_repeated, (name, number)
            if field.message_type is not None:
                plain = kind in theirs and theirs[kind].DESCRIPTOR is field.message_type
                assert plain or (name, label) == ("Tensor", "segment"), (name, number)
            else:
                wanted = "bytes" if field.is_packed else kinds[field.type]
                assert kind == wanted, (name, number)


@given(st.integers(0, 2**64 - 1))
def test_a_varint_reads_back(value: int) -> None:
    data = encode_varint(value)
    assert read_varint(data, 0, len(data)) == (value, len(data))


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_signed_number_reads_back(value: int) -> None:
    model = Message("Model", {"ir_version": [value]})
    assert decode(encode(model)) == model


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_is_refused_or_read_as_google_reads_it(data: st.DataObject) -> None:
    """A mutant of a twin that we accept is a model whose fields onnx reads alike."""
    raw = bytearray(twin(POLICIES[data.draw(st.sampled_from(TWINS))]))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        model = decode(bytes(raw))
    except WireError:
        return
    theirs = onnx.load_from_string(bytes(raw))
    assert [node.op_type for node in theirs.graph.node] == [
        node.one("op_type", "") for node in model.one("graph", Message("Graph", {})).all("node")
    ]
    assert theirs.SerializeToString() == onnx.load_from_string(encode(model)).SerializeToString()


def test_each_prefix_of_a_twin_is_refused() -> None:
    data = twin(POLICIES["hetero"])
    whole = set()
    for size in range(len(data)):
        try:
            whole.add(encode(decode(data[:size])))
        except WireError:
            continue
    assert encode(decode(data)) not in whole
    assert len(whole) < 6, "only between two fields of the model itself"


def test_nesting_is_bounded_before_python_is() -> None:
    data = b""
    for _ in range(MAX_NESTING):
        data = b"\x32" + encode_varint(len(data)) + data  # Attribute.g
        data = b"\x2a" + encode_varint(len(data)) + data  # Node.attribute
        data = b"\x0a" + encode_varint(len(data)) + data  # Graph.node
    with pytest.raises(WireError, match="levels of nesting"):
        decode(b"\x3a" + encode_varint(len(data)) + data)
