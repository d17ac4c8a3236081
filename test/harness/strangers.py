"""What a drafter behind keys refuses: peers without the right key, and the messages of one that has
it and does not keep to the protocol."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from sglang_ssd.wire.curve import KeyFiles, secure_target
from sglang_ssd.wire.frames import MAX_FRAME_BYTES, encode
from sglang_ssd.wire.messages import (
    SCHEMA_VERSION,
    DraftRule,
    DraftSync,
    Hello,
    RefusedCause,
    VerifyCommit,
)

OLDER = SCHEMA_VERSION - 1
HELLO = Hello(
    schema_version=SCHEMA_VERSION,
    target_id="stranger",
    num_steps=4,
    vocab_size=1,
    token_map_blocks=[],
    allow_padded_vocab=True,
)
COMMIT = VerifyCommit(
    round_id=1,
    rids=["a"],
    generations=[1],
    base_committed_lens=[1],
    num_verified_drafts=[0],
    num_tokens=[2],
)
SYNC = DraftSync(rid="a", generation=1, committed_len=2, rule=DraftRule())
HEADER, IDS = encode(COMMIT, [[1, 2]])


class Nonsense(msgspec.Struct, frozen=True):
    """A message that is refused."""

    name: str
    frames: list[bytes]
    cause: RefusedCause
    says: str
    """Of the line that the drafter logs; messages of one cause say the same."""


def _stamped(version: int, frames: list[bytes]) -> list[bytes]:
    return [bytes([version]) + frames[0][1:], *frames[1:]]


def _with(**columns: list[object]) -> list[bytes]:
    return encode(msgspec.structs.replace(COMMIT, **columns), [[1, 2]])


_ONE_FRAME = "expected one frame of 2 int32"
NONSENSE = (
    Nonsense(
        "an older commit",
        _stamped(OLDER, [HEADER, IDS]),
        "schema_version",
        f"expected schema version {SCHEMA_VERSION}, got {OLDER}",
    ),
    Nonsense(
        "an older hello",
        _stamped(OLDER, encode(msgspec.structs.replace(HELLO, schema_version=OLDER))),
        "hello",
        f"schema version {OLDER}, the drafter speaks {SCHEMA_VERSION}",
    ),
    Nonsense(
        "an oversized frame",
        [HEADER, bytes(MAX_FRAME_BYTES + 1)],
        "oversize",
        f"expected at most {MAX_FRAME_BYTES} bytes a frame",
    ),
    Nonsense("int64 ids", [HEADER, array("q", [1, 2]).tobytes()], "id_frame", _ONE_FRAME),
    Nonsense("an id too few", [HEADER, IDS[:4]], "id_frame", _ONE_FRAME),
    Nonsense("no ids", [HEADER], "id_frame", _ONE_FRAME),
    Nonsense(
        "texts for numbers",
        _with(generations=["1"]),
        "header",
        "expected a message of this direction",
    ),
    Nonsense(
        "a column too long", _with(generations=[1, 1]), "columns", "expected 1 generations, got 2"
    ),
    Nonsense("a commit without a hello", [HEADER, IDS], "stranger", "has not welcomed"),
)
"""Of a peer that has not said hello."""
AFTER_HELLO = (
    Nonsense(
        "float32 ids", [encode(SYNC)[0], array("f", [0.5, 0.5]).tobytes()], "sync", "opens no a"
    ),
)


def refused_lines() -> dict[RefusedCause, str]:
    """Of the log, by cause: those, and that of a peer with another key or none."""
    said = {one.cause: one.says for one in (*NONSENSE, *AFTER_HELLO)}
    return {**said, "key": "a peer is refused"}


def talk_nonsense(peer: zmq.Socket[bytes]) -> Counter[RefusedCause]:
    """All of it over a new connection; how often each cause is to be counted for it."""
    for one in NONSENSE:
        peer.send_multipart(one.frames)
    peer.send_multipart(encode(HELLO))
    for one in AFTER_HELLO:
        peer.send_multipart(one.frames)
    return Counter(one.cause for one in (*NONSENSE, *AFTER_HELLO))


@contextmanager
def stranger(endpoint: str, keys: KeyFiles | None) -> Iterator[zmq.Socket[bytes]]:
    """A socket like a target's, without its checks."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        if keys is not None:
            secure_target(socket, keys)
        socket.connect(endpoint)
        yield socket
    finally:
        context.destroy(linger=0)
