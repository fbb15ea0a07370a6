"""One file a fit; splits and held-out reports."""
