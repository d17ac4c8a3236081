"""How much memory this process holds, and how much of it is to be KV."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CPU_KV_BYTES = 1 << 30


class ModelSizes(Protocol):
    """The fields of SGLang's ModelConfig that size its KV."""

    num_attention_layers: int
    head_dim: int
    dtype: torch.dtype

    def get_total_num_kv_heads(self) -> int: ...


def cpu_kv_slots(sizes: ModelSizes) -> int:
    """As many as 1 GiB holds: main memory is shared with the target."""
    num_heads = sizes.num_attention_layers * sizes.get_total_num_kv_heads()
    return _CPU_KV_BYTES // (2 * num_heads * sizes.head_dim * sizes.dtype.itemsize)


def resident_bytes() -> int:
    """Of main memory, as the kernel counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def device_bytes() -> int:
    """Of the accelerator, as torch has reserved it; 0 on a CPU."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
