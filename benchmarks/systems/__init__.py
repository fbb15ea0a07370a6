"""The table of systems: every policy family on the same held-out prompts, beside its controls."""
