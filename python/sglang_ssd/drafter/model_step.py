"""What the loop needs of a draft model: two kinds of forward, rows in, logits out.

Slots are indices into the model's KV storage; the request table decides which is whose, the model
only writes and reads them. Slot 0 is padding and belongs to nobody. Nothing here samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from sglang_ssd.core.outcome_tree import IntArray


class ExtendRow(msgspec.Struct, frozen=True):
    """The next tokens of one request's line, at positions start .. start + T - 1; causal."""

    token_ids: IntArray  # [T]
    start: int
    kv_slots: IntArray  # [start + T] slots of positions 0 .., the last T are written


class BranchRows(msgspec.Struct, frozen=True):
    """One pass over the tree of one request: its branches' next step, a draft of its chain."""

    token_ids: IntArray  # [R]
    positions: IntArray  # [R] rotary
    kv_slots: IntArray  # [M] whatever some row sees, the R slots that are written last
    mask: torch.Tensor  # [R, M] bool


class ModelStep(Protocol):
    """A draft model with KV storage."""

    vocab_size: int
    context_len: int
    total_slots: int  # without the padding slot: slots 1 .. total_slots

    def extend(self, rows: Sequence[ExtendRow]) -> torch.Tensor:  # [B, V] float32
        """Prefill slices, catch-up and decodes; logits after the last token of each row."""
        ...

    def branch_step(self, rows: Sequence[BranchRows]) -> torch.Tensor:  # [sum R, V] float32
        """Logits of every row, in order."""
        ...
