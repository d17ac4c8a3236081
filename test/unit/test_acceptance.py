"""The acceptance rule against a loop that reads like its definition."""

import pytest
import torch

from sglang_ssd.core.acceptance import accept_chain


def accept_slowly(drafts: list[int], target: list[int], num_drafts: int) -> int:
    correct = 0
    while correct < num_drafts and drafts[correct] == target[correct]:
        correct += 1
    return correct


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_equals_the_slow_rule(num_steps):
    generator = torch.Generator().manual_seed(num_steps)
    batch = 300
    drafts = torch.randint(0, 2, (batch, num_steps), generator=generator)
    target = torch.randint(0, 2, (batch, num_steps + 1), generator=generator)
    num_drafts = torch.randint(0, num_steps + 1, (batch,), generator=generator)
    num_correct, accept_lens = accept_chain(drafts, target, num_drafts)
    expected = [
        accept_slowly(d, t, n)
        for d, t, n in zip(drafts.tolist(), target.tolist(), num_drafts.tolist(), strict=True)
    ]
    assert num_correct.tolist() == expected
    assert accept_lens.tolist() == [correct + 1 for correct in expected]


def test_padding_that_happens_to_be_right_is_not_accepted():
    drafts, target = torch.tensor([[5, 6]]), torch.tensor([[5, 6, 7]])
    num_correct, _ = accept_chain(drafts, target, torch.tensor([1]))
    assert num_correct.tolist() == [1]


def test_nothing_counts_behind_the_first_wrong_draft():
    drafts, target = torch.tensor([[1, 6, 7]]), torch.tensor([[5, 6, 7, 8]])
    num_correct, accept_lens = accept_chain(drafts, target, torch.tensor([3]))
    assert (num_correct.tolist(), accept_lens.tolist()) == ([0], [1])
