"""FR-12: the prefill's token counts, is checked for stops, and costs the drafter nothing."""

from __future__ import annotations

from harness.client import Request, generate_all, generate_copies
from harness.idle import assert_drained, drafter_status
from harness.prompts import STORY, encode
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter
from harness.server import Server


def test_fr_12(server: Server, reference: Reference) -> None:
    """Red when the first token is dropped or not checked, or is counted twice."""
    story = encode(server.spec.model, STORY)
    (two,) = reference.answers([Request(story, {"max_new_tokens": 2})])
    stops = [{"stop_token_ids": [token]} for token in two.output_ids]
    cases = [
        Request(story, {"max_new_tokens": length, **stop})
        for length in (0, 1, 2)
        for stop in ({}, *stops, {"stop": [STORY[:4]]})
    ]
    answers = generate_all(server.url, cases)
    assert_same(reference, cases, answers)
    assert [len(answer.output_ids) for answer in answers[4:6]] == [1, 1]
    assert_drained(server)


def test_fr_12_never_reaches_the_drafter(server: Server) -> None:
    """Red when a request without a round to run opens a sequence, or has the drafter read it.

    SGLang sends the prompt of several copies ahead, as a request of its own without a token.
    """
    story = encode(server.spec.model, STORY)
    assert_drained(server)
    counter, read = RoundCounter(server), drafter_status(server).prefill_tokens
    generate_all(server.url, [Request(story, {"max_new_tokens": length}) for length in (0, 1)])
    copies = generate_copies(server.url, Request(story, {"max_new_tokens": 1, "n": 2}))
    assert [len(copy.output_ids) for copy in copies] == [1, 1]
    assert server.healthy()
    assert counter.since().rounds == 0
    assert_drained(server)
    assert drafter_status(server).prefill_tokens == read
