"""Deployed policies: whether they still fit their traffic, and a refit where they do not."""
