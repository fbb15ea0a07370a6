"""Tests of fused kernels as Python: only collected where `TRITON_INTERPRET=1` stood before Triton
was imported. `tests/kernels/test_interpreted.py` runs each file in a process of its own."""
