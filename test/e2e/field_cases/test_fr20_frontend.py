"""FR-20: programs of the frontend language end as they do on the plain server."""

from __future__ import annotations

import re
from typing import Any

import pytest

from harness.checkpoints import DrafterKind
from harness.client import Answer
from harness.frontend import (
    CITIES,
    METHODS,
    choose,
    gather,
    interview,
    run_batch,
    run_streamed,
    tour,
)
from harness.idle import assert_drained, drafter_status
from harness.logprobs import MAX_DIFFERENCE, assert_same_logprobs
from harness.reference import Reference
from harness.rounds import RoundCounter
from harness.server import Server

GENERATED = ("intro", "year", "short")
USABLE = "by length"
"""The others reckon with a first token's logprob, of which SGLang gives none."""


def what_it_says(state: Any) -> dict[str, Any]:
    assert state.error() is None
    counts = {
        name: {
            key: state.get_meta_info(name)[key] for key in ("completion_tokens", "finish_reason")
        }
        for name in GENERATED
    }
    return {"text": state.text(), "counts": counts, "large": state["large"]}


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
        assert scores(have, "large") == pytest.approx(scores(want, "large"), abs=MAX_DIFFERENCE)
    assert_drained(server)


def what_it_holds(state: Any) -> dict[str, Any]:
    assert state.error() is None
    executor = state.stream_executor
    told = {name: meta for name, meta in executor.meta_info.items() if "finish_reason" in meta}
    counts = {name: (m["completion_tokens"], m["finish_reason"]) for name, m in told.items()}
    return {"text": state.text(), "variables": executor.variables, "counts": counts}


def scored(state: Any) -> Answer:
    return Answer(text="", output_ids=[], meta_info=state.get_meta_info("scored"))


def test_fr_20_typed_and_joined(kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when what a program gets by a role, a type, a schema, a thought, a choice of gen, a copy
    or a joined group is not what the plain server gives, or the logprobs it asks for are not."""
    counter = RoundCounter(server)
    pairs = [
        pair
        for program in (interview, gather)
        for pair in zip(
            *(run_batch(program, one, CITIES[:4]) for one in (server, reference.server)),
            strict=True,
        )
    ]
    for have, want in pairs:
        assert what_it_holds(have) == what_it_holds(want)
    for have, want in pairs[:4]:
        assert_same_logprobs(scored(want), scored(have), side="output")
        assert len(scored(have).meta_info["output_top_logprobs"]) > 1
        assert re.fullmatch(r"[-+]?[0-9]+", have["people"])
        assert have["old"] in ("True", "False")
        assert have["thought_reasoning_content"]
    assert kind == "random" or counter.since().correct_drafts > 0
    assert_drained(server)


@pytest.mark.parametrize("program", [tour, interview], ids=["tour", "interview"])
def test_fr_20_streamed(program: Any, server: Server, reference: Reference) -> None:
    """Red when the pieces that a program sees do not join to what it holds at the end."""
    have, want = (run_streamed(program, one, CITIES[0]) for one in (server, reference.server))
    assert have.text() == want.text()
    assert have["large"] == want["large"]


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
@pytest.mark.parametrize("method", METHODS)
def test_fr_20_scoring(method: str, server: Server, reference: Reference) -> None:
    """Red when a scoring request opens a sequence or has the drafter read its prompt, a cached
    prefix changes a score, or a way to choose that SGLang's client cannot use with the plain server
    fails otherwise with ours."""
    assert_drained(server)
    counter, read = RoundCounter(server), drafter_status(server).prefill_tokens
    for _ in range(2):
        got, expected = (
            run_batch(choose, one, CITIES[:4], method=method) for one in (server, reference.server)
        )
        for have, want in zip(got, expected, strict=True):
            assert repr(have.error()) == repr(want.error())
            assert (want.error() is None) == (method == USABLE)
            if want.error() is None:
                assert have.text() == want.text()
                assert scores(have, "where") == pytest.approx(
                    scores(want, "where"), abs=MAX_DIFFERENCE
                )
    assert counter.since().rounds == 0
    assert_drained(server)
    assert drafter_status(server).prefill_tokens == read
