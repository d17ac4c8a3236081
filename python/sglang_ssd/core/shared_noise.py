"""Sampling with noise that target and drafter share: the token after the context token at position
i is argmax over v of log p(v) + g(seed, i, v), with g Gumbel noise from a hash of (seed, i, v).

That is an exact sample of p, it does not depend on drafts, and the drafter, which knows seed and
position, drafts and guesses by the same rule. The noise is SGLang's own (`layers/sampler.py:
multinomial_with_seed`), always keyed by the token id, whatever filters p.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from sglang_ssd.core.outcome_tree import IntArray
from sglang_ssd_kernels.reference import murmur_hash32, murmur_hash32_all

MAX_NOISE = 32 * math.log(2)
"""The hash has 32 bits, so no noise is larger (22.18)."""

FILTERED_GUESS_PENALTY = 2.0
"""Nats by which the drafter ranks a token lower that its own filtered distribution leaves out: the
target's filter may well keep it. Measured as better than dropping it."""

_BLOCK = 128
_MAX_HASH = 2**32 - 1
_HEAD = 256  # tokens whose noise is always evaluated
_NOISE_ROWS = 32  # whose noise is held at once: 8 bytes a token, several times over
_ROUNDING = 1e-4  # nats, far above the float64 error of a noise near its maximum (5e-7)


class SamplingRule(Protocol):
    """How the target will choose a request's tokens (wire.messages.DraftRule)."""

    @property
    def temperature(self) -> float: ...  # 0 is greedy
    @property
    def top_k(self) -> int: ...  # below 1 is off
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int: ...


def request_seed(*, base_seed: int, rid: str) -> int:
    """Seed of a request that brings none: the same on every rank and after a retraction."""
    return _hash64(f"request {base_seed} {rid}")


def next_copy_seed(seed: int) -> int:
    """Seed of the next of a request's n > 1 copies; the first has the request's own."""
    return _hash64(f"copy {seed}")


def gumbel_noise(
    seeds: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64, of the last context token
    token_ids: torch.Tensor,  # [R, M] or [1, M] int64
) -> torch.Tensor:  # [R, M] float64
    """Standard Gumbel noise of every (seed, position, token)."""
    hashes = murmur_hash32(seeds, positions, token_ids).to(torch.int64) & _MAX_HASH
    minus_log = hashes.to(torch.float64).div_(_MAX_HASH).log_()
    minus_log.clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_()
    return minus_log.log_().neg_()


def coupled_sample(
    logprobs: torch.Tensor,  # [R, V] float, -inf where a token is ruled out; need not be normalised
    *,
    seeds: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64, of the last context token
) -> torch.Tensor:  # [R] int64
    """One exact sample per row; of equal maxima the lowest token id."""
    if logprobs.device.type != "cpu" or logprobs.shape[1] <= _HEAD:
        all_ids = torch.arange(logprobs.shape[1], device=logprobs.device)[None, :]
        drawn = torch.empty(len(logprobs), dtype=torch.int64, device=logprobs.device)
        for start in range(0, len(drawn), _NOISE_ROWS):
            part = slice(start, start + _NOISE_ROWS)
            noise = gumbel_noise(seeds[part], positions[part], all_ids)
            drawn[part] = (logprobs[part] + noise).argmax(dim=-1)
        return drawn
    rows = [
        _sample_row(row, seeds[index : index + 1], positions[index : index + 1])
        for index, row in enumerate(logprobs)
    ]
    return torch.tensor(rows, dtype=torch.int64)


def rank_candidates(
    logits: torch.Tensor,  # [R, V] float
    rules: Sequence[SamplingRule],  # R
    positions: Sequence[int],  # R, of the token that was fed
    num_candidates: int,
    *,
    top_m: int = 512,
) -> IntArray:  # [R, min(num_candidates, V)] int64
    """The drafter's best next tokens, best first: the draft, then the guesses.

    Greedy rows rank by logit. Sampled rows rank by log q + noise among their top_m logits, with q
    after temperature and the row's filters.
    """
    count = min(num_candidates, logits.shape[1])
    sampled = [row for row, rule in enumerate(rules) if rule.temperature > 0]
    if not sampled:
        return _largest(logits, count).cpu().numpy()
    if len(sampled) == len(rules):
        return _best_drawn(logits, rules, positions, count, top_m).cpu().numpy()
    greedy = [row for row, rule in enumerate(rules) if rule.temperature <= 0]
    ranked = torch.empty(len(rules), count, dtype=torch.int64, device=logits.device)
    ranked[greedy] = _largest(logits[greedy], count)
    ranked[sampled] = _best_drawn(
        logits[sampled],
        [rules[row] for row in sampled],
        [positions[row] for row in sampled],
        count,
        top_m,
    )
    return ranked.cpu().numpy()


def _best_drawn(
    logits: torch.Tensor,  # [R, V] float
    rules: Sequence[SamplingRule],  # R, all above temperature 0
    positions: Sequence[int],  # R
    count: int,
    top_m: int,
) -> torch.Tensor:  # [R, count] int64
    top = logits.topk(min(max(top_m, count), logits.shape[1]), dim=-1)
    scores = _draft_scores(top.values, top.indices, rules, positions)
    return top.indices.gather(1, scores.topk(count, dim=-1).indices)


def _largest(
    logits: torch.Tensor,  # [R, V]
    count: int,
) -> torch.Tensor:  # [R, count] int64
    """Ids of the largest logits, best first.

    They lie in the `count` blocks with the largest maxima. On a CPU, where topk costs many times
    what reading costs, that is 3 to 6 times faster while the blocks are few.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = vocab_size // _BLOCK
    if logits.device.type != "cpu" or num_blocks < 8 * count:
        return logits.topk(count, dim=-1).indices
    in_blocks = num_blocks * _BLOCK
    blocks = logits[:, :in_blocks].reshape(num_rows, num_blocks, _BLOCK)
    best = blocks.amax(dim=-1).topk(count, dim=-1).indices[:, :, None]  # [R, count, 1]
    inside = torch.arange(_BLOCK)
    rest = torch.arange(in_blocks, vocab_size).expand(num_rows, -1)
    ids = torch.cat([(best * _BLOCK + inside).flatten(1), rest], dim=1)
    return ids.gather(1, logits.gather(1, ids).topk(count, dim=-1).indices)


def _sample_row(
    logprobs: torch.Tensor,  # [V]
    seed: torch.Tensor,  # [1]
    position: torch.Tensor,  # [1]
) -> int:
    """argmax of logprobs + noise, evaluating only tokens that can still win.

    After the likeliest _HEAD tokens reach `best`, any other must make up for its logprob with noise
    of at least `need`, that is, with a hash of at least `min_hash`.
    """
    head = logprobs.topk(min(_HEAD, logprobs.shape[0]))
    ids = head.indices
    scores = head.values + gumbel_noise(seed, position, ids[None, :])[0]
    need = float(scores.max() - head.values[-1]) - _ROUNDING
    if math.isnan(need):  # every token is ruled out: what argmax makes of that
        return 0
    if len(ids) < len(logprobs) and need <= MAX_NOISE:
        min_hash = max(0, int(_MAX_HASH * math.exp(-math.exp(-need))) - 1)
        hashes = murmur_hash32_all(seed, position, len(logprobs))[0].numpy().view(np.uint32)
        ids = torch.cat([ids, torch.from_numpy(np.flatnonzero(hashes >= min_hash))])
        scores = logprobs[ids] + gumbel_noise(seed, position, ids[None, :])[0]
    return int(ids[scores == scores.max()].min())


def _draft_scores(
    top_logits: torch.Tensor,  # [R, M] float, best first
    token_ids: torch.Tensor,  # [R, M] int64
    rules: Sequence[SamplingRule],
    positions: Sequence[int],
) -> torch.Tensor:  # [R, M] float64
    device = top_logits.device
    columns = [(r.temperature, float(r.top_k), r.top_p, r.min_p) for r in rules]
    table = torch.tensor(columns, dtype=torch.float64, device=device)
    temperatures, top_ks, top_ps, min_ps = table.T[:, :, None]  # [R, 1] each
    seeds = torch.tensor([r.seed for r in rules], dtype=torch.int64, device=device)
    at = torch.tensor(list(positions), dtype=torch.int64, device=device)

    logits = top_logits.to(torch.float64)
    probs = torch.softmax(logits / temperatures, dim=-1)
    ranks = torch.arange(logits.shape[1], device=device)
    left_out = (top_ks > 0) & (ranks >= top_ks)
    left_out |= probs.cumsum(dim=-1) - probs > top_ps
    left_out |= probs < min_ps * probs[:, :1]
    penalties: torch.Tensor = FILTERED_GUESS_PENALTY * left_out
    return probs.log() + gumbel_noise(seeds, at, token_ids) - penalties


def _hash64(text: str) -> int:
    """63 bits: SGLang takes seeds of the int64 range."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
