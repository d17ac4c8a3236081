"""The CPU attention plan against a plain masked softmax, one row and one head at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_ssd.platform import attention_plan
from sglang_ssd.platform.attention_plan import AttentionPlan, PlanRow, causal_rows

HEADS, KV_HEADS, HEAD_DIM, NUM_SLOTS = 6, 2, 8, 700


@pytest.fixture
def caches() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SLOTS, KV_HEADS, HEAD_DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def visible(row: PlanRow) -> Tensor:  # [width, kv] bool
    num_slots = row.kv_slots.numel()
    if row.mask is not None:
        return row.mask
    everything = torch.ones(row.width, num_slots, dtype=torch.bool)
    return everything.tril(num_slots - row.width) if row.causal else everything


def reference(rows: list[PlanRow], query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    output = torch.zeros_like(query)
    for row in rows:
        hidden = ~visible(row)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            q = query[row.q_start : row.q_end, head]
            scores = q @ keys[row.kv_slots, kv_head].T * HEAD_DIM**-0.5
            weights = scores.masked_fill(hidden, float("-inf")).softmax(1)
            output[row.q_start : row.q_end, head] = weights @ values[row.kv_slots, kv_head]
    return output


def assert_plan_agrees(rows: list[PlanRow], caches: tuple[Tensor, Tensor]) -> AttentionPlan:
    query = torch.randn(rows[-1].q_end, HEADS, HEAD_DIM)
    plan = AttentionPlan(rows)
    output = plan.attend(query, *caches, HEAD_DIM**-0.5)
    torch.testing.assert_close(output, reference(rows, query, *caches), rtol=0, atol=2e-6)
    again = plan.attend(query, *caches, HEAD_DIM**-0.5)
    torch.testing.assert_close(again, output, rtol=0, atol=0)  # layers do not wear the plan out
    return plan


def shuffled(length: int) -> Tensor:
    return torch.randperm(NUM_SLOTS)[:length]


@pytest.mark.parametrize("widths", [[1, 1, 1, 1], [5, 5], [3, 3, 1], [2, 0, 2]])
@pytest.mark.parametrize("prefix", [[0, 7, 9, 8], [40, 41, 300, 5]])
def test_causal_rows(widths: list[int], prefix: list[int], caches: tuple[Tensor, Tensor]) -> None:
    slots = [shuffled(p + w) for p, w in zip(prefix, widths, strict=False)]
    assert_plan_agrees(causal_rows(slots, widths), caches)


def test_long_extend_behind_a_prefix_is_cut_into_blocks(caches: tuple[Tensor, Tensor]) -> None:
    widths = [attention_plan.QUERY_BLOCK + 70, 3, 70]
    slots = [shuffled(100 + widths[0]), shuffled(20), shuffled(90)]
    plan = assert_plan_agrees(causal_rows(slots, widths), caches)
    assert [group.width for group in plan.groups] == [attention_plan.QUERY_BLOCK, 70, 3, 70]


def test_rows_share_a_call_only_where_padding_is_cheap(caches: tuple[Tensor, Tensor]) -> None:
    slots = [shuffled(n) for n in (100, 110, 120, 600)]
    plan = assert_plan_agrees(causal_rows(slots, [5, 5, 5, 5]), caches)
    assert [group.num_rows for group in plan.groups] == [3, 1]


def test_tree_mask(caches: tuple[Tensor, Tensor]) -> None:
    """Two branches behind a prefix of 3 and a chain of 2; the second leaves the chain one later."""
    drawn = [
        [1, 1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 1, 0, 1],
    ]
    mask = torch.tensor(drawn, dtype=torch.bool)
    rows = [PlanRow(0, 2, shuffled(7), mask), PlanRow(2, 4, shuffled(7), mask.flip(0))]
    plan = assert_plan_agrees(rows, caches)
    assert len(plan.groups) == 1
    assert_plan_agrees(rows[:1], caches)


def test_an_unread_slot_may_hold_anything(caches: tuple[Tensor, Tensor]) -> None:
    keys, values = caches
    keys[0], values[0] = float("nan"), float("nan")
    slots = [torch.arange(1, 101), torch.arange(101, 191)]
    assert_plan_agrees(causal_rows(slots, [4, 4]), caches)


def test_adjoining_slots_are_not_copied(caches: tuple[Tensor, Tensor]) -> None:
    keys, _ = caches
    plan = AttentionPlan(causal_rows([torch.arange(50, 90)], [1]))
    assert plan.groups[0].read(keys).data_ptr() == keys[50].data_ptr()
    assert_plan_agrees(causal_rows([torch.arange(50, 90)], [3]), caches)


def test_bfloat16_stays_within_its_rounding(caches: tuple[Tensor, Tensor]) -> None:
    rows = causal_rows([shuffled(90), shuffled(100)], [5, 5])
    query = torch.randn(10, HEADS, HEAD_DIM)
    keys, values = (cache.bfloat16() for cache in caches)
    output = AttentionPlan(rows).attend(query.bfloat16(), keys, values, HEAD_DIM**-0.5)
    expected = reference(rows, query.bfloat16().float(), keys.float(), values.float())
    # bf16 keeps 8 bits; probabilities and the sum are rounded once each.
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=2e-2)
