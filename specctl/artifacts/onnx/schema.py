"""The messages of onnx.proto that a reader must know, and how each field lies on the wire.

A message is a table from field number to name and kind. Kinds: `int` (varint), `float` (4 bytes),
`text`, `bytes` (packed lists too, which stay as they lie), or the name of a message. A `*` behind
the name: the field may stand more than once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Fields = dict[int, tuple[str, str]]
FLOAT, INT64 = 1, 7
"""`TensorProto.DataType` of float32 and int64, the only two that twins hold."""
ATTRIBUTE_TYPES: Final = {"f": 1, "i": 2, "s": 3, "floats": 6, "ints": 7, "strings": 8}
"""`AttributeProto.AttributeType` by the field that holds the value."""

_STRINGS: Fields = {1: ("key", "text"), 2: ("value", "text")}
MESSAGES: dict[str, Fields] = {
    "Model": {
        1: ("ir_version", "int"),
        2: ("producer_name", "text"),
        3: ("producer_version", "text"),
        4: ("domain", "text"),
        5: ("model_version", "int"),
        6: ("doc_string", "text"),
        7: ("graph", "Graph"),
        8: ("opset_import*", "OperatorSet"),
        14: ("metadata_props*", "Strings"),
        20: ("training_info*", "Training"),
        25: ("functions*", "Function"),
    },
    "Graph": {
        1: ("node*", "Node"),
        2: ("name", "text"),
        5: ("initializer*", "Tensor"),
        10: ("doc_string", "text"),
        11: ("input*", "Value"),
        12: ("output*", "Value"),
        13: ("value_info*", "Value"),
        14: ("quantization_annotation*", "Annotation"),
        15: ("sparse_initializer*", "SparseTensor"),
        16: ("metadata_props*", "Strings"),
    },
    "Node": {
        1: ("input*", "text"),
        2: ("output*", "text"),
        3: ("name", "text"),
        4: ("op_type", "text"),
        5: ("attribute*", "Attribute"),
        6: ("doc_string", "text"),
        7: ("domain", "text"),
        8: ("overload", "text"),
        9: ("metadata_props*", "Strings"),
    },
    "Attribute": {
        1: ("name", "text"),
        2: ("f", "float"),
        3: ("i", "int"),
        4: ("s", "bytes"),
        5: ("t", "Tensor"),
        6: ("g", "Graph"),
        7: ("floats*", "float"),
        8: ("ints*", "int"),
        9: ("strings*", "bytes"),
        10: ("tensors*", "Tensor"),
        11: ("graphs*", "Graph"),
        13: ("doc_string", "text"),
        14: ("tp", "Type"),
        15: ("type_protos*", "Type"),
        20: ("type", "int"),
        21: ("ref_attr_name", "text"),
        22: ("sparse_tensor", "SparseTensor"),
        23: ("sparse_tensors*", "SparseTensor"),
    },
    "Tensor": {
        1: ("dims*", "int"),
        2: ("data_type", "int"),
        3: ("segment", "bytes"),
        4: ("float_data*", "bytes"),
        5: ("int32_data*", "bytes"),
        6: ("string_data*", "bytes"),
        7: ("int64_data*", "bytes"),
        8: ("name", "text"),
        9: ("raw_data", "bytes"),
        10: ("double_data*", "bytes"),
        11: ("uint64_data*", "bytes"),
        12: ("doc_string", "text"),
        13: ("external_data*", "Strings"),
        14: ("data_location", "int"),
        16: ("metadata_props*", "Strings"),
    },
    "SparseTensor": {1: ("values", "Tensor"), 2: ("indices", "Tensor"), 3: ("dims*", "int")},
    "Value": {
        1: ("name", "text"),
        2: ("type", "Type"),
        3: ("doc_string", "text"),
        4: ("metadata_props*", "Strings"),
    },
    "Type": {1: ("tensor_type", "TensorType"), 6: ("denotation", "text")},
    "TensorType": {1: ("elem_type", "int"), 2: ("shape", "Shape")},
    "Shape": {1: ("dim*", "Dimension")},
    "Dimension": {
        1: ("dim_value", "int"),
        2: ("dim_param", "text"),
        3: ("denotation", "text"),
    },
    "OperatorSet": {1: ("domain", "text"), 2: ("version", "int")},
    "Function": {
        1: ("name", "text"),
        4: ("input*", "text"),
        5: ("output*", "text"),
        6: ("attribute*", "text"),
        7: ("node*", "Node"),
        8: ("doc_string", "text"),
        9: ("opset_import*", "OperatorSet"),
        10: ("domain", "text"),
        11: ("attribute_proto*", "Attribute"),
        12: ("value_info*", "Value"),
        13: ("overload", "text"),
        14: ("metadata_props*", "Strings"),
    },
    "Training": {
        1: ("initialization", "Graph"),
        2: ("algorithm", "Graph"),
        3: ("initialization_binding*", "Strings"),
        4: ("update_binding*", "Strings"),
    },
    "Annotation": {1: ("tensor_name", "text"), 2: ("quant_parameter_tensor_names*", "Strings")},
    "Strings": _STRINGS,
}


@dataclass(frozen=True)
class Message:
    """One message: its kind, and the values of each field that is present, in order."""

    kind: str
    fields: dict[str, list[Any]]

    def all(self, name: str) -> list[Any]:
        """The values of a field, none if it is absent."""
        return self.fields.get(name, [])

    def one(self, name: str, default: Any) -> Any:
        """The value of a field that stands once at most."""
        return self.fields.get(name, [default])[0]
