"""The tree of one request in one round: which outcomes are guessed, and what each branch may see.

Committed tokens end with the bonus at position P = committed_len - 1. The chain is [bonus, d1 ..
dK]; branch (j, c) guesses that j drafts are right and that the target then chooses c. Step s feeds
c (s = 0) or e_s, whose rotary position is P + j + 1 + s; its KV slot is any free one, so slot order
says nothing. A branch row sees the prefix, the chain up to d_j and its own earlier steps (K = 2,
fan_out [2, 1, 1]):

                chain      step 0        step 1
                b d1 d2    n0 n1 n2 n3   n0 n1 n2 n3
    n0 (j=0)    1  0  0     1  0  0  0    1  0  0  0
    n1 (j=0)    1  0  0     0  1  0  0    0  1  0  0
    n2 (j=1)    1  1  0     0  0  1  0    0  0  1  0
    n3 (j=2)    1  1  1     0  0  0  1    0  0  0  1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


def tree_mask(
    branch_positions: torch.Tensor,  # [N] int64, the j of each branch
    *,
    chain_len: int,
    num_steps_fed: int,
) -> torch.Tensor:  # [N, chain_len + num_steps_fed * N] bool
    """What the rows of the newest step see of chain and branches; the prefix is visible to all."""
    num_branches = branch_positions.shape[0]
    chain = torch.arange(chain_len, device=branch_positions.device)
    own = torch.eye(num_branches, dtype=torch.bool, device=branch_positions.device)
    return torch.cat(
        [chain[None, :] <= branch_positions[:, None], own.repeat(1, num_steps_fed)], dim=1
    )


def rotary_positions(
    branch_positions: IntArray,  # [N]
    *,
    committed_len: int,
    step: int,
) -> IntArray:  # [N]
    """Rotary position, and noise position, of the tokens that `step` feeds."""
    return branch_positions + (committed_len + step)


def choose_branches(
    drafts: Sequence[int],  # d1 .. dm of the chain
    candidates: Sequence[IntArray],  # [j] -> [C] best tokens after chain position j, best first
    *,
    fan_out: Sequence[int],  # m + 1 counts
) -> tuple[IntArray, IntArray, IntArray]:  # positions, tokens, ranks; [N] each
    """The fan_out[j] best guesses at each position j, without d_{j+1}.

    Where d_{j+1} was verified, the target cannot choose it after rejecting it; where it was not (a
    late or short reply), the chain itself is its branch. A position without candidates gets none.
    """
    positions: list[int] = []
    tokens: list[int] = []
    ranks: list[int] = []
    for position, (count, row) in enumerate(zip(fan_out, candidates, strict=False)):
        on_chain = drafts[position] if position < len(drafts) else None
        guesses = [token for token in row.tolist() if token != on_chain][:count]
        positions.extend([position] * len(guesses))
        tokens.extend(guesses)
        ranks.extend(range(len(guesses)))
    return _int_array(positions), _int_array(tokens), _int_array(ranks)


def _int_array(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
