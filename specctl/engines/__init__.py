"""Serving engines: what they can be told, what they log, and a plugin that runs inside vLLM."""
