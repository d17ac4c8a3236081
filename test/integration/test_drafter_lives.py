"""Long random lives of a drafter whose target loses, repeats and reorders messages and never
agrees."""

from __future__ import annotations

import random

import pytest

from sglang_ssd.config import SsdConfig
from sglang_ssd.wire.transport import FromTarget
from toys.drafter_checks import (
    RecordingModel,
    assert_branch_logits_are_causal,
    assert_kv_is_fresh,
    assert_replies_continue,
)
from toys.toy_draft_model import ToyDraftModel
from toys.toy_target import GREEDY, SAMPLED, Reply, Request, ToyTarget

MAX_LIVE = 3


class Life:
    """One target's random conduct; every choice comes from one seed."""

    def __init__(self, seed: int, config: SsdConfig, num_steps: int) -> None:
        self.rng = random.Random(seed)
        self.model = RecordingModel(ToyDraftModel(seed=seed, total_slots=2000))
        self.target = ToyTarget(
            config=config,
            num_steps=num_steps,
            draft_model=self.model,
            target_model=self._similar_model(seed),
        )
        self.delayed: list[FromTarget] = []
        self.num_opened = 0
        self.branch_rows_checked = 0
        self.served: set[str] = set()

    def _similar_model(self, seed: int) -> ToyDraftModel:
        """The draft's weights with noise: outcomes of every kind, k = 0 to K."""
        model, noise = ToyDraftModel(seed=seed), ToyDraftModel(seed=seed + 1)
        model.head = model.head + 0.12 * noise.head
        return model

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def play(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self._open_and_close()
            self._round(list(self.target.requests.values()))

    def _open_and_close(self) -> None:
        target = self.target
        while len(target.requests) < MAX_LIVE:
            self.num_opened += 1
            prompt = [self.rng.randrange(61) for _ in range(self.rng.randrange(1, 50))]
            rule = SAMPLED if self.chance(0.4) else GREEDY
            target.open(f"r{self.num_opened}", prompt, rule)
        for request in list(target.requests.values()):
            if self.chance(0.02) or len(request.tokens) > 90:
                target.close(request.rid)
            elif self.chance(0.02):  # retracted and opened again under the same name
                request.generation += 1
                request.drafts = []
                target.sync(request)

    def _round(self, requests: list[Request]) -> None:
        for request in requests:
            if self.chance(0.15):
                request.drafts = request.drafts[: self.rng.randrange(len(request.drafts) + 1)]
            self.target.verify(request)
        if self.chance(0.9):
            self.target.commit(requests)
        self._disturb_inbox()
        for _ in range(self.rng.choice([0, 1, 2, 3, 5, 8, 12])):
            self._step()
        if self.chance(0.3):
            assert_kv_is_fresh(self.target)
        replies = self._arrived()
        self.served |= {reply.served for reply in replies}

    def _disturb_inbox(self) -> None:
        inbox = self.target.transport.inbox
        if self.chance(0.1):
            inbox += inbox
        if self.chance(0.1):
            self.delayed += inbox
            inbox.clear()
        elif self.delayed and self.chance(0.5):
            inbox += self.delayed
            self.delayed.clear()

    def _arrived(self) -> list[Reply]:
        assert_replies_continue(self.target, self.target.replies)
        if self.chance(0.15):
            lost, self.target.replies = self.target.replies, []
            return lost
        return self.target.take_replies()

    def _step(self) -> None:
        self.target.step()
        if self.chance(0.85):
            return
        self.branch_rows_checked += assert_branch_logits_are_causal(self.target, self.model)
        self.model.branch_logits.clear()


@pytest.mark.parametrize(
    ("num_rounds", "num_steps", "config"),
    [
        (60, 4, SsdConfig(fan_out=[3], prefill_slice_tokens=16)),
        (60, 4, SsdConfig(fan_out=[3, 0, 2, 1, 0], backup="none", prefill_slice_tokens=16)),
        (40, 1, SsdConfig(fan_out=[2], backup="none")),
        (40, 3, SsdConfig(mode="sync", prefill_slice_tokens=16)),
    ],
    ids=["jit", "none", "one-step", "sync"],
)
def test_slots_kv_and_drafts_stay_right_through_disturbed_rounds(
    num_rounds: int, num_steps: int, config: SsdConfig
) -> None:
    life = Life(seed=7, config=config, num_steps=num_steps)
    life.play(num_rounds)
    life.target.run_until_idle()
    expected = {"sync"} if config.mode == "sync" else {"hit", "chain_hit", config.backup}
    assert expected <= life.served
    if config.mode != "sync":
        assert life.branch_rows_checked > num_rounds / 2
    for request in list(life.target.requests.values()):
        life.target.close(request.rid)
    life.target.step()
    # A DraftSync that came after its DraftClose has opened a dead request: its lease ends it.
    life.target.now += 2 * config.lease_s
    life.target.run_until_idle()
    table = life.target.loop.table
    assert table.is_empty()
    assert table.num_free_slots == table.total_slots
