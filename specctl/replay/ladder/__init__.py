"""The ladder: every policy between plain decoding and the best that is possible, on one log."""
