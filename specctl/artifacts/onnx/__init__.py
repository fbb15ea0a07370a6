"""ONNX without onnx: the few messages that a twin consists of, written by our own code.

`schema` is the table of messages, `wire` protobuf's encoding, `build` the nouns of a graph.
"""
