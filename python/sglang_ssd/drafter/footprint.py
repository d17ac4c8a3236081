"""How much memory this process holds."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Of main memory, as the kernel counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def device_bytes() -> int:
    """Of the accelerator, as torch has reserved it; 0 on a CPU."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
