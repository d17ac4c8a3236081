"""Makes the drafter's logits like those the target chooses from: penalties and bias of the rule.

Every row stands at a place of its own: behind the committed output comes its run, the chain and
the branch up to the token it fed. Temperature and filters are part of the ranking
(core/shared_noise.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ssd.core.row_penalties import Runs, is_penalised, penalise_rows
from sglang_ssd.drafter.request_table import DraftedSequence
from sglang_ssd.wire.messages import DraftRule

_SEED_LIMIT = 1 << 63
_FLOAT32 = torch.finfo(torch.float32)


def is_shaped(rule: DraftRule) -> bool:
    return is_penalised(rule) or bool(rule.bias_tokens)


def is_sound(rule: DraftRule, *, committed_len: int) -> bool:
    """Whether a rule can be followed. How long its lists may be is checked when it is decoded."""
    numbers = (
        rule.temperature,
        rule.top_p,
        rule.min_p,
        rule.frequency_penalty,
        rule.presence_penalty,
        rule.repetition_penalty,
        *rule.bias_values,
    )
    ids = (*rule.stop_tokens, *rule.bias_tokens)
    return (
        all(abs(number) <= _FLOAT32.max for number in numbers)  # NaN is not
        and -_SEED_LIMIT <= rule.seed < _SEED_LIMIT
        and rule.repetition_penalty >= _FLOAT32.tiny
        and rule.prompt_len <= committed_len
        and len(rule.bias_tokens) == len(rule.bias_values)
        and len(set(rule.bias_tokens)) == len(rule.bias_tokens)
        and all(token >= 0 for token in ids)
    )


def shape_logits(
    logits: torch.Tensor,  # [R, V]
    seqs: Sequence[DraftedSequence],
    runs: Sequence[Runs | None],  # per sequence those of its rows; None: its rows are left alone
    num_rows: Sequence[int],  # per sequence; R in all
) -> torch.Tensor:  # [R, V], the input itself if there is nothing to do
    if all(one is None for one in runs):
        return logits
    logits = logits.to(torch.float32, copy=True)
    start = 0
    for seq, seq_runs, count in zip(seqs, runs, num_rows, strict=True):
        if seq_runs is not None:
            _shape_rows(logits[start : start + count], seq, seq_runs)
        start += count
    return logits


def _shape_rows(
    rows: torch.Tensor,  # [R, V] float32, changed in place
    seq: DraftedSequence,
    runs: Runs,  # R
) -> None:
    rule, vocab_size = seq.rule, rows.shape[1]
    if is_penalised(rule):
        output = seq.committed_output()
        penalise_rows(rows, rule=rule, output=output, runs=runs, stop_tokens=rule.stop_tokens)
    # A target's vocabulary may be padded beyond the drafter's.
    bias = [
        pair
        for pair in zip(rule.bias_tokens, rule.bias_values, strict=True)
        if pair[0] < vocab_size
    ]
    if bias:
        tokens, values = zip(*bias, strict=True)
        rows[:, list(tokens)] += torch.tensor(values, dtype=rows.dtype, device=rows.device)
