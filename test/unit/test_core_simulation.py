"""The core end to end on toy models of 8 tokens: a target, a drafter, and every fault in between.

Many sequences run as one batch. The target verifies chains with `accept_chain` on tokens drawn by
`coupled_sample`; the drafter keeps a SpeculationCache per sequence. Replies and commits get lost,
drafts get shortened or replaced by garbage. Whatever happens, tokens equal plain decoding.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from sglang_ssd.core.acceptance import accept_chain
from sglang_ssd.core.sampling_filter import filter_logprobs
from sglang_ssd.core.shared_noise import coupled_sample, rank_candidates
from sglang_ssd.core.speculation_cache import SpeculationCache
from toys.tree import ids_through_next_pass

VOCAB = 8
NUM_SEQUENCES = 120
NUM_TOKENS = 20
PROMPT = [1, 2, 3]


class Rule(msgspec.Struct):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class Faults(msgspec.Struct):
    lose_commit: float = 0.0
    lose_reply: float = 0.0
    shorten: float = 0.0
    garbage: float = 0.0
    cut_branches: float = 0.0


def make_rules(num: int) -> list[Rule]:
    """Greedy, plain, and each filter, in turn."""
    kinds = [
        (0.0, -1, 1.0, 0.0),
        (1.0, -1, 1.0, 0.0),
        (0.7, 3, 1.0, 0.0),
        (1.3, -1, 0.8, 0.1),
    ]
    return [Rule(*kinds[i % len(kinds)], seed=1000 + i) for i in range(num)]


class ToyModel:
    """Next-token logits from the last two tokens."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits  # [V, V, V]

    def __call__(self, pairs: torch.Tensor) -> torch.Tensor:  # [R, 2] -> [R, V]
        return self.logits[pairs[:, 0], pairs[:, 1]]


def toy_pair() -> tuple[ToyModel, ToyModel]:
    """A target and a drafter that agrees with it most of the time."""
    generator = torch.Generator().manual_seed(0)
    target = 2.0 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
    noise = 0.7 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
    return ToyModel(target), ToyModel(target + noise)


class Target:
    """Chooses the target's own tokens: greedy rows by top-k 1, as SGLang normalises them."""

    def __init__(self, model: ToyModel, rules: list[Rule]) -> None:
        self._model = model
        greedy = torch.tensor([rule.temperature == 0 for rule in rules])
        temperatures = torch.tensor([rule.temperature for rule in rules])
        top_ks = torch.tensor([rule.top_k for rule in rules])
        self._temperatures = torch.where(greedy, 1.0, temperatures)
        self._top_ks = torch.where(greedy, 1, torch.where(top_ks < 1, 1 << 30, top_ks))
        self._top_ps = torch.tensor([rule.top_p for rule in rules])
        self._min_ps = torch.tensor([rule.min_p for rule in rules])
        self._seeds = torch.tensor([rule.seed for rule in rules])

    def choose(self, texts: list[list[int]], chains: torch.Tensor) -> torch.Tensor:
        """Tokens [B, W] after each place of the chains [B, W], whose first ends the text."""
        batch, width = chains.shape
        before = torch.tensor([text[-2] for text in texts])[:, None]
        previous = torch.cat([before, chains[:, :-1]], dim=1)
        logits = self._model(torch.stack([previous, chains], dim=-1).view(-1, 2))
        rows = torch.arange(batch).repeat_interleave(width)
        starts = torch.tensor([len(text) - 1 for text in texts])[:, None]
        logprobs = filter_logprobs(
            torch.log_softmax(logits / self._temperatures[rows, None], dim=-1),
            top_ks=self._top_ks[rows],
            top_ps=self._top_ps[rows],
            min_ps=self._min_ps[rows],
        )
        positions = (starts + torch.arange(width)).view(-1)
        tokens = coupled_sample(logprobs, seeds=self._seeds[rows], positions=positions)
        return tokens.view(batch, width)


def decode_plainly(target: Target, num: int) -> list[list[int]]:
    texts = [list(PROMPT) for _ in range(num)]
    for _ in range(NUM_TOKENS):
        chosen = target.choose(texts, torch.tensor([[text[-1]] for text in texts]))
        for text, token in zip(texts, chosen[:, 0].tolist(), strict=True):
            text.append(token)
    return texts


class ToyDrafter:
    """A speculation cache per sequence; every forward serves all sequences."""

    def __init__(
        self, model: ToyModel, rules: list[Rule], *, num_steps: int, fan_out: list[int], backup: str
    ) -> None:
        self._model = model
        self._rules = rules
        self._num_steps = num_steps
        self._fan_out = fan_out
        self._backup = backup
        self._next_slot = 0
        self.caches = [
            SpeculationCache(num_steps=num_steps, committed_tokens=PROMPT) for _ in rules
        ]
        self.num_taken = {"hit": 0, "chain_hit": 0, "miss": 0}

    def take(self, row: int, base: int, tokens: list[int]) -> None:
        new = self.caches[row].unseen_tokens(base, tokens)
        if new:
            self.num_taken[self.caches[row].take(new).kind] += 1

    def draft(self, *, depth: int) -> list[list[int]]:
        """Drafts for every row as it stands, then `depth` passes for the round to come.

        A row whose commit was lost has its branches already; they only grow.
        """
        fresh = [row for row, cache in enumerate(self.caches) if not cache.has_tree]
        missed = [row for row in fresh if not self.caches[row].drafts]
        self._feed(missed)
        if self._backup == "jit":
            for step in range(self._num_steps):
                if step:
                    self._feed(missed)
                for row in missed:
                    self.caches[row].grow_chain()
        drafts = [cache.drafts for cache in self.caches]
        for row in fresh:
            self.caches[row].start_branches(self._fan_out)
        for _ in range(depth):
            self._make_pass()
        return drafts

    def _feed(self, rows: list[int]) -> None:
        contexts = [(row, self.caches[row].tokens) for row in rows]
        ranked = self._rank([(row, ids[-2:], len(ids) - 1) for row, ids in contexts])
        for row, candidates in zip(rows, ranked, strict=True):
            cache = self.caches[row]
            cache.feed(self._slots(len(cache.unfed_tokens)), candidates)

    def _make_pass(self) -> None:
        contexts = []
        growing = [(row, cache) for row, cache in enumerate(self.caches) if not cache.is_built]
        for row, cache in growing:
            made, lines = cache.next_pass(), ids_through_next_pass(cache)
            assert made.tokens.tolist() == [line[-1] for line in lines]
            assert made.positions.tolist() == [len(line) - 1 for line in lines]
            contexts += [(row, list(line[-2:]), len(line) - 1) for line in lines]
        ranked, start = self._rank(contexts), 0
        for _, cache in growing:
            end = start + len(cache.next_pass().tokens)
            cache.add_pass(self._slots(end - start), ranked[start:end])
            start = end

    def _rank(self, contexts: list[tuple[int, list[int], int]]) -> np.ndarray:
        if not contexts:
            return np.zeros((0, VOCAB), dtype=np.int64)
        logits = self._model(torch.tensor([pair for _, pair, _ in contexts]))
        rules = [self._rules[row] for row, _, _ in contexts]
        return rank_candidates(logits, rules, [position for _, _, position in contexts], VOCAB)

    def _slots(self, count: int) -> np.ndarray:
        self._next_slot += count
        return np.arange(self._next_slot - count, self._next_slot)


def speculate(
    target: Target, drafter: ToyDrafter, rules: list[Rule], faults: Faults, *, num_steps: int
) -> tuple[list[list[int]], float]:
    """Texts, and tokens per verified row."""
    rng = np.random.default_rng(1)

    def strikes(probability: float) -> bool:
        return probability > 0 and rng.random() < probability

    texts = [list(PROMPT) for _ in rules]
    acknowledged = [len(PROMPT)] * len(rules)
    rounds = 0
    while min(len(text) for text in texts) < len(PROMPT) + NUM_TOKENS:
        rounds += 1
        depth = int(rng.integers(num_steps + 2)) if strikes(faults.cut_branches) else num_steps + 1
        replies = drafter.draft(depth=depth)
        used: list[list[int]] = []
        for row, (text, reply) in enumerate(zip(texts, replies, strict=True)):
            fits = drafter.caches[row].committed_len == len(text)
            drafts = reply if fits and not strikes(faults.lose_reply) else []
            if drafts:
                acknowledged[row] = len(text)
            if strikes(faults.garbage):
                drafts = rng.integers(VOCAB, size=num_steps).tolist()
            if strikes(faults.shorten):
                drafts = drafts[: int(rng.integers(num_steps))]
            used.append(drafts)
        padded = torch.tensor([[*drafts, *[0] * (num_steps - len(drafts))] for drafts in used])
        bonus = torch.tensor([[text[-1]] for text in texts])
        chosen = target.choose(texts, torch.cat([bonus, padded], dim=1))
        _, lens = accept_chain(padded, chosen, torch.tensor([len(drafts) for drafts in used]))
        for row, (text, accept_len) in enumerate(zip(texts, lens.tolist(), strict=True)):
            text.extend(chosen[row, :accept_len].tolist())
            if not strikes(faults.lose_commit):
                drafter.take(row, acknowledged[row], text[acknowledged[row] :])
    generated = sum(len(text) - len(PROMPT) for text in texts)
    return texts, generated / (rounds * len(texts))


ALL_FAULTS = Faults(lose_commit=0.2, lose_reply=0.2, shorten=0.2, garbage=0.1, cut_branches=0.3)


@pytest.mark.parametrize("backup", ["jit", "none"])
@pytest.mark.parametrize(
    "faults",
    [Faults(), Faults(lose_reply=0.4), Faults(lose_commit=0.4), Faults(garbage=1.0), ALL_FAULTS],
    ids=["no faults", "lost replies", "lost commits", "garbage", "all faults"],
)
def test_tokens_equal_plain_decoding(backup, faults):
    num_steps = 3
    rules = make_rules(NUM_SEQUENCES)
    target_model, draft_model = toy_pair()
    target = Target(target_model, rules)
    drafter = ToyDrafter(
        draft_model, rules, num_steps=num_steps, fan_out=[2, 1, 1, 2], backup=backup
    )
    texts, tokens_per_round = speculate(target, drafter, rules, faults, num_steps=num_steps)
    expected = decode_plainly(target, NUM_SEQUENCES)
    end = len(PROMPT) + NUM_TOKENS
    assert [text[:end] for text in texts] == expected
    hits, total = drafter.num_taken["hit"], sum(drafter.num_taken.values())
    if faults == Faults():
        assert hits / total > 0.75  # fan-out 2 of 8 tokens on this pair; a broken walk gives none
        assert tokens_per_round > 2.0
    if faults.lose_reply or faults.shorten:
        assert drafter.num_taken["chain_hit"] > 100
