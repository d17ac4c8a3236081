"""FR-01: above temperature 0 every position is drawn, on a CPU as elsewhere."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all, openai
from harness.draws import assert_same_draws, seeded
from harness.prompts import STORY, encode
from harness.reference import Reference
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_k": 8},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0.4},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.0},
)


def test_fr_01(kind: DrafterKind, server: Server, drafts_off: Reference) -> None:
    """Red when a verify takes the most likely token on a CPU, or a draw depends on the drafts, or
    on the filters of the other rows.

    Every batch has all the settings beside each other. That the draws without drafts follow the
    target's probabilities is test_sampling_law.py.
    """
    by_setting = [seeded(server.spec.model, 6, params) for params in SETTINGS]
    cases = [case for mixed in zip(*by_setting, strict=True) for case in mixed]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=len(SETTINGS))
    assert_drafting(kind, counter.since())
    assert_same_draws(drafts_off, cases, answers)


def test_fr_01_without_a_seed(server: Server) -> None:
    """Red when only the prefill's token is drawn and the rest follows from it."""
    params = {"temperature": 1.0, "top_k": 4, "max_new_tokens": 6}
    case = Request(encode(server.spec.model, STORY), params)
    after_first = defaultdict(set)
    for answer in generate_all(server.url, [case] * 16, concurrency=8):
        after_first[answer.output_ids[0]].add(tuple(answer.output_ids[1:]))
    assert max(len(rest) for rest in after_first.values()) > 1
    body = {"prompt": STORY, "max_tokens": 6, "temperature": 1.0}
    texts = {openai(server.url, "completions", body)["choices"][0]["text"] for _ in range(6)}
    assert len(texts) > 1
