"""FR-20: programs of the frontend language end as they do on the plain server."""

from __future__ import annotations

import re
from typing import Any

import pytest

from harness.frontend import (
    CITIES,
    METHODS,
    choose,
    choose_unconditionally,
    run_batch,
    run_streamed,
    tour,
)
from harness.idle import assert_drained
from harness.reference import Reference
from harness.rounds import RoundCounter
from harness.server import Server

GENERATED = ("intro", "year", "short")
MAX_DIFFERENCE = 1e-3


def what_it_says(state: Any) -> dict[str, Any]:
    assert state.error() is None
    counts = {
        name: {
            key: state.get_meta_info(name)[key] for key in ("completion_tokens", "finish_reason")
        }
        for name in GENERATED
    }
    return {"text": state.text(), "counts": counts, **{name: state[name] for name in METHODS}}


def scores(state: Any, name: str) -> list[float]:
    """Of every token of every choice. What a scoring request decodes itself is not looked at."""
    meta = state.get_meta_info(name)
    tokens = [entry[0] for choice in meta["input_token_logprobs"] for entry in choice]
    return [*meta["normalized_prompt_logprobs"], *tokens]


def test_fr_20(server: Server, reference: Reference) -> None:
    """Red when forks of one prefix disturb each other, or a choice is scored by other tokens."""
    got, expected = (run_batch(tour, one, CITIES) for one in (server, reference.server))
    for have, want in zip(got, expected, strict=True):
        assert what_it_says(have) == what_it_says(want)
        assert re.fullmatch(r"[12][0-9]{3}", have["year"])
        for name in METHODS:
            assert scores(have, name) == pytest.approx(scores(want, name), abs=MAX_DIFFERENCE)
    assert_drained(server)


def test_fr_20_streamed(server: Server, reference: Reference) -> None:
    """Red when the pieces that a program sees do not join to what it holds at the end."""
    have, want = (run_streamed(tour, one, CITIES[0]) for one in (server, reference.server))
    assert have.text() == want.text()
    assert {name: have[name] for name in METHODS} == {name: want[name] for name in METHODS}


def test_fr_20_scoring(server: Server, reference: Reference) -> None:
    """Red when a scoring request opens a sequence, or a cached prefix changes a score."""
    counter = RoundCounter(server)
    for _ in range(2):
        got, expected = (run_batch(choose, one, CITIES[:4]) for one in (server, reference.server))
        for have, want in zip(got, expected, strict=True):
            assert have.text() == want.text()
            assert scores(have, "where") == pytest.approx(scores(want, "where"), abs=MAX_DIFFERENCE)
    assert counter.since().rounds == 0
    assert_drained(server)


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_fr_20_unconditional(server: Server, reference: Reference) -> None:
    """Red when we answer a way to choose that SGLang's client cannot use, or fail otherwise."""
    have, want = (
        run_batch(choose_unconditionally, one, CITIES[:1])[0].error()
        for one in (server, reference.server)
    )
    assert want is not None
    assert (type(have), str(have)) == (type(want), str(want))
