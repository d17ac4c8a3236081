"""The tree of one request in one round: which outcomes are guessed, and what each row may see.

Committed tokens end with the bonus at position P = committed_len - 1. The chain is [bonus, d1 ..
dK]; branch (j, c) guesses that j drafts are right and that the target then chooses c. Step s feeds
c (s = 0) or e_s, whose rotary position is P + j + 1 + s; its KV slot is any free one, so slot order
says nothing. K steps draft e1 .. eK, of which e_K stays without KV.

When a tree is begun d_K has no KV either, so position K has no guesses yet. Pass 0 feeds d_K beside
step 0 of the branches at positions < K; from then on those at position K follow one step behind.
Branches with equally many steps are a cohort, and to the mask d_K is the branch (K - 1, d_K): a row
sees the prefix, the chain up to d_j, its own earlier steps and itself. K = 2, fan_out [2, 1, 1]:

    pass 0      chain    new                   pass 1      chain      step 0     new
                b d1     d2 n0 n1 n2                       b d1 d2    n0 n1 n2   n0 n1 n2 n3
    d2          1  1      1  0  0  0           n0 (j=0)    1  0  0     1  0  0    1  0  0  0
    n0 (j=0)    1  0      0  1  0  0           n1 (j=0)    1  0  0     0  1  0    0  1  0  0
    n1 (j=0)    1  0      0  0  1  0           n2 (j=1)    1  1  0     0  0  1    0  0  1  0
    n2 (j=1)    1  1      0  0  0  1           n3 (j=2)    1  1  1     0  0  0    0  0  0  1

    pass 2      chain      step 0   new
                b d1 d2    n3       n3
    n3 (j=2)    1  1  1     1        1

So N branches take K + 1 passes and N * K + 1 rows. A chain that is fed to its end has one cohort,
K passes and N * K rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


class Cohort(msgspec.Struct, frozen=True):
    """Branches of one pass that have the same number of steps behind them."""

    positions: tuple[int, ...]  # the j of each branch
    num_steps_fed: int


def tree_mask(
    cohorts: Sequence[Cohort], *, chain_len: int
) -> torch.Tensor:  # [R, chain_len + earlier steps + R] bool
    """What the rows of a pass see of the fed chain, of earlier steps and of the pass itself.

    Earlier steps lie cohort by cohort, step by step. The prefix is visible to all.
    """
    positions = torch.tensor([j for cohort in cohorts for j in cohort.positions])
    chain = torch.arange(chain_len)[None, :] <= positions[:, None]
    earlier = [_identity(len(one.positions)).repeat(1, one.num_steps_fed) for one in cohorts]
    own_steps = torch.block_diag(*earlier)  # type: ignore[no-untyped-call]
    return torch.cat([chain, own_steps, _identity(len(positions))], dim=1)


def _identity(size: int) -> torch.Tensor:
    return torch.eye(size, dtype=torch.bool)


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
