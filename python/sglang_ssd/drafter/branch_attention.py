"""Which KV slots the rows of a branch step see (the tree is drawn in core/outcome_tree.py).

The columns are the line (prefix and chain, one slot per position) and then the branches' steps in
the order in which they were fed. Rotary position and column have nothing to do with each other.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from sglang_ssd.core.outcome_tree import IntArray, tree_mask
from sglang_ssd.core.speculation_cache import SpeculationCache
from sglang_ssd.drafter.model_step import BranchRows


def branch_rows(
    cache: SpeculationCache,
    *,
    line_slots: IntArray,  # [trunk_len] slots of positions 0 .. of the line
    new_slots: IntArray,  # [N] written by this step
) -> BranchRows:
    """The next branch step of one sequence."""
    prefix_len = cache.committed_len - 1
    tail = _tail_mask(
        tuple(cache.branch_positions.tolist()),
        len(line_slots) - prefix_len,
        cache.num_branch_steps + 1,
    )
    prefix = torch.ones((len(tail), prefix_len), dtype=torch.bool)
    return BranchRows(
        token_ids=cache.branch_tokens(),
        positions=cache.branch_rotary_positions(),
        kv_slots=np.concatenate([line_slots, *cache.branch_step_slots(), new_slots]),
        mask=torch.cat([prefix, tail], dim=1),
    )


@lru_cache(maxsize=1024)
def _tail_mask(positions: tuple[int, ...], chain_len: int, num_steps_fed: int) -> torch.Tensor:
    """A function of the branches' positions and the step alone: a few serve every round."""
    return tree_mask(
        torch.tensor(positions, dtype=torch.int64),
        chain_len=chain_len,
        num_steps_fed=num_steps_fed,
    )
