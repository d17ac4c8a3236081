"""A target's rounds over the fake wire: DraftClient, FakeWire, DraftLoop, toy models.

Everything happens in one thread and time is a count of ticks, so the same seed gives the same run.
"""

from __future__ import annotations

import functools

import msgspec
import torch

from sglang_ssd.config import SsdConfig
from sglang_ssd.core.acceptance import accept_chain
from sglang_ssd.core.row_penalties import OutputHistory, penalise_rows, verify_runs
from sglang_ssd.core.shared_noise import coupled_sample
from sglang_ssd.drafter.loop import DraftLoop
from sglang_ssd.target.draft_client import DraftClient
from sglang_ssd.target.reply_deadline import ReplyDeadline
from sglang_ssd.trace import Tracer
from sglang_ssd.wire.fake import FakeWire, Faults
from sglang_ssd.wire.messages import SCHEMA_VERSION, DraftRule, Hello
from toys.toy_draft_model import ToyDraftModel

NUM_STEPS = 3
NUM_TOKENS = 20
PROMPTS = {"a": [5, 9, 2], "b": [1], "c": list(range(30)), "d": [7, 7, 7, 7]}
RULES = {
    "a": DraftRule(),
    "b": DraftRule(temperature=0.9, seed=11),
    "c": DraftRule(temperature=0.6, seed=-5),
    "d": DraftRule(prompt_len=4, frequency_penalty=1.5, repetition_penalty=1.2),
}
HELLO = Hello(
    schema_version=SCHEMA_VERSION,
    target_id="toy",
    num_steps=NUM_STEPS,
    vocab_size=61,
    token_map_blocks=[],
    allow_padded_vocab=False,
)


def choose(model: ToyDraftModel, rule: DraftRule, tokens: list[int], num: int) -> torch.Tensor:
    """The target's own tokens [num] after each of the last num tokens."""
    logits = model.reference(tokens)[0][-num:].clone()
    committed_len = len(tokens) - num + 1
    output = OutputHistory(tokens[rule.prompt_len : committed_len])
    runs = verify_runs(tokens[committed_len:])
    penalise_rows(logits, rule=rule, output=output, runs=runs, stop_tokens=())
    if rule.temperature == 0:
        return logits.argmax(dim=-1)
    logprobs = torch.log_softmax(logits / rule.temperature, dim=-1)
    positions = torch.arange(len(tokens) - num, len(tokens))
    return coupled_sample(logprobs, seeds=torch.full((num,), rule.seed), positions=positions)


@functools.cache
def plain_text(name: str) -> list[int]:
    model = ToyDraftModel(seed=0, total_slots=1)
    text = list(PROMPTS[name])
    for _ in range(NUM_TOKENS):
        text.append(int(choose(model, RULES[name], text, 1)[0]))
    return text


class Server:
    """A target's rounds; while it verifies, the drafter has a few turns."""

    def __init__(
        self,
        wire: FakeWire,
        *,
        draft_seed: int,
        backup: str = "jit",
        settings: dict[str, object] | None = None,
        max_batch_size: int | None = None,
        cases: dict[str, str] | None = None,
        turns: int = 6,
    ) -> None:
        self.turns = turns
        """Of the drafter, in one verify."""
        self.target_model = ToyDraftModel(seed=0, total_slots=1)
        self.wire = wire
        self.draft_seed = draft_seed
        self.config = msgspec.convert(
            {"fan_out": [2], "backup": backup, **(settings or {})}, SsdConfig
        )
        self.loop = self.new_drafter()
        self.drafter_runs = True
        wire.pump = self.step_drafter
        self.client = DraftClient(
            wire.target(),
            hello=HELLO,
            deadline=ReplyDeadline(least_s=16 * wire.tick_s, most_s=16 * wire.tick_s),
            resync_tokens=40,
            max_batch_size=max_batch_size,
            clock=wire.clock,
        )
        self.cases = cases or {name: name for name in PROMPTS}
        """Of each request, whose prompt and rule it has."""
        self.texts = {rid: list(PROMPTS[name]) for rid, name in self.cases.items()}

    def new_drafter(self) -> DraftLoop:
        return DraftLoop(
            model=ToyDraftModel(seed=self.draft_seed, total_slots=1000),
            transport=self.wire.drafter,
            config=self.config,
            max_sequences=8,
            tokens=[],
            tracer=Tracer(None, ""),
            clock=self.wire.clock,
        )

    def start(self, to_drafter: Faults, to_target: Faults) -> None:
        """Handshake (without it there is nothing to test), prompts, the prefill's own tokens."""
        self.client.look()
        self.step_drafter()
        self.client.look()
        assert self.client.state == "ready"
        self.wire.faults["to_drafter"], self.wire.faults["to_target"] = to_drafter, to_target
        self._open(list(self.texts))

    def begin_again(self, *rids: str) -> None:
        """The same requests once more, under the same names."""
        for rid in rids:
            self.client.close(rid)
            self.texts[rid] = list(PROMPTS[self.cases[rid]])
        self._open(list(rids))

    def _open(self, rids: list[str]) -> None:
        for rid in rids:
            rule = RULES[self.cases[rid]]
            self.client.open(rid=rid, tokens=self.texts[rid], rule=rule)
        self.verify_and_commit(rids, [[] for _ in rids])

    def step_drafter(self) -> None:
        if self.drafter_runs:
            self.loop.step(0.0)

    def run(self) -> int:
        """Rounds until every request has its tokens."""
        rounds = 0
        while self.unfinished():
            self.round()
            rounds += 1
            assert rounds <= NUM_TOKENS, "a round gives every request a token at least"
        return rounds

    def unfinished(self) -> list[str]:
        return [
            rid
            for rid, text in self.texts.items()
            if len(text) < len(PROMPTS[self.cases[rid]]) + NUM_TOKENS
        ]

    def round(self, rids: list[str] | None = None) -> None:
        """Of these requests, or of all that are unfinished."""
        rids = self.unfinished() if rids is None else rids
        self.verify_and_commit(rids, self.client.collect(rids))
        stats = self.client.stats
        assert stats.hits + stats.misses + sum(stats.plain_decode.values()) == stats.rows
        asked = stats.on_time_rows + stats.missing_rows + stats.prefill_rows
        assert asked + stats.plain_rows == stats.rows

    def verify_and_commit(self, rids: list[str], drafts: list[list[int]]) -> None:
        new_tokens = [self.verify(rid, row) for rid, row in zip(rids, drafts, strict=True)]
        for _ in range(self.turns):
            self.wire.tick()
            self.step_drafter()
        self.loop.table.check_partition()
        self.client.commit(
            rids=rids, new_tokens=new_tokens, num_verified=[len(row) for row in drafts]
        )

    def verify(self, rid: str, drafts: list[int]) -> list[int]:
        text = self.texts[rid]
        chosen = choose(self.target_model, RULES[self.cases[rid]], text + drafts, len(drafts) + 1)
        _, lens = accept_chain(
            torch.tensor([drafts], dtype=torch.int64), chosen[None], torch.tensor([len(drafts)])
        )
        new_tokens: list[int] = chosen[: int(lens[0])].tolist()
        text.extend(new_tokens)
        return new_tokens

    def expect_plain_texts(self) -> None:
        for rid, name in self.cases.items():
            expected = plain_text(name)
            assert self.texts[rid][: len(expected)] == expected
