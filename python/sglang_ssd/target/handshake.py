"""Bringing up the drafter: wait for it, compare vocabularies, refuse what would never draft well."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from typing import TYPE_CHECKING, Protocol

from sglang_ssd.config import SsdConfig
from sglang_ssd.target.draft_client import DraftClient
from sglang_ssd.wire.messages import SCHEMA_VERSION, Hello, Refusal, Welcome
from sglang_ssd.wire.transport import TargetSocket, Transport

if TYPE_CHECKING:
    from sglang_ssd.trace import Tracer

logger = logging.getLogger(__name__)

TOKENS_PER_BLOCK = 1024
_HELLO_INTERVAL_S = 1.0


class Drafter(Protocol):
    """What the handshake needs of a started drafter (drafter/process.py)."""

    endpoint: str

    def alive(self) -> bool: ...

    def exit_reason(self) -> str: ...


def connect(
    *,
    drafter: Drafter | None,
    config: SsdConfig,
    vocab_size: int,
    context_len: int,
    tokenizer: object | None,
    num_steps: int,
    tracer: Tracer,
) -> DraftClient:
    """Client of the started drafter, or of the one that listens at config.endpoint.

    Raises RuntimeError with the reason if the drafter refuses, dies or is not there in time.
    """
    endpoint = drafter.endpoint if drafter is not None else config.endpoint
    assert endpoint is not None, "a drafter is started exactly when no endpoint is configured"
    tokens = token_strings(tokenizer)
    hello = Hello(
        schema_version=SCHEMA_VERSION,
        target_id=uuid.uuid4().hex[:12],
        num_steps=num_steps,
        vocab_size=vocab_size,
        context_len=context_len,
        token_map_blocks=digest_blocks(tokens),
        allow_padded_vocab=config.allow_padded_vocab,
    )
    transport = TargetSocket(endpoint)
    alive = drafter.alive if drafter is not None else _always
    try:
        welcome = _wait_for_welcome(transport, hello, drafter, config.start_timeout_s, tokens)
    except BaseException:
        transport.close()
        raise
    if welcome.context_len < context_len:
        logger.warning(
            "The drafter's context (%d) is shorter than the target's (%d): requests decode plainly past it.",
            welcome.context_len,
            context_len,
        )
    logger.info("SSD drafter ready: pid %d at %s", welcome.drafter_pid, endpoint)
    return DraftClient(
        transport,
        num_steps=num_steps,
        vocab_size=vocab_size,
        reply_deadline_s=config.reply_deadline_ms / 1000,
        drafter_alive=alive,
        tracer=tracer,
    )


def token_strings(tokenizer: object | None) -> list[str]:
    """Token string of every id, "" for ids without one; [] without a tokenizer (nothing to compare)."""
    get_vocab = getattr(tokenizer, "get_vocab", None)
    if get_vocab is None:
        return []
    by_id = {index: token for token, index in get_vocab().items()}
    return [by_id.get(index, "") for index in range(max(by_id, default=-1) + 1)]


def digest_blocks(tokens: list[str]) -> list[str]:
    """sha256 per 1024 ids, so that two maps can be compared over the wire and narrowed to a block."""
    return [
        hashlib.sha256("\0".join(tokens[start : start + TOKENS_PER_BLOCK]).encode()).hexdigest()
        for start in range(0, len(tokens), TOKENS_PER_BLOCK)
    ]


def first_difference(ours: list[str], refusal: Refusal) -> str:
    """Sentence naming the first id of the refused block whose token differs; "" if there is no block."""
    if refusal.block_index < 0:
        return ""
    start = refusal.block_index * TOKENS_PER_BLOCK
    block = ours[start : start + TOKENS_PER_BLOCK]
    theirs = refusal.block_tokens
    for offset in range(max(len(block), len(theirs))):
        mine = block[offset] if offset < len(block) else None
        other = theirs[offset] if offset < len(theirs) else None
        if mine != other:
            return f"first difference: id {start + offset} is {mine!r} for the target, {other!r} for the drafter"
    return ""


def _always() -> bool:
    return True


def _wait_for_welcome(
    transport: Transport,
    hello: Hello,
    drafter: Drafter | None,
    timeout_s: float,
    tokens: list[str],
) -> Welcome:
    deadline = time.monotonic() + timeout_s
    next_hello = 0.0
    while time.monotonic() < deadline:
        if drafter is not None and not drafter.alive():
            raise RuntimeError(f"the SSD drafter did not start: {drafter.exit_reason()}")
        if time.monotonic() >= next_hello:
            transport.send(hello, [])
            next_hello = time.monotonic() + _HELLO_INTERVAL_S
        for message, _ in transport.receive(0.2):
            if isinstance(message, Welcome):
                return message
            if isinstance(message, Refusal):
                reasons = [*message.reasons, first_difference(tokens, message)]
                raise RuntimeError(
                    "the SSD drafter refuses this target: " + "; ".join(r for r in reasons if r)
                )
    raise RuntimeError(
        f"the SSD drafter was not ready within --ssd-start-timeout-s {timeout_s:g}; "
        "raise it for a large draft model, or see the drafter's log above"
    )
