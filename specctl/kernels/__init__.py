"""Operations on plain tensors: one folder an op, a torch reference and, on CUDA, a fused twin."""
