"""Every message between target and drafter, on one screen.

Lengths count tokens of one request from the first prompt token. `committed_len` is the number of
committed tokens, the bonus token included, so the bonus sits at position committed_len - 1 and
drafts continue at position committed_len. A VerifyCommit carries all ids since the base that the
drafter last acknowledged (the base_committed_len of a SpeculateReply row, or the length of the
DraftSync), so a lost or late commit is repaired by the next one. Token ids travel as one int32
frame behind the header.

A row is named by (rid, generation): the target bumps the generation whenever it opens a sequence
for a rid, so anything that still speaks of an older opening is a no-op.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar, get_args

import msgspec

from sglang_ssd.wire.token_map import MAX_TOKEN_CHARS, TOKENS_PER_BLOCK

SCHEMA_VERSION = 7

MAX_COUNT = (1 << 31) - 1  # sums of a few still fit a message

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT // 2)]  # with the ids behind it a Count
Total = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_COUNT)]

MAX_RANK = 1023
"""Ranks from here on are told as this one, so that a target counts a bounded number of them."""

Rank = Annotated[int, msgspec.Meta(ge=-1, le=MAX_RANK)]

MAX_NUM_STEPS = 16
"""No target asks for more drafts of a row."""

NumDrafts = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUM_STEPS)]

MAX_ROWS = 1 << 14
"""No message has more: a target that runs as many requests is not known."""

T = TypeVar("T")

Column = Annotated[list[T], msgspec.Meta(max_length=MAX_ROWS)]
"""One value per row of a message."""

MAX_RID_CHARS = 256
"""A request of a longer name has no drafts: every commit repeats the names of its rows."""

Rid = Annotated[str, msgspec.Meta(max_length=MAX_RID_CHARS)]

# What an end says of itself is logged by the other: nothing of it is long.
PeerId = Annotated[str, msgspec.Meta(max_length=64)]
Sha256 = Annotated[str, msgspec.Meta(max_length=64)]
Blocks = Annotated[list[Sha256], msgspec.Meta(max_length=1 << 14)]  # of 16 million tokens
BlockToken = Annotated[str, msgspec.Meta(max_length=MAX_TOKEN_CHARS)]
BlockTokens = Annotated[list[BlockToken], msgspec.Meta(max_length=TOKENS_PER_BLOCK)]

MAX_REASON_CHARS = 1024
"""Whoever refuses cuts what would be longer."""

Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
Reasons = Annotated[list[Reason], msgspec.Meta(max_length=16)]

MAX_RULE_TOKENS = 512
"""No list of a DraftRule is longer."""

RuleTokens = Annotated[list[int], msgspec.Meta(max_length=MAX_RULE_TOKENS)]
RuleValues = Annotated[list[float], msgspec.Meta(max_length=MAX_RULE_TOKENS)]

NO_ROUND = 0
"""round_id of a reply to no commit."""

Served = Literal[
    "hit",
    "chain_hit",
    "jit",
    "sync",
    "none",
    "prefill",
    "reading",
    "full",
    "context",
    "foreign",
    "unknown",
]
"""How a reply row came about.

hit: a drafted branch was the outcome. chain_hit: fewer drafts than sent were verified and the bonus
is the chain's own next token. jit: drafted after a miss. sync: `mode="sync"`. Rows without drafts:
none (a miss under backup "none"), prefill (the prompt is not prefilled yet), reading (it has just
been, or is being in mode sync: the row's drafts are still to come, as another reply), full (no slot
or table row), context (past the drafter's context), foreign (ids that the drafter's vocabulary
lacks, or a rule that it cannot follow), unknown (no such sequence: the target must send DraftSync
again).
"""

RefusedCause = Literal[
    "header",
    "oversize",
    "schema_version",
    "columns",
    "id_frame",
    "key",
    "hello",
    "stranger",
    "sync",
    "row",
    "contradiction",
]
"""What a drafter refused.

header to id_frame: a malformed message (frames.Cause). key: a peer whose CURVE handshake failed.
hello: a target that it cannot serve. stranger: a message of one that it has not welcomed. sync: a
sequence of foreign ids or a rule that it cannot follow. row: a row that does not continue its
sequence. contradiction: one that takes committed ids back.
"""

REFUSED_CAUSES: tuple[RefusedCause, ...] = get_args(RefusedCause)


class DraftRule(msgspec.Struct, frozen=True):
    """How the target will choose tokens of one request, so that the drafter can choose likewise.

    Penalties count what follows the first prompt_len tokens (core/row_penalties.py); stop_tokens
    are ruled out while that is shorter than min_new_tokens. Then bias_values are added.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = -1  # -1 is off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64-bit, keys the shared noise
    prompt_len: Count = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: Count = 0
    stop_tokens: RuleTokens = []
    bias_tokens: RuleTokens = []
    bias_values: RuleValues = []  # as many as bias_tokens


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a target: what it is about to serve. Answered by Welcome or Refusal."""

    schema_version: int
    target_id: PeerId  # unique per server, names the peer in logs
    num_steps: int
    vocab_size: Length  # rows of the target's lm_head
    token_map_blocks: Blocks  # sha256 of the token strings of ids [1024 * i, 1024 * (i + 1))
    allow_padded_vocab: bool


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    schema_version: int
    drafter_pid: int
    vocab_size: int
    context_len: int
    drafter_id: PeerId = ""  # new for every drafter process; schema 1 had none


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why the drafter will not serve this target; its tokens of the first block that differs."""

    reasons: Reasons
    block_index: int = -1
    block_tokens: BlockTokens = []  # token_map.token_block
    drafter_pid: int = -1


class HelloRequest(msgspec.Struct, frozen=True, tag="hello?"):
    """The drafter's answer to a target that it has not welcomed, as after its own restart."""


class DraftSync(msgspec.Struct, frozen=True, tag="sync"):
    """Open a sequence. Frame 0: all committed ids so far, int32[committed_len].

    Answered only if it cannot be opened: by a SpeculateReply of round NO_ROUND.
    """

    rid: Rid
    generation: int
    committed_len: Length
    rule: DraftRule


class VerifyCommit(msgspec.Struct, frozen=True, tag="commit"):
    """One round's outcomes for the whole batch. Frame 0: the new ids, int32[sum(num_tokens)].

    A row renews the lease of its sequence. One without ids does nothing else: a target sends such
    rows while it prefills, because no round ends then.
    """

    round_id: int  # new for every commit; its replies carry it
    rids: Column[Rid]
    generations: Column[int]
    base_committed_lens: Column[Length]  # ids of row i start at this length
    # How many drafts this round's verify looked at: for tests and whoever records the wire. The
    # drafter needs no more than the ids.
    num_verified_drafts: Column[Count]
    num_tokens: Column[Count]


class DraftClose(msgspec.Struct, frozen=True, tag="close"):
    """Free the sequences. With close_all: every sequence of this target."""

    rids: Column[Rid]
    generations: Column[int]
    close_all: bool = False


class SpeculateReply(msgspec.Struct, frozen=True, tag="reply"):
    """Drafts for rows of one or more commits. Frame 0: draft ids, int32[sum(num_drafts)].

    One commit may be answered by several replies: hits at once, missed rows when they are drafted.
    """

    round_id: int
    rids: Column[Rid]
    generations: Column[int]
    base_committed_lens: Column[Count]  # acknowledged; drafts of row i continue this length
    num_drafts: Column[NumDrafts]
    served: Column[Served]
    bonus_ranks: Column[Rank]  # rank of the bonus among its position's guesses; -1: not guessed


class StatusRequest(msgspec.Struct, frozen=True, tag="status?"):
    pass


class DrafterStatus(msgspec.Struct, frozen=True, tag="status"):
    """Counters since start, for tests, metrics and the benchmark."""

    live_sequences: Total
    free_slots: Total
    total_slots: Total
    branch_steps: Total
    jit_steps: Total
    prefill_tokens: Total
    hits: Total
    misses: Total
    stale_commits: Total
    drafting_seconds: Seconds  # wall time inside drafter forwards
    branch_step_seconds: Seconds  # of it, inside branch steps
    dropped_replies: Total  # the target's queue was full, or it was gone
    resident_bytes: Total
    device_bytes: Total  # 0 on a CPU
    refused: dict[RefusedCause, Total]


ToDrafter = Hello | DraftSync | VerifyCommit | DraftClose | StatusRequest
ToTarget = Welcome | Refusal | HelloRequest | SpeculateReply | DrafterStatus
