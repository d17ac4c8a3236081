"""Top-k, top-p and min-p against the sort that SGLang's torch sampler does."""

from __future__ import annotations

import pytest
import torch

from sglang_ssd.core.sampling_filter import filter_logprobs

OFF = 1 << 30  # SGLang's top_k for "the whole vocabulary"


def filter_by_sorting(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """Joint filters on one sorted distribution, cumulating the unfiltered probabilities."""
    in_order, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = in_order.cumsum(dim=-1) - in_order
    ranks = torch.arange(probs.shape[1])
    in_order[ranks >= top_ks[:, None]] = 0.0
    # At top_p = 1 SGLang drops what lies behind a cumulated sum that rounds above 1; we do not.
    in_order[(before > top_ps[:, None]) & (top_ps[:, None] < 1)] = 0.0
    in_order[in_order < in_order[:, :1] * min_ps[:, None]] = 0.0
    return torch.zeros_like(probs).scatter(1, ids, in_order)


def settings(rows: int, vocab_size: int, generator: torch.Generator):
    def sometimes(value: torch.Tensor, off: float) -> torch.Tensor:
        return torch.where(torch.rand(rows, generator=generator) < 0.5, value, off)

    top_ks = sometimes(torch.randint(1, vocab_size + 1, (rows,), generator=generator), OFF)
    top_ps = sometimes(torch.rand(rows, generator=generator), 1.0)
    min_ps = sometimes(0.3 * torch.rand(rows, generator=generator), 0.0)
    return top_ks, top_ps, min_ps


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 1500, 5000])
@pytest.mark.parametrize("resolution", [None, 0.25])
def test_equals_the_sort(vocab_size, resolution):
    """With a coarse resolution rows are full of ties, as bf16 logits are."""
    generator = torch.Generator().manual_seed(vocab_size)
    for _ in range(8):
        logits = 3 * torch.randn(12, vocab_size, generator=generator)
        if resolution is not None:
            logits = (logits / resolution).round() * resolution
        logprobs = logits.log_softmax(-1)
        top_ks, top_ps, min_ps = settings(12, vocab_size, generator)
        filtered = filter_logprobs(logprobs, top_ks=top_ks, top_ps=top_ps, min_ps=min_ps)
        expected = filter_by_sorting(logprobs.exp(), top_ks, top_ps, min_ps)
        kept = filtered > -torch.inf
        # exp and log round, so a token that lies on a threshold may fall to either side.
        assert ((kept != (expected > 0)).sum(dim=-1) <= (0 if resolution is None else 1)).all()
        assert torch.equal(filtered[kept], logprobs[kept])


def test_the_three_filters_by_hand():
    logprobs = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()

    def kept(top_k=OFF, top_p=1.0, min_p=0.0):
        filtered = filter_logprobs(
            logprobs,
            top_ks=torch.tensor([top_k]),
            top_ps=torch.tensor([top_p]),
            min_ps=torch.tensor([min_p]),
        )
        return torch.nonzero(filtered[0] > -torch.inf)[:, 0].tolist()

    assert kept(top_k=1) == [0]
    assert kept(top_k=3) == [0, 2, 3]
    assert kept(top_p=0.35) == [0]
    assert kept(top_p=0.5) == [0, 2]
    assert kept(top_p=0.8) == [0, 2, 3]
    assert kept(min_p=0.6) == [0, 2]
    assert kept(top_k=2, min_p=0.4) == [0, 2]
    assert kept(top_k=2, top_p=0.9) == [0, 2]  # top-p sees the probabilities before top-k


def test_of_equal_tokens_the_lowest_ids_stay_whatever_the_neighbours():
    """A row's support must not depend on the batch, or drafts would change sampled output."""
    row = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0, 2.0]).log_softmax(-1)
    other = torch.randn(6).log_softmax(-1)
    for batch, top_ks in (([row], [2]), ([row, other], [2, 5]), ([other, row], [1, 2])):
        filtered = filter_logprobs(
            torch.stack(batch),
            top_ks=torch.tensor(top_ks),
            top_ps=torch.ones(len(batch)),
            min_ps=torch.zeros(len(batch)),
        )
        assert torch.nonzero(filtered[top_ks.index(2)] > -torch.inf)[:, 0].tolist() == [1, 2]


def test_rows_without_filters_are_neither_sorted_nor_copied(monkeypatch):
    logprobs = torch.randn(3, 50).log_softmax(-1)
    monkeypatch.setattr(torch.Tensor, "topk", None)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    off = {"top_ks": torch.full((3,), OFF), "top_ps": torch.ones(3)}
    assert filter_logprobs(logprobs, **off, min_ps=torch.zeros(3)) is logprobs
    filter_logprobs(logprobs, **off, min_ps=torch.full((3,), 0.1))


def test_a_small_top_k_does_not_sort(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "sort", None)
    filter_logprobs(
        torch.randn(3, 5000).log_softmax(-1),
        top_ks=torch.tensor([5, 50, 500]),
        top_ps=torch.tensor([0.9, 1.0, 0.5]),
        min_ps=torch.zeros(3),
    )


def test_tokens_ruled_out_before_stay_out():
    logprobs = torch.tensor([[0.0, -torch.inf, -1.0, -torch.inf]]).log_softmax(-1)
    filtered = filter_logprobs(
        logprobs, top_ks=torch.tensor([3]), top_ps=torch.ones(1), min_ps=torch.zeros(1)
    )
    assert torch.equal(filtered, logprobs)
