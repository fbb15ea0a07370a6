"""The text that the embedded pair's target is trained on: documents and generated problems."""
