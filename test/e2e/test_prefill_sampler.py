"""The draw after a prefill, without a server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.sampler import Sampler

from sglang_ssd.target.verify import CoupledSampler


def test_seeds_of_another_batch_are_never_drawn_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a first token is drawn with noise that is not its request's."""
    monkeypatch.setattr(Sampler, "__init__", torch.nn.Module.__init__)
    sampler = CoupledSampler()
    sampler.seeds = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(AssertionError, match="seeds"):
        sampler._sample_from_probs(
            torch.full((2, 4), 0.25), SimpleNamespace(), torch.zeros(2, dtype=torch.int64), False
        )
