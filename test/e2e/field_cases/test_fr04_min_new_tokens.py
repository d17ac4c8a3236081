"""FR-04: EOS and stop ids are masked exactly while the output is too short, row by row."""

from __future__ import annotations

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all
from harness.prompts import CHAT, load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server

STOP_AT = 5


def test_fr_04(kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when the mask is one row too long or too short, or rounds are counted for tokens."""
    prompts = load_prompts(server.spec.model, 3)
    cases = []
    for prompt in prompts:
        (free,) = reference.answers([Request(prompt.input_ids, {"max_new_tokens": STOP_AT + 1})])
        stop = {"stop_token_ids": [free.output_ids[-1]], "max_new_tokens": 40}
        cases += [
            Request(prompt.input_ids, {**stop, "min_new_tokens": shortest})
            for shortest in range(13)
        ]
    cases += [
        Request(CHAT, {"max_new_tokens": 64, "min_new_tokens": shortest})
        for shortest in (0, 3, 20, 64)
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=6)
    assert_drafting(kind, counter.since())
    assert_same(reference, cases, answers)
    for case, answer in zip(cases, answers, strict=True):
        assert len(answer.output_ids) >= case.params["min_new_tokens"]
    if kind == "self":
        assert sum(answer.num_correct_drafts for answer in answers[-4:]) > 0
