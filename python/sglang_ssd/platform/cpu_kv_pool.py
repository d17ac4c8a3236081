"""SGLang's MHA KV pool without its Triton parts, which no CPU can launch."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """The same buffers; slots are moved by index copies."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: Tensor, src_loc: Tensor) -> None:  # [n] int64 each
        for cache in (*self.k_buffer, *self.v_buffer):
            cache.index_copy_(0, tgt_loc, cache.index_select(0, src_loc))
