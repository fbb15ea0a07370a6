"""ONNX without onnx: the few messages that a twin consists of, written and read by our own code.

`schema` is the table of messages, `wire` protobuf's encoding, `build` the nouns of a graph,
`decode` the reader of what strangers wrote, `rules` what it may hold. Nothing here imports onnx or
onnxruntime: a serving box needs neither to load an artifact.
"""
