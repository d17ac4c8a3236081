"""Top-k, top-p and min-p as SGLang's torch sampler applies them, in token-id order.

All three look at one descending order of the unfiltered probabilities: rank >= top_k goes, a token
goes once the ones before it hold more than top_p, and so does one below min_p times the largest.
The first two keep the n best tokens of a row; of equal probabilities they keep the lowest ids, so
that a row's support does not depend on the rows beside it.
"""

from __future__ import annotations

import torch

_HEAD = 1024  # ranks looked at before a whole row is sorted


def filter_logprobs(
    logprobs: torch.Tensor,  # [R, V] float, log of normalised probabilities (after temperature)
    *,
    top_ks: torch.Tensor,  # [R] int, V or more is off
    top_ps: torch.Tensor,  # [R] float, 1 or more is off
    min_ps: torch.Tensor,  # [R] float, 0 is off
) -> torch.Tensor:  # [R, V], -inf where filtered, else unchanged (not normalised again)
    """Sorts only rows that need it; the input itself comes back if no row has a filter."""
    num_rows, vocab_size = logprobs.shape
    ranked = torch.nonzero((top_ks < vocab_size) | (top_ps < 1.0))[:, 0]
    has_min_p = bool((min_ps > 0.0).any())
    if not len(ranked) and not has_min_p:
        return logprobs
    num_kept = torch.full((num_rows,), vocab_size, device=logprobs.device)
    floors = logprobs.new_full((num_rows,), -torch.inf)
    if len(ranked):
        rows = logprobs if len(ranked) == num_rows else logprobs[ranked]
        num_kept[ranked], floors[ranked] = _rank_floors(rows, top_ks[ranked], top_ps[ranked])
    if has_min_p:
        floors = torch.maximum(floors, logprobs.amax(dim=-1) + min_ps.log())
    filtered = logprobs.masked_fill(logprobs < floors[:, None], -torch.inf)
    if len(ranked):
        _drop_surplus_ties(filtered, floors, num_kept)
    return filtered


def _rank_floors(
    logprobs: torch.Tensor,  # [R, V]
    top_ks: torch.Tensor,  # [R] int
    top_ps: torch.Tensor,  # [R] float
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many best tokens top-k and top-p keep, [R] int64, and the last one's value, [R]."""
    top_ks = top_ks.clamp(1, logprobs.shape[1]).to(torch.int64)
    head = min(_HEAD, int(top_ks.max()))
    in_order = logprobs.topk(head).values
    num_kept = torch.minimum(_num_within(in_order, top_ps), top_ks)
    floors = in_order.gather(1, num_kept[:, None] - 1)[:, 0]
    undecided = torch.nonzero((num_kept == head) & (top_ks > head))[:, 0]
    if len(undecided):
        in_order = logprobs[undecided].sort(dim=-1, descending=True).values
        kept = torch.minimum(_num_within(in_order, top_ps[undecided]), top_ks[undecided])
        num_kept[undecided] = kept
        floors[undecided] = in_order.gather(1, kept[:, None] - 1)[:, 0]
    return num_kept, floors


def _num_within(
    in_order: torch.Tensor,  # [R, M] log-probabilities, descending
    top_ps: torch.Tensor,  # [R]
) -> torch.Tensor:  # [R] int64, at least 1
    probs = in_order.exp()
    before = probs.cumsum(dim=-1) - probs
    outside = (before > top_ps[:, None]) & (top_ps[:, None] < 1.0)
    return (~outside).sum(dim=-1).clamp_(min=1)


def _drop_surplus_ties(
    filtered: torch.Tensor,  # [R, V], changed in place
    floors: torch.Tensor,  # [R]
    num_kept: torch.Tensor,  # [R] int64
) -> None:
    """Where tokens equal to the floor exceed the count, keep the lowest ids of them."""
    surplus = torch.nonzero((filtered > -torch.inf).sum(dim=-1) > num_kept)[:, 0]
    if not len(surplus):
        return
    rows, floor = filtered[surplus], floors[surplus, None]
    equal = rows == floor
    room = num_kept[surplus, None] - (rows > floor).sum(dim=-1, keepdim=True)
    filtered[surplus] = rows.masked_fill_(equal & (equal.cumsum(dim=-1) > room), -torch.inf)
