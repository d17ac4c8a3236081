"""Which KV slots the rows of a tree's pass see (the tree is drawn in core/outcome_tree.py).

The columns are the line (prefix and chain, one slot per position), then what the rows' branches fed
in earlier steps, then the rows themselves. Rotary position and column have nothing to do with each
other.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from sglang_ssd.core.outcome_tree import Cohort, IntArray, tree_mask
from sglang_ssd.core.speculation_cache import TreePass
from sglang_ssd.drafter.model_step import BranchRows


def branch_rows(
    tree_pass: TreePass,
    *,
    prefix_len: int,  # positions before the bonus
    line_slots: IntArray,  # [trunk_len] slots of positions 0 .. of the line
    new_slots: IntArray,  # [R] written by this pass
) -> BranchRows:
    """One sequence's part of a forward."""
    tail = _tail_mask(tree_pass.cohorts, len(line_slots) - prefix_len)
    prefix = torch.ones((len(tail), prefix_len), dtype=torch.bool)
    return BranchRows(
        token_ids=tree_pass.tokens,
        positions=tree_pass.positions,
        kv_slots=np.concatenate([line_slots, *tree_pass.earlier_slots, new_slots]),
        mask=torch.cat([prefix, tail], dim=1),
    )


@lru_cache(maxsize=1024)
def _tail_mask(cohorts: tuple[Cohort, ...], chain_len: int) -> torch.Tensor:
    """A function of the branches' positions and steps alone, so the same few serve every round."""
    return tree_mask(cohorts, chain_len=chain_len)
