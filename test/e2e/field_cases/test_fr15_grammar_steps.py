"""FR-15: a grammar is one step on for every committed token, and ends with its last one."""

from __future__ import annotations

from harness.checkpoints import DrafterKind
from harness.client import Request, generate, generate_all
from harness.grammars import CONSTRAINTS, assert_keeps_to
from harness.prompts import STORY, encode
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter
from harness.server import Server

QUESTION = "Give a JSON object:"


def assert_in_step(server: Server, reference: Reference) -> int:
    """Alone and all at once, with drafts; returns how many were accepted under a grammar."""
    cases = [
        Request(encode(server.spec.model, text), {"max_new_tokens": 48, **constraint})
        for constraint in (*CONSTRAINTS, {"regex": "( [a-z]+){8}[.]"})
        for text in (QUESTION, STORY)
    ]
    past_the_end = {"regex": " (yes|no)", "ignore_eos": True, "max_new_tokens": 12}
    cases += [Request(encode(server.spec.model, QUESTION), past_the_end)]
    counter = RoundCounter(server)
    alone = [generate(server.url, case) for case in cases]
    together = generate_all(server.url, cases, concurrency=6)
    assert counter.since().drafted_rows > 0, "all decoded plainly"
    for answers in (alone, together):
        assert_same(reference, cases, answers)
        for case, answer in zip(cases, answers, strict=True):
            assert answer.finish["type"] in ("stop", "length")
            if answer.finish["type"] == "stop" and "ignore_eos" not in case.params:
                assert_keeps_to(case.params, answer.text)
    return sum(answer.num_correct_drafts for answer in (*alone, *together))


def test_fr_15(kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when a grammar is advanced over rejected drafts, twice over a token, or past its end."""
    num_correct = assert_in_step(server, reference)
    assert kind != "self" or num_correct > 0


def test_fr_15_without_overlap(
    kind: DrafterKind, serial_server: Server, reference: Reference
) -> None:
    """Red when a grammar is in step only if the next round starts before a round is handled."""
    num_correct = assert_in_step(serial_server, reference)
    assert kind != "self" or num_correct > 0
