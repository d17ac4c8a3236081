"""The algorithm as pure functions and small state: no process, no SGLang; torch, numpy, msgspec and
our kernels alone."""
