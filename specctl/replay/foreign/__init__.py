"""Logs that other tools wrote: per-position acceptance to replay, counters to summarise."""
