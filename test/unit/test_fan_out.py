"""Fan-out policies: what --ssd-fan-out means, and Theorem 12 with integers."""

from itertools import product

import pytest

from sglang_ssd.core.fan_out import (
    fold_fan_out,
    geometric_fan_out,
    resolve_fan_out,
    uniform_fan_out,
)


def resolve(fan_out: list[int], policy: str = "uniform", num_steps: int = 4) -> list[int]:
    return resolve_fan_out(
        num_steps=num_steps,
        fan_out=fan_out,
        policy=policy,
        acceptance_rate=0.8,
        power_law_exponent=1.0,
    )


@pytest.mark.parametrize(
    ("acceptance_rate", "exponent", "num_steps", "num_branches", "expected"),
    [
        (0.8, 1.0, 7, 24, [4, 3, 3, 3, 3, 2, 2, 4]),
        (0.8, 2.0, 7, 24, [4, 3, 3, 3, 3, 2, 2, 4]),
        (0.7, 1.5, 4, 15, [4, 3, 3, 2, 3]),
        (0.9, 1.0, 7, 24, [3, 3, 3, 3, 2, 2, 2, 6]),
    ],
)
def test_geometric_matches_theorem_12(acceptance_rate, exponent, num_steps, num_branches, expected):
    counts = geometric_fan_out(
        num_steps=num_steps,
        num_branches=num_branches,
        acceptance_rate=acceptance_rate,
        power_law_exponent=exponent,
    )
    assert counts == expected


@pytest.mark.parametrize("num_branches", [1, 2, 7, 24, 100])
@pytest.mark.parametrize("acceptance_rate", [0.01, 0.5, 0.99])
def test_geometric_keeps_the_sum(num_branches, acceptance_rate):
    for num_steps, exponent in product([1, 4, 16], [0.3, 1.0, 5.0]):
        counts = geometric_fan_out(
            num_steps=num_steps,
            num_branches=num_branches,
            acceptance_rate=acceptance_rate,
            power_law_exponent=exponent,
        )
        assert len(counts) == num_steps + 1
        assert sum(counts) == num_branches
        assert min(counts) >= 0
        assert sorted(counts[:-1], reverse=True) == counts[:-1]


def test_geometric_is_no_worse_than_any_move_of_one_guess():
    """Least miss probability among allocations that differ by one guess, up to the rounding."""
    rate, exponent, num_steps = 0.8, 1.0, 4
    reach = [(1 - rate) * rate**k for k in range(num_steps)] + [rate**num_steps]

    def miss(counts: list[int]) -> float:
        return sum(p * c**-exponent for p, c in zip(reach, counts, strict=True))

    best = geometric_fan_out(
        num_steps=num_steps, num_branches=30, acceptance_rate=rate, power_law_exponent=exponent
    )
    for source, sink in product(range(num_steps + 1), repeat=2):
        moved = list(best)
        moved[source] -= 1
        moved[sink] += 1
        assert miss(best) <= miss(moved) * 1.01


def test_one_number_stands_for_every_position():
    assert resolve([3]) == uniform_fan_out(num_steps=4, fan_out=3) == [3, 3, 3, 3, 3]


def test_explicit_list_is_taken_as_it_is():
    assert resolve([4, 1, 1, 0, 2]) == [4, 1, 1, 0, 2]


def test_geometric_policy_spreads_the_same_number_of_branches():
    assert resolve([3], "geometric") == [3, 3, 3, 2, 4]
    assert sum(resolve([10, 0, 0, 0, 0], "geometric")) == 10


NUMBERS = "numbers; allowed is one, or 5 of them (--speculative-num-steps + 1)"


@pytest.mark.parametrize(
    ("fan_out", "reason"),
    [
        ([1, 2], f"2 {NUMBERS}"),
        ([], f"0 {NUMBERS}"),
        ([1, 2, 3, 4, 5, 6], f"6 {NUMBERS}"),
        ([2, -1, 2, 2, 2], "a negative number; none may be"),
        ([0], "all zero; one at least must be positive"),
        ([0, 0, 0, 0, 0], "all zero; one at least must be positive"),
    ],
)
def test_refusal_names_flag_value_and_what_is_allowed(fan_out, reason):
    with pytest.raises(ValueError, match="--ssd-fan-out") as refusal:
        resolve(fan_out)
    assert str(refusal.value) == f"--ssd-fan-out {','.join(map(str, fan_out))}: {reason}"


def test_short_chains_keep_every_branch():
    assert fold_fan_out([4, 3, 2, 1], num_drafts=0) == [10]
    assert fold_fan_out([4, 3, 2, 1], num_drafts=2) == [4, 3, 3]
    assert fold_fan_out([4, 3, 2, 1], num_drafts=3) == [4, 3, 2, 1]
