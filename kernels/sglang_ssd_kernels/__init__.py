"""Kernels of sglang-ssd: each op is a checked wrapper, a Triton body and a torch reference."""
