"""How many guesses of the bonus token each accept position gets (paper, Theorem 12).

A fan-out has num_steps + 1 counts: position j < num_steps is "j drafts right, then something else",
the last position is "all right". Its sum is the number of branches that the drafter steps at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal


def resolve_fan_out(
    *,
    num_steps: int,
    fan_out: Sequence[int],
    policy: Literal["uniform", "geometric"],
    acceptance_rate: float,
    power_law_exponent: float,
) -> list[int]:
    """The num_steps + 1 counts that the settings mean. ValueError names what is wrong with them.

    One number stands for every position, num_steps + 1 numbers are taken as they are; the geometric
    policy then spreads the same number of branches by Theorem 12.
    """
    reasons = fan_out_reasons(fan_out, num_steps=num_steps)
    if reasons:
        raise ValueError("; ".join(reasons))
    counts = list(fan_out)
    if len(fan_out) == 1:
        counts = uniform_fan_out(num_steps=num_steps, fan_out=fan_out[0])
    if policy == "uniform":
        return counts
    return geometric_fan_out(
        num_steps=num_steps,
        num_branches=sum(counts),
        acceptance_rate=acceptance_rate,
        power_law_exponent=power_law_exponent,
    )


def fan_out_reasons(fan_out: Sequence[int], *, num_steps: int) -> list[str]:
    """Reasons against these counts for num_steps; empty if there are none."""
    wrong = []
    if len(fan_out) not in (1, num_steps + 1):
        wrong.append(
            f"{len(fan_out)} numbers; allowed is one, or {num_steps + 1} of them "
            "(--speculative-num-steps + 1)"
        )
    if any(count < 0 for count in fan_out):
        wrong.append("a negative number; none may be")
    if fan_out and not any(fan_out):
        wrong.append("all zero; one at least must be positive")
    shown = ",".join(map(str, fan_out))
    return [f"--ssd-fan-out {shown}: {one}" for one in wrong]


def uniform_fan_out(*, num_steps: int, fan_out: int) -> list[int]:
    """The same count at every position."""
    return [fan_out] * (num_steps + 1)


def geometric_fan_out(
    *, num_steps: int, num_branches: int, acceptance_rate: float, power_law_exponent: float
) -> list[int]:
    """Theorem 12: least miss probability when a position with F guesses misses with F ** -exponent.

    Real counts are F_0 * b ** j with b = a ** (1 / (1 + r)), the last one times
    (1 - a) ** (-1 / (1 + r)); rounding by largest remainder keeps the sum at num_branches.
    """
    root = 1.0 / (1.0 + power_law_exponent)
    weights = [acceptance_rate ** (position * root) for position in range(num_steps + 1)]
    weights[-1] *= (1.0 - acceptance_rate) ** -root
    scale = num_branches / sum(weights)
    counts = [math.floor(weight * scale) for weight in weights]
    remainders = [weight * scale - count for weight, count in zip(weights, counts, strict=True)]
    largest = sorted(range(num_steps + 1), key=lambda position: -remainders[position])
    for position in largest[: num_branches - sum(counts)]:
        counts[position] += 1
    return counts


def fold_fan_out(fan_out: Sequence[int], *, num_drafts: int) -> list[int]:
    """Fan-out of a round with only num_drafts drafts: counts beyond go to its last position.

    With no drafts at all (a miss under backup none, the first round) position 0 gets every branch.
    """
    return [*fan_out[:num_drafts], sum(fan_out[num_drafts:])]
