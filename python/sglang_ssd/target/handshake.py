"""Bringing up the drafter: wait for it, compare vocabularies, refuse what can never draft.

What happens when a drafter that was welcomed goes away is drafter_link.py's.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Protocol

from sglang_ssd.config import SsdConfig, without_effect
from sglang_ssd.target.draft_client import DraftClient
from sglang_ssd.target.reply_deadline import ReplyDeadline
from sglang_ssd.target.supervisor import DrafterSupervisor
from sglang_ssd.wire.curve import KeyFiles
from sglang_ssd.wire.messages import SCHEMA_VERSION, Hello
from sglang_ssd.wire.token_map import digest_blocks, token_strings
from sglang_ssd.wire.transport import TargetSocket

if TYPE_CHECKING:
    from sglang_ssd.trace import Tracer

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """Any Hugging Face tokenizer."""

    def get_vocab(self) -> dict[str, int]: ...


def connect(
    *,
    drafter: DrafterSupervisor | None,
    config: SsdConfig,
    vocab_size: int,
    context_len: int,
    tokenizer: Tokenizer | None,
    num_steps: int,
    tracer: Tracer,
) -> DraftClient:
    """Client of the started drafter, or of the one that listens at config.endpoint.

    Raises RuntimeError with the reason if the drafter refuses, dies or is not there in time.
    """
    endpoint = drafter.endpoint if drafter is not None else config.endpoint
    assert endpoint is not None, "a drafter is started exactly when no endpoint is configured"
    if ignored := without_effect(config):
        logger.warning(
            "%s: without effect, because the drafter at --ssd-endpoint has settings of its own",
            ", ".join(ignored),
        )
    tokens = _tokens_of(tokenizer)
    hello = Hello(
        schema_version=SCHEMA_VERSION,
        target_id=uuid.uuid4().hex[:12],
        num_steps=num_steps,
        vocab_size=vocab_size,
        token_map_blocks=digest_blocks(tokens),
        allow_padded_vocab=config.allow_padded_vocab,
    )
    client = DraftClient(
        TargetSocket(endpoint, key_files(config)),
        hello=hello,
        deadline=ReplyDeadline(
            least_s=config.reply_deadline_min_ms / 1000, most_s=config.reply_deadline_ms / 1000
        ),
        resync_tokens=config.resync_tokens,
        drafter=drafter,
        tokens=tokens,
        max_batch_size=config.max_batch_size,
        tracer=tracer,
    )
    try:
        _wait_for_welcome(client, drafter, config.start_timeout_s)
    except BaseException:
        client.stop()
        raise
    welcome = client.link.welcome
    assert welcome is not None, "a ready drafter said welcome"
    if welcome.context_len < context_len:
        logger.warning(
            "The drafter's context (%d) is shorter than the target's (%d): "
            "requests decode plainly past it.",
            welcome.context_len,
            context_len,
        )
    return client


def _tokens_of(tokenizer: Tokenizer | None) -> list[str]:
    if tokenizer is not None:
        return token_strings(tokenizer.get_vocab())
    logger.warning(
        "token-to-id maps are not compared, the target has no tokenizer (--skip-tokenizer-init): "
        "of a drafter whose ids mean other tokens, only another vocabulary size is noticed"
    )
    return []


def key_files(config: SsdConfig) -> KeyFiles | None:
    if config.secret_key is None or config.peer_keys is None:
        return None
    return KeyFiles(secret=config.secret_key, peers=config.peer_keys)


def _wait_for_welcome(
    client: DraftClient, drafter: DrafterSupervisor | None, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if drafter is not None and drafter.has_failed():
            raise RuntimeError(f"the SSD drafter did not start: {drafter.failure()}")
        client.look(0.2)
        if client.state == "refused":
            raise RuntimeError(client.link.last_error)
        if client.state == "ready":
            return
    raise RuntimeError(
        f"the SSD drafter was not ready within --ssd-start-timeout-s {timeout_s:g}; "
        "raise it for a large draft model, or see the drafter's log above"
    )
