"""The study of docs/systems.md: the five systems on one pair."""
