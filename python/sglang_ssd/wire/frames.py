"""Bytes of one message, and every check that can be made without knowing any request.

    frame 0   1 byte SCHEMA_VERSION, then the msgpack header (messages.py)
    frame 1   token ids, int32 little-endian; present iff the message is of a kind that has ids

What `decode_to_drafter` and `decode_to_target` return is well-formed: types and ranges are those of
messages.py, lists of a message are equally long, counts add up to the ids. Whether ids exist in
a vocabulary `are_in_vocabulary` tells; whether they belong to a live sequence its owner knows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from sglang_ssd.wire.messages import (
    SCHEMA_VERSION,
    DraftClose,
    DraftSync,
    Hello,
    HelloRequest,
    Refusal,
    SpeculateReply,
    ToDrafter,
    ToTarget,
    VerifyCommit,
    Welcome,
)

MAX_FRAME_BYTES = 32 << 20
"""No frame is larger: about 8 million token ids."""

Ids = Sequence[int]
Cause = Literal["header", "oversize", "schema_version", "columns", "id_frame", "row"]
"""Why something was refused; "row": it is well-formed, but does not fit its sequence."""

M = TypeVar("M")

_ID_BYTES = 4
_MAX_ERROR_CHARS = 200  # the decoder's own words repeat a value whole
# Read under any stamp: they compare the versions.
_HANDSHAKE = (Hello, Welcome, Refusal, HelloRequest)
_encoder = msgspec.msgpack.Encoder()
_to_drafter: msgspec.msgpack.Decoder[ToDrafter] = msgspec.msgpack.Decoder(ToDrafter)
_to_target: msgspec.msgpack.Decoder[ToTarget] = msgspec.msgpack.Decoder(ToTarget)


class ProtocolError(ValueError):
    """A message, or one row of it, that cannot be acted on. It costs drafts, never the loop."""

    def __init__(
        self,
        *,
        cause: Cause = "row",
        expected: str,
        got: object,
        rid: str | None = None,
        base_committed_len: int | None = None,
    ) -> None:
        super().__init__(
            f"rid={rid} base_committed_len={base_committed_len}: expected {expected}, got {got}"
        )
        self.cause: Cause = cause
        self.rid = rid
        self.base_committed_len = base_committed_len
        self.expected = expected
        self.got = got


def encode(message: ToDrafter | ToTarget, frames: Sequence[Ids] = ()) -> list[bytes]:
    """What to send; `frames` holds the token ids of a message that has some, else nothing."""
    header = bytes([SCHEMA_VERSION]) + _encoder.encode(message)
    return [header, *(array("i", ids).tobytes() for ids in frames)]


def decode_to_drafter(frames: Sequence[bytes]) -> tuple[ToDrafter, list[int]]:
    """A target's message and its token ids. Raises ProtocolError."""
    return _decode(frames, _to_drafter)


def decode_to_target(frames: Sequence[bytes]) -> tuple[ToTarget, list[int]]:
    """A drafter's message and its token ids. Raises ProtocolError."""
    return _decode(frames, _to_target)


def are_in_vocabulary(ids: Ids, vocab_size: int) -> bool:
    """Whether every id is one of a vocabulary of vocab_size."""
    return len(ids) == 0 or (min(ids) >= 0 and max(ids) < vocab_size)


def _decode(frames: Sequence[bytes], decoder: msgspec.msgpack.Decoder[M]) -> tuple[M, list[int]]:
    if not frames or not frames[0]:
        raise ProtocolError(cause="header", expected="a header frame", got="nothing")
    oversize = [len(frame) for frame in frames if len(frame) > MAX_FRAME_BYTES]
    if oversize:
        raise ProtocolError(
            cause="oversize", expected=f"at most {MAX_FRAME_BYTES} bytes a frame", got=oversize[0]
        )
    try:
        message = decoder.decode(memoryview(frames[0])[1:])
    except (msgspec.MsgspecError, RecursionError) as error:  # the latter: nested without end
        raise ProtocolError(
            cause="header",
            expected="a message of this direction",
            got=str(error)[:_MAX_ERROR_CHARS],
        ) from error
    if frames[0][0] != SCHEMA_VERSION and not isinstance(message, _HANDSHAKE):
        raise ProtocolError(
            cause="schema_version",
            expected=f"schema version {SCHEMA_VERSION}",
            got=frames[0][0],
        )
    return message, _decode_ids(message, frames[1:])


def _decode_ids(message: object, frames: Sequence[bytes]) -> list[int]:
    num_ids = _num_ids(message)
    if num_ids is None:
        if frames:
            raise ProtocolError(
                cause="id_frame", expected="no id frame", got=f"{len(frames)} frames"
            )
        return []
    num_bytes = [len(frame) for frame in frames]
    if num_bytes != [num_ids * _ID_BYTES]:
        raise ProtocolError(
            cause="id_frame",
            expected=f"one frame of {num_ids} int32",
            got=f"{len(frames)} frames of {num_bytes[:3]} bytes",
        )
    ids = array("i")
    ids.frombytes(frames[0])
    return ids.tolist()


def _num_ids(message: object) -> int | None:
    """How many ids the message declares, None if its kind has none. Raises if columns differ."""
    match message:
        case VerifyCommit():
            _check_columns(
                message.rids,
                generations=message.generations,
                base_committed_lens=message.base_committed_lens,
                num_verified_drafts=message.num_verified_drafts,
                num_tokens=message.num_tokens,
            )
            return sum(message.num_tokens)
        case SpeculateReply():
            _check_columns(
                message.rids,
                generations=message.generations,
                base_committed_lens=message.base_committed_lens,
                num_drafts=message.num_drafts,
                served=message.served,
                bonus_ranks=message.bonus_ranks,
            )
            return sum(message.num_drafts)
        case DraftSync():
            return message.committed_len
        case DraftClose():
            _check_columns(message.rids, generations=message.generations)
    return None


def _check_columns(rids: Sequence[str], **columns: Sequence[object]) -> None:
    for name, values in columns.items():
        if len(values) != len(rids):
            raise ProtocolError(cause="columns", expected=f"{len(rids)} {name}", got=len(values))
