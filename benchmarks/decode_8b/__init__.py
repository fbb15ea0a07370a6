"""The decode loop at the size of an 8B model: what is decoded, how it is timed and split."""
