"""FR-03: every verify row counts the tokens before it, those of its own run included."""

from __future__ import annotations

from typing import Any

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate_all
from harness.draws import assert_same_draws, seeded
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server

NUM_TOKENS = 64
PENALTIES: dict[str, list[dict[str, Any]]] = {
    "frequency": [{"frequency_penalty": value} for value in (-1.0, 0.5, 2.0)],
    "presence": [{"presence_penalty": value} for value in (-1.0, 0.5, 2.0)],
    "repetition": [{"repetition_penalty": value} for value in (1.1, 1.5)],
    "mixed": [
        {"frequency_penalty": 0.3, "presence_penalty": 0.7},
        {"frequency_penalty": 1.0, "min_new_tokens": 40},
        {"repetition_penalty": 1.3, "logit_bias": {"260": 3.0, "28": -5.0}},
    ],
}
ALL_THREE = {"frequency_penalty": 0.3, "presence_penalty": 0.7, "repetition_penalty": 1.2}
"""Without overlap, SGLang's order of these differs from process to process."""


def test_fr_03(
    kind: DrafterKind, serial_server: Server, reference: Reference, figures: dict[str, Any]
) -> None:
    """Red when a row repeats another's penalty, an accepted run is counted in part, or a neighbour
    is penalised too.

    Four lengths and values in a batch. Neither server has overlap, under which SGLang's own
    penalties lag one token.
    """
    for name, values in PENALTIES.items():
        counter = RoundCounter(serial_server)
        answers = assert_penalised_alike(serial_server, reference, values)
        assert_drafting(kind, counter.since())
        num_correct = sum(answer.num_correct_drafts for answer in answers)
        num_tokens = sum(len(answer.output_ids) for answer in answers)
        figures.update({f"{name} correct drafts": num_correct, f"{name} tokens": num_tokens})
        if kind == "self":
            for answer in answers:
                assert answer.num_correct_drafts > len(answer.output_ids) / 2


def test_fr_03_with_overlap(kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when our penalties lag under overlap as SGLang's do."""
    counter = RoundCounter(server)
    assert_penalised_alike(server, reference, PENALTIES["mixed"])
    assert_drafting(kind, counter.since())


def assert_penalised_alike(
    server: Server, reference: Reference, values: list[dict[str, Any]]
) -> list[Answer]:
    """The penalised answers; every fourth request is a plain one."""
    cases = [
        Request(
            prompt.input_ids,
            {"max_new_tokens": NUM_TOKENS - 5 * index}
            | (values[index % len(values)] if index % 4 != 3 else {}),
        )
        for index, prompt in enumerate(load_prompts(server.spec.model, 8))
    ]
    answers = generate_all(server.url, cases, concurrency=4)
    assert_same(reference, cases, answers)
    return [answer for index, answer in enumerate(answers) if index % 4 != 3]


def test_fr_03_sampled(kind: DrafterKind, server: Server, drafts_off: Reference) -> None:
    """Red when a draw depends on the drafts through a penalty. Both servers have overlap."""
    sampled = [
        case
        for value in (PENALTIES["frequency"][2], PENALTIES["repetition"][1], ALL_THREE)
        for case in seeded(server.spec.model, 4, {"temperature": 0.8, "top_p": 0.9, **value})
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, sampled, concurrency=4)
    assert_drafting(kind, counter.since())
    assert_same_draws(drafts_off, sampled, answers)
