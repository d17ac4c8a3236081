"""The target's own draws, after a prefill and in a verify, without a server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.sampler import Sampler

from sglang_ssd.core.sampling_filter import filter_logprobs
from sglang_ssd.core.shared_noise import coupled_sample
from sglang_ssd.target import verify
from sglang_ssd.target.row_transforms import RowTransforms

VOCAB_SIZE = 600
OFF = 1 << 30


def test_seeds_of_another_batch_are_never_drawn_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a first token is drawn with noise that is not its request's."""
    monkeypatch.setattr(Sampler, "__init__", torch.nn.Module.__init__)
    sampler = verify.CoupledSampler()
    sampler.seeds = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(AssertionError, match="seeds"):
        sampler._sample_from_probs(
            torch.full((2, 4), 0.25), SimpleNamespace(), torch.zeros(2, dtype=torch.int64), False
        )


def test_each_verified_row_gets_what_it_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a request's temperature, filter, seed or position reaches another's row, or when
    greedy rows and places behind a row's last draft are drawn for nothing."""
    torch.manual_seed(5)
    width, num_drafts = 4, torch.tensor([3, 0, 3, 1])
    logits = torch.randn(4 * width, VOCAB_SIZE) * 3
    info = SimpleNamespace(
        temperatures=torch.tensor([[0.7], [1.0], [1.0], [1.4]]),
        top_ks=torch.tensor([OFF, 50, 1, 9]),  # the third is greedy
        top_ps=torch.tensor([1.0, 0.9, 1.0, 1.0]),
        min_ps=torch.tensor([0.0, 0.0, 0.0, 0.05]),
        logit_bias=None,
        has_custom_logit_processor=False,
    )
    batch = SimpleNamespace(sampling_info=info, reqs=[], has_grammar=False)
    seeds = torch.tensor([11, 12, 13, 14])
    positions = torch.tensor([20, 35, 3, 80])[:, None] + torch.arange(width)
    drawn_rows: list[int] = []

    def counted(logprobs: torch.Tensor, **keys: torch.Tensor) -> torch.Tensor:
        drawn_rows.append(len(logprobs))
        return coupled_sample(logprobs, **keys)

    monkeypatch.setattr(verify, "coupled_sample", counted)
    chosen = verify.choose_target_tokens(
        logits.clone(),
        batch=batch,
        verify_tokens=torch.zeros(4, width, dtype=torch.int64),
        num_drafts=num_drafts,
        transforms=RowTransforms(),
        seeds=seeds,
        positions=positions.flatten(),
    )
    assert drawn_rows == [4 + 1 + 2]
    for request in range(4):
        for place in range(int(num_drafts[request]) + 1):
            row = logits.view(4, width, -1)[request, place, None]
            if info.top_ks[request] == 1:
                expected = int(row.argmax())
            else:
                logprobs = filter_logprobs(
                    torch.log_softmax(row / info.temperatures[request], dim=-1),
                    top_ks=info.top_ks[request, None],
                    top_ps=info.top_ps[request, None],
                    min_ps=info.min_ps[request, None],
                )
                at = positions[request, place, None]
                expected = int(coupled_sample(logprobs, seeds=seeds[request, None], positions=at))
            assert int(chosen[request, place]) == expected, (request, place)
