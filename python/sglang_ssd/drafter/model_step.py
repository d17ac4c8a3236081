"""What the loop needs of a draft model: two kinds of forward, rows in, logits out.

Slots are indices into the model's KV storage; the request table decides which is whose, the model
only writes and reads them. Slot 0 is padding and belongs to nobody. Nothing here samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch

from sglang_ssd.core.outcome_tree import IntArray

_WARM_UP_TOKENS = 4


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


def warm_up(model: ModelStep) -> None:
    """A forward of each kind on slots that are free yet, so that no request waits for what the
    first of a kind compiles or sets up."""
    slots = np.arange(1, _WARM_UP_TOKENS + 1, dtype=np.int64)
    tokens = np.zeros_like(slots)
    model.extend([ExtendRow(token_ids=tokens, start=0, kv_slots=slots)])
    model.extend([ExtendRow(token_ids=tokens[:1], start=_WARM_UP_TOKENS - 1, kv_slots=slots)])
    mask = torch.eye(_WARM_UP_TOKENS, dtype=torch.bool)
    model.branch_step([BranchRows(token_ids=tokens, positions=tokens, kv_slots=slots, mask=mask)])
