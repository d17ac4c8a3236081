"""Kernels of sglang-ssd: each op is a checked wrapper, a kernel and a torch reference."""
