"""Training of an EAGLE-3 head for any Llama-type target, from text that the target wrote."""
