"""A target without a server: it verifies chains with a reference model and talks to a DraftLoop.

Everything happens in one thread and in a stated order, so a race is a matter of when `steps` are
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from sglang_ssd.config import SsdConfig
from sglang_ssd.core.shared_noise import rank_candidates
from sglang_ssd.drafter.loop import DraftLoop
from sglang_ssd.trace import Tracer
from sglang_ssd.wire.messages import (
    SCHEMA_VERSION,
    DraftClose,
    DraftRule,
    DraftSync,
    Hello,
    Served,
    SpeculateReply,
    ToDrafter,
    ToTarget,
    VerifyCommit,
)
from sglang_ssd.wire.transport import FromTarget, TransportStats
from toys.dense_penalties import DensePenalties
from toys.toy_draft_model import ToyDraftModel

GREEDY = DraftRule()
SAMPLED = DraftRule(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, seed=12345)


class DirectTransport:
    """The drafter's end as two lists."""

    def __init__(self) -> None:
        self.stats = TransportStats()
        self.inbox: list[FromTarget] = []
        self.outbox: list[tuple[bytes, ToTarget, list[int]]] = []
        self.waits: list[float] = []

    def send(self, peer: bytes, message: ToTarget, frames: Sequence[Sequence[int]] = ()) -> bool:
        self.outbox.append((peer, message, [i for frame in frames for i in frame]))
        return True

    def receive(self, timeout_s: float) -> list[FromTarget]:
        self.waits.append(timeout_s)
        arrived, self.inbox = self.inbox, []
        return arrived

    def close(self) -> None: ...


class Reply(msgspec.Struct, frozen=True):
    """One row of a reply."""

    rid: str
    generation: int
    base: int
    drafts: list[int]
    served: Served
    bonus_rank: int


class Request(msgspec.Struct):
    """What the target knows of a request."""

    rid: str
    tokens: list[int]
    rule: DraftRule
    generation: int = 1
    acked: int = 0
    drafts: list[int] = []
    served: list[Served] = []
    accept_lens: list[int] = []


class ToyTarget:
    """One target and the drafter that serves it."""

    def __init__(
        self,
        *,
        config: SsdConfig,
        num_steps: int,
        draft_model: Any = None,
        target_model: Any = None,
        max_sequences: int = 8,
        check: bool = True,
    ) -> None:
        self.num_steps = num_steps
        self.model = draft_model or ToyDraftModel()
        self.target_model = target_model or self.model
        self.transport = DirectTransport()
        self.now = 0.0
        self.loop = DraftLoop(
            model=self.model,
            transport=self.transport,
            config=config,
            max_sequences=max_sequences,
            tokens=[],
            tracer=Tracer(None, ""),
            clock=lambda: self.now,
        )
        self.requests: dict[str, Request] = {}
        self.replies: list[Reply] = []
        self._round_id = 0
        self._check = check
        self.hello()

    def hello(self, peer: bytes = b"target") -> None:
        self.send(self.greeting(), peer=peer)
        self.step()

    def greeting(self) -> Hello:
        return Hello(
            schema_version=SCHEMA_VERSION,
            target_id="toy",
            num_steps=self.num_steps,
            vocab_size=self.model.vocab_size,
            token_map_blocks=[],
            allow_padded_vocab=False,
        )

    def send(
        self, message: ToDrafter, ids: list[int] | None = None, peer: bytes = b"target"
    ) -> None:
        self.transport.inbox.append(FromTarget(peer, message, ids or []))

    def step(self) -> bool:
        """One turn of the drafter's loop; replies are kept in `replies`."""
        busy = self.loop.step(0.0)
        for _, message, ids in self.transport.outbox:
            if isinstance(message, SpeculateReply):
                self.replies += split_reply(message, ids)
        self.transport.outbox.clear()
        if self._check:
            self.loop.table.check_partition()
        return busy

    def run_until_idle(self, limit: int = 1000) -> int:
        """Steps it took."""
        for count in range(limit):
            if not self.step():
                return count
        raise AssertionError(f"still busy after {limit} steps")

    def open(self, rid: str, prompt: list[int], rule: DraftRule = GREEDY) -> Request:
        request = Request(rid=rid, tokens=list(prompt), rule=rule, acked=len(prompt))
        self.requests[rid] = request
        self.sync(request)
        return request

    def sync(self, request: Request) -> None:
        request.acked = len(request.tokens)
        message = DraftSync(
            rid=request.rid,
            generation=request.generation,
            committed_len=len(request.tokens),
            rule=request.rule,
        )
        self.send(message, list(request.tokens))

    def close(self, rid: str) -> None:
        request = self.requests.pop(rid)
        self.send(DraftClose(rids=[rid], generations=[request.generation]))

    def verify(self, request: Request) -> list[int]:
        """The target's tokens of one round, the bonus last; the request's drafts are used up."""
        drafts, request.drafts = request.drafts, []
        base = len(request.tokens)
        logits, _ = self.target_model.reference(request.tokens + drafts)
        rows = range(base - 1, base + len(drafts))
        shaped = shape_as_target(logits[base - 1 :], request, drafts)
        ranked = rank_candidates(shaped, [request.rule] * len(rows), list(rows), 1)
        chosen = [int(token) for token in ranked[:, 0]]
        correct = 0
        while correct < len(drafts) and drafts[correct] == chosen[correct]:
            correct += 1
        request.tokens += chosen[: correct + 1]
        request.accept_lens.append(correct + 1)
        return chosen[: correct + 1]

    def commit(self, requests: Sequence[Request], num_verified: int = 0) -> int:
        """Report everything since the last acknowledgement; returns the round id."""
        self._round_id += 1
        ids = [token for request in requests for token in request.tokens[request.acked :]]
        message = VerifyCommit(
            round_id=self._round_id,
            rids=[request.rid for request in requests],
            generations=[request.generation for request in requests],
            base_committed_lens=[request.acked for request in requests],
            num_verified_drafts=[num_verified] * len(requests),
            num_tokens=[len(request.tokens) - request.acked for request in requests],
        )
        self.send(message, ids)
        return self._round_id

    def take_replies(self) -> list[Reply]:
        """Use what has arrived as drafts of the next round."""
        arrived, self.replies = self.replies, []
        for reply in arrived:
            request = self.requests.get(reply.rid)
            if request is None or reply.generation != request.generation:
                continue
            if reply.served == "unknown":
                request.generation += 1
                self.sync(request)
            elif reply.base == len(request.tokens):
                request.acked = reply.base
                request.drafts = reply.drafts
                request.served.append(reply.served)
        return arrived

    def round(self, *, max_steps: int | None = None) -> list[Reply]:
        """Verify, commit, run the drafter until all is answered, then max_steps more (or all)."""
        requests = list(self.requests.values())
        for request in requests:
            self.verify(request)
        self.commit(requests)
        for _ in range(200):
            if len(self.replies) >= len(requests):
                break
            self.step()
        assert len(self.replies) == len(requests), "every row is answered once"
        if max_steps is None:
            self.run_until_idle()
        else:
            for _ in range(max_steps):
                self.step()
        return self.take_replies()


def shape_as_target(
    logits: torch.Tensor,  # [1 + len(drafts), V]
    request: Request,
    drafts: list[int],
) -> torch.Tensor:
    """Penalties and bias of each row, token by token."""
    rule = request.rule
    penalties = DensePenalties(rule, vocab_size=logits.shape[1], stop_tokens=rule.stop_tokens)
    for token in request.tokens[rule.prompt_len :]:
        penalties.accumulate(token)
    shaped = []
    for row, token in zip(logits, [*drafts, 0], strict=True):
        shaped.append(penalties.apply(row.clone()))
        shaped[-1][rule.bias_tokens] += torch.tensor(rule.bias_values)
        penalties.accumulate(token)
    return torch.stack(shaped)


def split_reply(message: SpeculateReply, ids: list[int]) -> list[Reply]:
    rows, start = [], 0
    for index, rid in enumerate(message.rids):
        end = start + message.num_drafts[index]
        rows.append(
            Reply(
                rid=rid,
                generation=message.generations[index],
                base=message.base_committed_lens[index],
                drafts=ids[start:end],
                served=message.served[index],
                bonus_rank=message.bonus_ranks[index],
            )
        )
        start = end
    return rows
