"""Penalties of all rows at once against a server's own way: one token, one dense row at a time."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ssd.core.row_penalties import (
    OutputHistory,
    is_penalised,
    penalise_rows,
    row_occurrences,
    verify_runs,
)
from toys.dense_penalties import DensePenalties

VOCAB = 12


class Rule(msgspec.Struct):
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0


tokens = st.integers(0, VOCAB - 1)
rules = st.builds(
    Rule,
    frequency_penalty=st.sampled_from([0.0, -1.0, 0.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.7, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.1, 1.5]),
    min_new_tokens=st.integers(0, 12),
)


@settings(max_examples=300, deadline=None)
@given(
    rule=rules,
    output=st.lists(tokens, max_size=20),
    drafts=st.lists(tokens, max_size=6),
    stop_tokens=st.sets(tokens, max_size=3),
    seed=st.integers(0, 1 << 30),
)
def test_each_row_of_a_verify_equals_plain_decoding(rule, output, drafts, stop_tokens, seed):
    """Red when a row counts a draft behind it, the prompt, or misses a token of the last run."""
    logits = torch.randn(len(drafts) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    server = DensePenalties(rule, vocab_size=VOCAB, stop_tokens=stop_tokens)
    for token in output:
        server.accumulate(token)
    expected = [server.apply(logits[0])]
    for row, token in enumerate(drafts, start=1):
        server.accumulate(token)
        expected.append(server.apply(logits[row]))
    penalise_rows(
        logits,
        rule=rule,
        output=OutputHistory(output),
        runs=verify_runs(drafts),
        stop_tokens=stop_tokens,
    )
    assert torch.equal(logits, torch.stack(expected))


@settings(max_examples=100, deadline=None)
@given(rule=rules, rounds=st.lists(st.lists(tokens, min_size=1, max_size=5), max_size=6))
def test_a_history_is_what_one_at_a_time_gives(rule, rounds):
    """Red when only the last token of an accepted run is accumulated."""
    by_round, by_token = OutputHistory(), OutputHistory()
    for run in rounds:
        by_round.extend(run)
        for token in run:
            by_token.extend([token])
    assert by_round.tokens == by_token.tokens
    assert by_round.counts == by_token.counts
    assert sum(by_round.counts.values()) == sum(map(len, rounds))


def test_branches_of_one_output_are_apart():
    """Red when the runs of a tree's rows add up instead of standing for themselves."""
    columns, occurrences = row_occurrences({5: 2}, [[5, 7], [7, 7], [3], []])
    assert columns.tolist() == [5, 7, 3]
    assert occurrences.tolist() == [[3, 1, 0], [2, 2, 0], [2, 0, 1], [2, 0, 0]]


def test_only_this_requests_rows_change():
    """Red when the rows that are handed in are copied, or their neighbours are written."""
    logits = torch.ones(4, 3, VOCAB)
    rule = Rule(presence_penalty=1.0, min_new_tokens=3)
    penalise_rows(
        logits[2, :2], rule=rule, output=OutputHistory([4]), runs=[[], [6]], stop_tokens={0}
    )
    changed = (logits != 1).nonzero().tolist()
    assert changed == [[2, 0, 0], [2, 0, 4], [2, 1, 0], [2, 1, 4], [2, 1, 6]]


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 1, 2**40])
def test_a_stop_token_of_no_vocabulary_forbids_nothing(token):
    """Red when a client that names one as a stop token ends the scheduler."""
    logits = torch.ones(1, VOCAB)
    rule = Rule(min_new_tokens=2)
    penalise_rows(logits, rule=rule, output=OutputHistory(), runs=[[]], stop_tokens={token, 3})
    assert (logits[0] != 1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(
    ("rule", "penalised"),
    [
        (Rule(), False),
        (Rule(frequency_penalty=-0.1), True),
        (Rule(presence_penalty=0.1), True),
        (Rule(repetition_penalty=1.1), True),
        (Rule(min_new_tokens=1), True),
    ],
)
def test_who_is_penalised(rule, penalised):
    assert is_penalised(rule) == penalised


def test_half_precision_is_penalised_in_float32():
    """Red when a penalty is rounded before it is applied."""
    logits = torch.full((1, VOCAB), 10.0, dtype=torch.bfloat16)
    rule = Rule(frequency_penalty=0.01, repetition_penalty=1.5)
    penalise_rows(logits, rule=rule, output=OutputHistory([3]), runs=[[]], stop_tokens=())
    assert logits[0, 3] == torch.tensor((10.0 - 0.01) / 1.5).to(torch.bfloat16)
