"""Sampled tokens follow the target's own probabilities: a probability integral transform.

For a token drawn from p with distribution function F over some order of the tokens,
u = F(x-) + v p(x) with v uniform is uniform itself. Here p comes from another implementation of the
model (transformers) and of the filters, under each draw's own prefix, so u must be uniform at every
position, and independent from one position to the next. Drafts are off: identity with drafts on is
another test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from harness.client import Request, generate_all
from harness.draws import FILTERS
from harness.prompts import STORY, tokenizer_of
from harness.reference import Reference
from harness.size import Size

NUM_POSITIONS = 6
"""K + 2 at K=4: the prefill's token, and all of a round."""
MIN_P_VALUE = 1e-4
"""A false alarm in one of some 400 runs: two settings with eleven tests each."""


@pytest.mark.parametrize("setting", FILTERS)
def test_draws_follow_the_targets_probabilities(
    setting: str, size: Size, drafts_off: Reference, figures: dict[str, Any]
) -> None:
    """Red when noise is biased or reused, a filter is missing, or a temperature counts twice."""
    params = FILTERS[setting]
    prompt = tokenizer_of(drafts_off.spec.model).encode(STORY)
    cases = [
        Request(
            tuple(prompt),
            {"max_new_tokens": NUM_POSITIONS, "ignore_eos": True, "sampling_seed": seed, **params},
        )
        for seed in range(size.num_law_draws)
    ]
    answers = generate_all(drafts_off.server.url, cases, concurrency=16)
    draws = torch.tensor([answer.output_ids for answer in answers])  # [N, positions]
    u, outside = _transform_all(drafts_off.spec.model, prompt, draws, params)
    assert outside == 0, "a token was drawn that the filters leave out"
    uniform = [float(stats.kstest(column, "uniform").pvalue) for column in u.T]
    linked = [float(stats.spearmanr(u[:, i], u[:, i + 1]).pvalue) for i in range(NUM_POSITIONS - 1)]
    figures.update(draws=len(draws), uniform_p_values=uniform, independent_p_values=linked)
    assert min(uniform + linked) > MIN_P_VALUE


def _transform_all(
    model: str, prompt: list[int], draws: torch.Tensor, params: dict[str, Any]
) -> tuple[NDArray[np.float64], int]:
    """u [N, positions] of all draws, and how many of their tokens have no probability at all."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    noise = np.random.default_rng(0).uniform(size=draws.shape)
    parts, outside = [], 0
    for part, v in zip(draws.split(25), np.split(noise, range(25, len(draws), 25)), strict=True):
        ids = torch.cat([torch.tensor([prompt]).expand(len(part), -1), part[:, :-1]], dim=1)
        with torch.inference_mode():
            logits = network(ids, logits_to_keep=draws.shape[1]).logits
        u, p = _integral_transform(_filtered(logits, **params), part, v)
        parts.append(u)
        outside += int((p == 0).sum())
    return np.concatenate(parts), outside


def _filtered(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> NDArray[np.float64]:
    """Normalised probabilities after temperature and filters, which all look at one order."""
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    best, order = probs.sort(dim=-1, descending=True)
    keep = best.cumsum(dim=-1) - best <= top_p
    keep &= best >= min_p * best[..., :1]
    if top_k:
        keep[..., top_k:] = False
    kept = torch.zeros_like(probs).scatter(-1, order, best * keep)
    return (kept / kept.sum(dim=-1, keepdim=True)).numpy()


def _integral_transform(
    probs: NDArray[np.float64],  # [N, positions, V]
    draws: torch.Tensor,  # [N, positions]
    noise: NDArray[np.float64],  # [N, positions]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """u in token-id order and the drawn tokens' probabilities, both [N, positions]."""
    chosen = draws.numpy()[..., None]
    p = np.take_along_axis(probs, chosen, axis=-1)[..., 0]
    up_to = np.take_along_axis(probs.cumsum(axis=-1), chosen, axis=-1)[..., 0]
    return up_to - p + noise * p, p
