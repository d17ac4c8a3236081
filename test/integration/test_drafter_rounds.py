"""Whole rounds of the drafter's loop on a toy model: what it answers, and what its KV holds."""

from __future__ import annotations

import pytest

from sglang_ssd.config import SsdConfig
from sglang_ssd.drafter.model_step import warm_up
from sglang_ssd.wire.messages import DraftRule
from toys.drafter_checks import assert_kv_is_fresh
from toys.toy_draft_model import ToyDraftModel
from toys.toy_target import GREEDY, SAMPLED, ToyTarget

OTHER_SEED = DraftRule(temperature=1.3, min_p=0.02, seed=-7)
PENALISED = [
    DraftRule(frequency_penalty=2.0, presence_penalty=1.0, prompt_len=5),
    DraftRule(
        temperature=0.8, seed=3, repetition_penalty=1.5, frequency_penalty=-1.0, prompt_len=1
    ),
    DraftRule(min_new_tokens=12, stop_tokens=list(range(40)), prompt_len=7),
    DraftRule(bias_tokens=[3, 5, 60], bias_values=[-9.0, 4.5, 4.0], prompt_len=50),
]
PROMPTS = [[5, 9, 2, 33, 17], [1], [8, 8, 8, 40, 3, 2, 1], list(range(50))]


@pytest.mark.parametrize(
    "rules",
    [[GREEDY], [SAMPLED, GREEDY, OTHER_SEED, GREEDY], PENALISED],
    ids=["one", "four-mixed", "penalised"],
)
@pytest.mark.parametrize("backup", ["jit", "none"])
@pytest.mark.parametrize("policy", ["uniform", "geometric"])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 7])
def test_equal_weights_always_hit_and_are_always_right(
    num_steps: int, policy: str, backup: str, rules: list[DraftRule]
) -> None:
    """An off-by-one in any position, mask or noise key makes a draft wrong or an outcome a miss.

    So does a penalty that counts another branch's tokens, or lacks a row's own.
    """
    config = SsdConfig(fan_out=[2], fan_out_policy=policy, backup=backup, acceptance_rate=0.7)
    target = ToyTarget(config=config, num_steps=num_steps)
    for i, rule in enumerate(rules):
        target.open(f"r{i}", PROMPTS[i], rule)
    target.run_until_idle()
    for _ in range(4):
        target.round()
    for request in target.requests.values():
        assert request.served == ["hit"] * 4
        assert request.accept_lens == [1] + [num_steps + 1] * 3
    assert_kv_is_fresh(target)


def test_a_warm_up_meets_every_kind_of_forward_and_leaves_no_trace() -> None:
    model = ToyDraftModel(total_slots=60)
    warm_up(model)
    assert [kind for kind, _ in model.calls] == ["extend", "extend", "branch"]
    target = ToyTarget(config=SsdConfig(fan_out=[2]), num_steps=2, draft_model=model)
    request = target.open("r", PROMPTS[0])
    target.run_until_idle()
    for _ in range(3):
        target.round()
    assert request.served == ["hit"] * 3
    assert_kv_is_fresh(target)
