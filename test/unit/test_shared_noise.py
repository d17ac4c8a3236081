"""Shared noise: the hash is SGLang's, pruning changes nothing, samples follow p."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from sglang_ssd.core.shared_noise import (
    FILTERED_GUESS_PENALTY,
    MAX_NOISE,
    coupled_sample,
    gumbel_noise,
    next_copy_seed,
    rank_candidates,
    request_seed,
)
from sglang_ssd_kernels.reference import murmur_hash32, murmur_hash32_all

SEEDS = [0, 1, 42, 2**63 - 1, -1, -(2**63), 0x123456789ABCDEF]
POSITIONS = [0, 1, 17, 4095, 131071, 2**31 - 1, 1000]
TOKENS = [0, 1, 2, 999, 49151, 151935]
# What SGLang's Triton kernel gives for them (test/kernels/test_murmur_hash.py runs it).
HASHES = [
    [2167721464, 10027521, 2423355346, 664908232, 2764360731, 1065631903],
    [690670310, 2322861649, 3012936811, 1239908021, 3617577762, 754129545],
    [3382997381, 3497547135, 889188079, 140628347, 3728536982, 275470352],
    [30303077, 4174752314, 94231705, 2699197268, 3936341464, 2994180569],
    [2151556606, 1728276472, 2252866444, 34672472, 365388565, 2306631065],
    [155667628, 3851624287, 1095119967, 1268858072, 3844191167, 3302944100],
    [3230750857, 3421388135, 3143638437, 959096338, 3596111713, 1653624303],
]


class Rule(msgspec.Struct):
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


def sample_naively(logprobs, seeds, positions):
    all_ids = torch.arange(logprobs.shape[1])[None, :]
    return (logprobs.double() + gumbel_noise(seeds, positions, all_ids)).argmax(dim=-1)


def random_keys(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return seeds, torch.randint(0, 1 << 17, (rows,), generator=generator)


def test_hash_equals_golden_vectors():
    hashes = murmur_hash32(
        torch.tensor(SEEDS), torch.tensor(POSITIONS), torch.tensor(TOKENS)[None, :]
    )
    assert (hashes.long() & 0xFFFFFFFF).tolist() == HASHES


def test_hash_of_a_whole_vocabulary_is_the_hash_of_its_ids():
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    whole = murmur_hash32_all(seeds, positions, 5000)
    again = murmur_hash32_all(seeds, positions, 5000)  # the cached mix of ids is not used up
    one_by_one = murmur_hash32(seeds, positions, torch.arange(5000)[None, :])
    assert torch.equal(whole, one_by_one)
    assert torch.equal(again, one_by_one)


def test_noise_is_the_gumbel_transform_of_the_hash():
    noise = gumbel_noise(
        torch.tensor(SEEDS), torch.tensor(POSITIONS), torch.tensor(TOKENS)[None, :]
    )
    for row, hashes in zip(noise.tolist(), HASHES, strict=True):
        expected = [-math.log(-math.log(h / (2**32 - 1))) for h in hashes]
        assert row == pytest.approx(expected, rel=1e-12)


def test_no_noise_exceeds_the_cap(monkeypatch):
    """Both ends of the hash range, which no search for keys would find."""
    ends = torch.tensor([[0, 1, -2, -1]], dtype=torch.int32)  # 0, 1, 2**32 - 2, 2**32 - 1
    monkeypatch.setattr("sglang_ssd.core.shared_noise.murmur_hash32", lambda *_: ends)
    noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), torch.tensor([[0, 1, 2, 3]]))[0]
    assert torch.isfinite(noise).all()
    assert noise.max() <= MAX_NOISE + 1e-9
    assert noise[2:].tolist() == pytest.approx([MAX_NOISE, MAX_NOISE])


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("vocab_size", [1, 8, 256, 257, 40_000])
def test_pruning_changes_nothing(spread, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logprobs = torch.log_softmax(spread * torch.randn(24, vocab_size, generator=generator), -1)
    seeds, positions = random_keys(24, generator)
    sampled = coupled_sample(logprobs, seeds=seeds, positions=positions)
    assert torch.equal(sampled, sample_naively(logprobs, seeds, positions))


def test_pruning_changes_nothing_when_an_unlikely_token_wins():
    """Flat rows: winners lie outside the likeliest few hundred most of the time."""
    generator = torch.Generator().manual_seed(7)
    logprobs = torch.log_softmax(0.05 * torch.randn(24, 40_000, generator=generator), -1)
    seeds, positions = random_keys(24, generator)
    sampled = coupled_sample(logprobs, seeds=seeds, positions=positions)
    assert torch.equal(sampled, sample_naively(logprobs, seeds, positions))
    head = logprobs.topk(256).indices
    assert (head == sampled[:, None]).any(dim=1).float().mean() < 0.5


def test_pruning_changes_nothing_on_filtered_rows():
    generator = torch.Generator().manual_seed(8)
    logprobs = torch.log_softmax(torch.randn(24, 5000, generator=generator), -1)
    for kept in (1, 2, 300, 4000):
        keep = torch.rand(24, 5000, generator=generator).topk(kept).indices
        filtered = torch.full_like(logprobs, -torch.inf).scatter(1, keep, logprobs.gather(1, keep))
        seeds, positions = random_keys(24, generator)
        sampled = coupled_sample(filtered, seeds=seeds, positions=positions)
        assert torch.equal(sampled, sample_naively(filtered, seeds, positions))
        assert torch.isfinite(filtered.gather(1, sampled[:, None])).all()


def test_a_constant_shift_changes_nothing():
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(24, 300, generator=generator)
    seeds, positions = random_keys(24, generator)
    raw = coupled_sample(logits, seeds=seeds, positions=positions)
    normalised = logits.double().log_softmax(-1)
    assert torch.equal(raw, coupled_sample(normalised, seeds=seeds, positions=positions))


def test_samples_follow_p():
    """Chi-square over 6,000 seeds of one row; 7 degrees of freedom, .999 quantile 24.3."""
    probs = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.06, 0.05, 0.03, 0.01])
    rows = 6000
    sampled = coupled_sample(
        probs.log().expand(rows, 8),
        seeds=torch.arange(rows),
        positions=torch.full((rows,), 5),
    )
    counts = torch.bincount(sampled, minlength=8)
    assert float(((counts - rows * probs) ** 2 / (rows * probs)).sum()) < 24.3


@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(6, 1000), (70, 200)], ids=["pruned", "whole"]
)
def test_a_row_does_not_depend_on_its_neighbours(num_rows: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(10)
    logprobs = torch.log_softmax(torch.randn(num_rows, vocab_size, generator=generator), -1)
    seeds, positions = random_keys(num_rows, generator)
    together = coupled_sample(logprobs, seeds=seeds, positions=positions)
    assert together.shape == (num_rows,)
    for row in range(num_rows):
        one = slice(row, row + 1)
        alone = coupled_sample(logprobs[one], seeds=seeds[one], positions=positions[one])
        assert alone[0] == together[row]


# What the drafter ranks ------------------------------------------------------------------------


def test_greedy_rows_rank_by_logit():
    logits = torch.tensor([[0.1, 5.0, 3.0, 4.0], [9.0, 1.0, 2.0, 3.0]])
    ranked = rank_candidates(logits, [Rule(temperature=0.0)] * 2, [3, 4], 3)
    assert ranked.tolist() == [[1, 3, 2], [0, 3, 2]]


def test_greedy_batch_costs_one_topk(monkeypatch):
    def no_noise(*_):
        raise AssertionError("noise drawn for a greedy batch")

    monkeypatch.setattr("sglang_ssd.core.shared_noise.gumbel_noise", no_noise)
    ranked = rank_candidates(torch.randn(2, 50), [Rule(temperature=0.0)] * 2, [0, 1], 5)
    assert ranked.shape == (2, 5)


@pytest.mark.parametrize("count", [1, 4, 16, 40])
@pytest.mark.parametrize("vocab_size", [100, 5000, 12800, 49152])
def test_the_largest_of_a_large_vocabulary_are_all_found(vocab_size: int, count: int) -> None:
    """Also where many lie in one block, in the rest beyond the last block, or are ruled out."""
    generator = torch.Generator().manual_seed(vocab_size + count)
    logits = torch.randn(5, vocab_size, generator=generator)
    logits[1, 3:60] += 9
    logits[2, -7:] += 9
    logits[3, : vocab_size - 50] = float("-inf")
    ranked = rank_candidates(logits, [Rule(temperature=0.0)] * 5, [0] * 5, count)
    assert ranked.tolist() == logits.topk(count).indices.tolist()


def test_sampled_rows_rank_by_perturbed_log_probability():
    generator = torch.Generator().manual_seed(11)
    logits = 2 * torch.randn(12, 400, generator=generator)
    rules = [Rule(temperature=0.7, seed=seed) for seed in range(12)]
    positions = list(range(100, 112))
    ranked = torch.from_numpy(rank_candidates(logits, rules, positions, 6))
    noise = gumbel_noise(torch.arange(12), torch.tensor(positions), torch.arange(400)[None, :])
    expected = (logits.double() / 0.7 + noise).topk(6).indices
    assert torch.equal(ranked, expected)


def test_the_draft_is_what_the_target_would_draw_from_the_same_distribution():
    generator = torch.Generator().manual_seed(12)
    logits = 3 * torch.randn(40, 300, generator=generator)
    rules = [Rule(temperature=0.9, seed=seed) for seed in range(40)]
    ranked = rank_candidates(logits, rules, [7] * 40, 3)
    drawn = coupled_sample(
        torch.log_softmax(logits / 0.9, dim=-1),
        seeds=torch.arange(40),
        positions=torch.full((40,), 7),
    )
    assert ranked[:, 0].tolist() == drawn.tolist()


def test_greedy_and_sampled_rows_mix():
    generator = torch.Generator().manual_seed(13)
    logits = torch.randn(4, 600, generator=generator)
    rules = [Rule(temperature=0.0), Rule(seed=5), Rule(temperature=0.0), Rule(seed=6)]
    mixed = rank_candidates(logits, rules, [1, 2, 3, 4], 7)
    for row, rule in enumerate(rules):
        alone = rank_candidates(logits[row : row + 1], [rule], [row + 1], 7)
        assert alone[0].tolist() == mixed[row].tolist()


@pytest.mark.parametrize("rule", [Rule(top_k=2), Rule(top_p=0.7), Rule(min_p=0.5)])
def test_filtered_guesses_are_pushed_down_not_removed(rule):
    """p = .5, .3, .1, .1: each of the filters keeps the first two tokens."""
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    for seed in range(60):
        rule.seed = seed
        noise = gumbel_noise(torch.tensor([seed]), torch.tensor([9]), torch.arange(4)[None, :])
        pushed = torch.tensor([0.0, 0.0, FILTERED_GUESS_PENALTY, FILTERED_GUESS_PENALTY])
        expected = (logits + noise - pushed).argsort(descending=True)
        assert rank_candidates(logits, [rule], [9], 4).tolist() == expected.tolist()


def test_only_the_top_logits_are_looked_at():
    logits = torch.arange(1000.0)[None, :] * 1e-6
    ranked = rank_candidates(logits, [Rule(seed=3)], [0], 20, top_m=50)
    assert ranked.min() >= 950


def test_no_more_candidates_than_tokens():
    assert rank_candidates(torch.randn(1, 4), [Rule()], [0], 9).shape == (1, 4)
    assert rank_candidates(torch.randn(1, 4), [Rule(temperature=0.0)], [0], 9).shape == (1, 4)


# Seeds -----------------------------------------------------------------------------------------


def test_seeds_are_stable_distinct_and_accepted_by_sglang():
    assert request_seed(base_seed=1, rid="a") == 3894488335345329740
    seeds = [request_seed(base_seed=b, rid=f"r{i}") for b in range(3) for i in range(200)]
    copy = 42
    for _ in range(200):
        copy = next_copy_seed(copy)
        seeds.append(copy)
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("ruled_out", [-torch.inf, torch.nan])
@pytest.mark.parametrize("vocab_size", [7, 3000])
def test_a_row_without_any_token_gives_the_first(vocab_size, ruled_out):
    """Red when a request that rules everything out takes the others of its batch along."""
    logprobs = torch.zeros(2, vocab_size)
    logprobs[0] = ruled_out
    drawn = coupled_sample(logprobs, seeds=torch.tensor([1, 1]), positions=torch.tensor([5, 5]))
    alone = coupled_sample(logprobs[1:], seeds=torch.tensor([1]), positions=torch.tensor([5]))
    assert drawn.tolist() == [0, int(alone[0])]
