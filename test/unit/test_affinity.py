"""How cores are shared between target and drafter, and what is refused about it."""

from __future__ import annotations

import pytest

from sglang_ssd.config import SsdConfig
from sglang_ssd.platform.affinity import (
    CoreSplit,
    core_reasons,
    format_cores,
    parse_cores,
    share_of,
    split_cores,
)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", (0,)), ("0-2,5", (0, 1, 2, 5)), ("5, 0-1", (0, 1, 5)), ("3-3", (3,))],
)
def test_cores_as_text(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores
    assert parse_cores(format_cores(cores)) == cores


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is neither a core number nor a range"),
        ("a", "'a' is neither a core number nor a range"),
        ("1-", "'1-' is neither a core number nor a range"),
        ("-1", "'-1' is neither a core number nor a range"),
        ("2-1", "range '2-1' runs backwards"),
        ("0,,1", "'' is neither a core number nor a range"),
        ("0-1-2", "'0-1-2' is neither a core number nor a range"),
    ],
)
def test_wrong_texts(text: str, says: str) -> None:
    """Red when a text is taken for cores that it does not name, or refused without its part."""
    [reason] = core_reasons(SsdConfig(target_cores=text), (0, 1))
    allowed = "must be auto, or core numbers such as 0-2,5"
    assert reason == f"--ssd-target-cores {text!r}: {says}; {allowed}"


def test_cores_that_are_not_lent_are_named() -> None:
    [reason] = core_reasons(SsdConfig(drafter_cores="1-4"), (0, 1, 3))
    assert reason == "--ssd-drafter-cores '1-4': no core 2,4 here; this process may use 0-1,3"


@pytest.mark.parametrize(
    ("num_lent", "num_target", "num_drafter"),
    [(2, 1, 1), (3, 2, 1), (4, 3, 1), (8, 6, 2), (12, 8, 4)],
)
def test_automatic_sides_are_disjoint(num_lent: int, num_target: int, num_drafter: int) -> None:
    split = split_cores(SsdConfig(), tuple(range(num_lent)))
    assert (len(split.target), len(split.drafter)) == (num_target, num_drafter)
    assert not set(split.target) & set(split.drafter)


def test_one_core_is_shared() -> None:
    assert split_cores(SsdConfig(), (7,)) == CoreSplit((7,), (7,))


def test_the_other_side_gets_the_rest() -> None:
    lent = (0, 1, 2, 3)
    assert split_cores(SsdConfig(target_cores="1-2"), lent).drafter == (0, 3)
    assert split_cores(SsdConfig(drafter_cores="0"), lent).target == (1, 2, 3)
    assert split_cores(SsdConfig(target_cores="0-3"), lent).drafter == lent


def test_without_a_drafter_the_target_has_every_core() -> None:
    assert split_cores(SsdConfig(), (0, 1), drafter_beside=False).target == (0, 1)
    config = SsdConfig(target_cores="1")
    assert split_cores(config, (0, 1), drafter_beside=False).target == (1,)


@pytest.mark.parametrize(
    ("num_cores", "shares"),
    [
        (1, [(0,), (0,)]),
        (2, [(0,), (1,)]),
        (5, [(0, 1), (2, 3, 4)]),
        (2, [(0,), (1,), (0,)]),
    ],
)
def test_replicas_divide_the_cores(num_cores: int, shares: list[tuple[int, ...]]) -> None:
    cores = tuple(range(num_cores))
    num_shares = len(shares)
    assert [share_of(cores, index=i, num_shares=num_shares) for i in range(num_shares)] == shares
