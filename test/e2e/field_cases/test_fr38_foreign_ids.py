"""FR-38: an id that is no token of the target is never sent, and never used if it comes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import DrafterKind, make_broken, make_drafter
from harness.client import Request, generate_all
from harness.drafter_faults import reload
from harness.draws import FILTERS, assert_same_draws, seeded
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server
from sglang_ssd.wire.fake import FakeWire, Faults
from sglang_ssd.wire.messages import SpeculateReply
from toys.toy_server import HELLO
from toys.toy_server import Server as ToyServer


def test_fr_38(
    kind: DrafterKind,
    last_server: Server,
    target: Path,
    reference: Reference,
    drafts_off: Reference,
) -> None:
    """Red when a drafter proposes its padding, which its head prefers, or the target takes it."""
    padded = make_broken(make_drafter(kind, target), "padded")
    answer = reload(last_server, model_path=str(padded))
    assert answer.status_code == 200, answer.text
    prompts = load_prompts(last_server.spec.model, 6)
    cases = [Request(prompt.input_ids, {"max_new_tokens": 32}) for prompt in prompts]
    counter = RoundCounter(last_server)
    answers = generate_all(last_server.url, cases)
    assert_drafting(kind, counter.since())
    assert_same(reference, cases, answers)
    sampled = seeded(last_server.spec.model, 4, FILTERS["top-k"])
    assert_same_draws(drafts_off, sampled, generate_all(last_server.url, sampled))
    assert "bad_reply" not in last_server.ssd()["plain_decode"]


@pytest.mark.parametrize("foreign", [-1, HELLO.vocab_size, HELLO.vocab_size + 5, 2**31 - 1])
def test_fr_38_foreign_ids_arrive(
    foreign: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when such an id reaches a verify, or a row with one is not counted as without drafts, or
    nobody is told.

    Ids travel as whole numbers, so there is no NaN to be sent.
    """
    wire = FakeWire(seed=3, tick_s=0.02)
    server = ToyServer(wire, draft_seed=0, backup="jit")
    send = wire.drafter.send

    def send_foreign(peer: bytes, message: Any, frames: Sequence[Sequence[int]] = ()) -> bool:
        if isinstance(message, SpeculateReply):
            frames = [[foreign if i == 0 else t for i, t in enumerate(ids)] for ids in frames]
        return send(peer, message, frames)

    monkeypatch.setattr(wire.drafter, "send", send_foreign)
    server.start(Faults(), Faults())
    server.run()
    server.expect_plain_texts()
    stats = server.client.stats
    assert stats.bad_replies > 0
    assert stats.plain_decode["bad_reply"] > 0
    said = [one.message for one in caplog.records if "foreign ids" in one.message]
    assert [text.rsplit(" ", 1)[0] for text in said] == [
        "SSD drafter: too many drafts or foreign ids for"
    ]
