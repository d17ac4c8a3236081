"""FR-33: a prompt in chunks is drafted for as one, whole and from its end on."""

from __future__ import annotations

from typing import Any

from harness.checkpoints import DrafterKind
from harness.client import Request, generate, generate_all
from harness.prompts import ids_of_length
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter
from harness.server import Server

FITS = (15, 16)
"""Lengths of prompts that the shared server's chunks of 16 do not split."""
SPLIT = (17, 33, 100)


def test_fr_33(
    kind: DrafterKind, server: Server, reference: Reference, figures: dict[str, Any]
) -> None:
    """Red when the drafter's prompt misses a chunk or has a guess at a border, or drafts before the
    last chunk. Mixed chunks are refused at start: docs/support.md and its test."""
    params = {"max_new_tokens": 48, "ignore_eos": True}
    cases = {
        length: Request(ids_of_length(server.spec.model, length), params)
        for length in (*FITS, *SPLIT)
    }
    drafts = {}
    for lengths in (FITS, SPLIT):
        counter = RoundCounter(server)
        chosen = [cases[length] for length in lengths]
        assert_same(reference, chosen, [generate(server.url, case) for case in chosen])
        rounds = counter.since()
        assert rounds.on_time_rows > 0
        drafts[lengths] = rounds.correct_drafts / rounds.on_time_rows
    figures.update(whole=drafts[FITS], split=drafts[SPLIT])
    assert "#new-token: 16," in server.log_text()
    if kind == "self":
        assert drafts[SPLIT] >= 0.98 * drafts[FITS] > 0
    together = generate_all(server.url, list(cases.values()), concurrency=5)
    assert_same(reference, list(cases.values()), together)
