"""Tests of fused kernels on a GPU; skipped and counted where there is none."""
