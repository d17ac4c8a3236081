"""Whole rounds of the drafter's loop on a toy model: what it answers, and what its KV then holds."""

from __future__ import annotations

import pytest
import torch
from toys.toy_draft_model import ToyDraftModel
from toys.toy_target import GREEDY, SAMPLED, ToyTarget

from sglang_ssd.config import SsdConfig
from sglang_ssd.wire.messages import DraftRule

PROMPTS = [[5, 9, 2, 33, 17], [1], [8, 8, 8, 40, 3, 2, 1], list(range(50))]


def assert_kv_is_fresh(target: ToyTarget) -> None:
    """Every live line's KV equals a prefill of its tokens from scratch."""
    for seq in target.loop.table:
        if seq.cache.trunk_len:
            _, expected = target.model.reference(seq.cache.tokens[: seq.cache.trunk_len])
            torch.testing.assert_close(target.model.kv(seq.cache.slots), expected)


@pytest.mark.parametrize("rule", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("backup", ["jit", "none"])
@pytest.mark.parametrize("policy", ["uniform", "geometric"])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 7])
def test_equal_weights_always_hit_and_are_always_right(
    num_steps: int, policy: str, backup: str, batch: int, rule: DraftRule
) -> None:
    """An off-by-one in any position, mask or noise key makes some draft wrong or some outcome a miss."""
    config = SsdConfig(fan_out=[2], fan_out_policy=policy, backup=backup, acceptance_rate=0.7)
    target = ToyTarget(config=config, num_steps=num_steps)
    for i in range(batch):
        target.open(f"r{i}", PROMPTS[i], rule)
    target.run_until_idle()
    for _ in range(6):
        target.round()
    for request in target.requests.values():
        assert request.served == ["hit"] * 6
        assert request.accept_lens == [1] + [num_steps + 1] * 5
    assert_kv_is_fresh(target)
