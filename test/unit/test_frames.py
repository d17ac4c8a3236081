"""Frames: what is sent arrives as it was, and nothing that is malformed passes."""

from __future__ import annotations

import random
from typing import get_args

import msgspec
import pytest

from sglang_ssd.wire.frames import (
    MAX_FRAME_BYTES,
    Cause,
    ProtocolError,
    are_in_vocabulary,
    decode_to_drafter,
    decode_to_target,
    encode,
)
from sglang_ssd.wire.messages import (
    MAX_NUM_STEPS,
    MAX_RANK,
    MAX_ROWS,
    MAX_RULE_TOKENS,
    REFUSED_CAUSES,
    SCHEMA_VERSION,
    DraftClose,
    DrafterStatus,
    DraftRule,
    DraftSync,
    Hello,
    HelloRequest,
    Refusal,
    SpeculateReply,
    StatusRequest,
    VerifyCommit,
    Welcome,
)

HELLO = Hello(
    schema_version=SCHEMA_VERSION,
    target_id="t",
    num_steps=4,
    vocab_size=100,
    token_map_blocks=["ab"],
    allow_padded_vocab=False,
)
SYNC = DraftSync(
    rid="a", generation=3, committed_len=2, rule=DraftRule(temperature=0.7, seed=-(2**63))
)
COMMIT = VerifyCommit(
    round_id=9,
    rids=["a", "b"],
    generations=[3, 4],
    base_committed_lens=[2, 7],
    num_verified_drafts=[4, 0],
    num_tokens=[3, 1],
)
CLOSE = DraftClose(rids=["a"], generations=[3])
REFUSAL = Refusal(reasons=["no"])
WELCOME = Welcome(schema_version=SCHEMA_VERSION, drafter_pid=1, vocab_size=100, context_len=64)
REPLY = SpeculateReply(
    round_id=9,
    rids=["a", "b", "c"],
    generations=[3, 4, 5],
    base_committed_lens=[5, 8, 2],
    num_drafts=[2, 1, 0],
    served=["hit", "jit", "none"],
    bonus_ranks=[0, -1, -1],
)
STATUS = DrafterStatus(*range(9), 0.5, 0.25, 3, 1 << 30, 0, {"key": 2})

TO_DRAFTER = [
    (HELLO, None),
    (SYNC, [7, 2**31 - 1]),
    (COMMIT, [1, 2, 3, 4]),
    (CLOSE, None),
    (StatusRequest(), None),
]
TO_TARGET = [
    (WELCOME, None),
    (REFUSAL, None),
    (HelloRequest(), None),
    (REPLY, [1, 2, 3]),
    (STATUS, None),
]


@pytest.mark.parametrize(("message", "ids"), TO_DRAFTER)
def test_messages_to_the_drafter_arrive_as_they_were(message, ids):
    frames = encode(message, [] if ids is None else [ids])
    assert decode_to_drafter(frames) == (message, ids or [])


@pytest.mark.parametrize(("message", "ids"), TO_TARGET)
def test_messages_to_the_target_arrive_as_they_were(message, ids):
    frames = encode(message, [] if ids is None else [ids])
    assert decode_to_target(frames) == (message, ids or [])


def test_ids_travel_as_little_endian_int32():
    assert encode(SYNC, [[1, 258]])[1] == bytes([1, 0, 0, 0, 2, 1, 0, 0])


def test_messages_do_not_pass_in_the_wrong_direction():
    with pytest.raises(ProtocolError, match="of this direction"):
        decode_to_target(encode(COMMIT, [[1, 2, 3, 4]]))
    with pytest.raises(ProtocolError, match="of this direction"):
        decode_to_drafter(encode(REPLY, [[1, 2, 3]]))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x01"],
        [bytes([SCHEMA_VERSION]) + b"\x93garbage"],
        [bytes([SCHEMA_VERSION]) + msgspec.msgpack.encode({"type": "surprise"})],
        [bytes([SCHEMA_VERSION]) + msgspec.msgpack.encode({"type": "sync", "rid": 5})],
        [bytes([SCHEMA_VERSION]) + b"\x82\xa1x" + b"\x91" * 9999 + b"\xc0\xa4type\xa7status?"],
    ],
    ids=["nothing", "empty", "version alone", "not msgpack", "unknown tag", "wrong type", "nested"],
)
def test_what_is_no_message_is_refused(frames):
    with pytest.raises(ProtocolError):
        decode_to_drafter(frames)


def test_another_schema_version_is_refused_except_in_the_handshake():
    """Hello and its answers compare versions, so they must be readable to say what is wrong."""
    frames = encode(SYNC, [[1, 2]])
    frames[0] = bytes([SCHEMA_VERSION + 1]) + frames[0][1:]
    with pytest.raises(ProtocolError, match="schema version"):
        decode_to_drafter(frames)
    hello = encode(HELLO)
    assert decode_to_drafter([b"\xff" + hello[0][1:]]) == (HELLO, [])


@pytest.mark.parametrize(
    ("message", "id_frames"),
    [
        (SYNC, []),
        (SYNC, [b"\0" * 7]),
        (SYNC, [b"\0" * 12]),
        (SYNC, [b"\0" * 8, b""]),
        (COMMIT, [b"\0" * 12]),
        (CLOSE, [b"\0" * 4]),
        (HELLO, [b""]),
    ],
)
def test_ids_must_be_as_many_as_declared(message, id_frames):
    with pytest.raises(ProtocolError, match="expected"):
        decode_to_drafter([*encode(message), *id_frames])


@pytest.mark.parametrize(
    "change",
    [
        {"rids": ["a"]},
        {"generations": [3]},
        {"base_committed_lens": [2, 7, 1]},
        {"num_verified_drafts": []},
        {"num_tokens": [4]},
        {"base_committed_lens": [0, 7]},
        {"num_verified_drafts": [4, -1]},
        {"num_tokens": [5, -1]},
        {"base_committed_lens": [2**63, 7]},
        {"num_tokens": [2**63, 1]},
    ],
)
def test_columns_of_a_commit_agree(change):
    message = msgspec.structs.replace(COMMIT, **change)
    with pytest.raises(ProtocolError):
        decode_to_drafter(encode(message, [[1, 2, 3, 4]]))


@pytest.mark.parametrize(
    "change",
    [
        {"num_drafts": [4, -1, 0]},
        {"base_committed_lens": [5, -8, 2]},
        {"served": ["hit", "jit"]},
        {"bonus_ranks": [0, -2, -1]},
        {"bonus_ranks": [0, MAX_RANK + 1, -1]},
        {"generations": [3, 4]},
    ],
)
def test_columns_of_a_reply_agree(change):
    message = msgspec.structs.replace(REPLY, **change)
    with pytest.raises(ProtocolError):
        decode_to_target(encode(message, [[1, 2, 3]]))


@pytest.mark.parametrize("field", DrafterStatus.__struct_fields__)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_a_count_that_metrics_cannot_take_is_refused(field, value):
    """Red when the drafter's own numbers can end the target that exports them."""
    message = msgspec.structs.replace(STATUS, **{field: value})
    with pytest.raises(ProtocolError):
        decode_to_target(encode(message))


def test_where_a_commit_ends_fits_a_reply():
    """Red when the drafter's answer to a commit that passes is malformed to its target."""
    most = (1 << 31) - 1
    longest = msgspec.structs.replace(COMMIT, base_committed_lens=[most // 2, 1])
    decode_to_drafter(encode(longest, [[1, 2, 3, 4]]))
    message = msgspec.structs.replace(COMMIT, base_committed_lens=[most, 1])
    with pytest.raises(ProtocolError):
        decode_to_drafter(encode(message, [[1, 2, 3, 4]]))


def test_causes_of_a_refusal_are_a_fixed_few():
    """Red when a drafter can fill a target's metrics with labels, or a cause of ours is lost."""
    for refused in ({"mine": 1}, {"key": -1}):
        message = msgspec.structs.replace(STATUS, refused=refused)
        with pytest.raises(ProtocolError):
            decode_to_target(encode(message))
    assert set(get_args(Cause)) <= set(REFUSED_CAUSES)


def test_a_target_has_a_vocabulary():
    """Red when the drafter is to rank the tokens of none: with padding any size is allowed."""
    for value in (0, -1):
        message = msgspec.structs.replace(HELLO, vocab_size=value, allow_padded_vocab=True)
        with pytest.raises(ProtocolError):
            decode_to_drafter(encode(message))


def test_a_wrong_row_is_named():
    message = msgspec.structs.replace(COMMIT, num_tokens=[5, -1])
    with pytest.raises(ProtocolError, match=r"num_tokens\[1\]|num_tokens\[\.\.\.\]"):
        decode_to_drafter(encode(message, [[1, 2, 3, 4]]))


def test_a_row_has_no_more_drafts_than_any_target_asks_for():
    """Red when a drafter's one reply can hold a target up by millions of ids."""
    for num_drafts, fits in ((MAX_NUM_STEPS, True), (MAX_NUM_STEPS + 1, False)):
        reply = msgspec.structs.replace(REPLY, num_drafts=[num_drafts, 0, 0])
        frames = encode(reply, [[1] * num_drafts])
        if fits:
            assert decode_to_target(frames) == (reply, [1] * num_drafts)
        else:
            with pytest.raises(ProtocolError):
                decode_to_target(frames)


@pytest.mark.parametrize("message", [COMMIT, CLOSE, REPLY], ids=["commit", "close", "reply"])
def test_a_message_has_a_bounded_number_of_rows(message):
    """Red when one message can hold its receiver up by a million rows."""
    decode, ids = (decode_to_target if message is REPLY else decode_to_drafter), [[]]
    if message is CLOSE:
        ids = []
    first = {name: getattr(message, name) for name in message.__struct_fields__}
    for num_rows, fits in ((MAX_ROWS, True), (MAX_ROWS + 1, False)):
        wide = msgspec.structs.replace(
            message,
            **{
                name: [0 if name in ("num_tokens", "num_drafts") else value[0]] * num_rows
                for name, value in first.items()
                if isinstance(value, list)
            },
        )
        if fits:
            assert decode(encode(wide, ids)) == (wide, [])
        else:
            with pytest.raises(ProtocolError):
                decode(encode(wide, ids))


@pytest.mark.parametrize(
    ("message", "field", "fits", "too_long"),
    [
        (HELLO, "target_id", "t" * 64, "t" * 65),
        (HELLO, "token_map_blocks", ["0" * 64] * 512, ["0" * 65]),
        (HELLO, "token_map_blocks", [""] * 16_384, [""] * 16_385),
        (WELCOME, "drafter_id", "d" * 64, "d" * 65),
        (REFUSAL, "reasons", ["r" * 1024] * 16, ["r" * 1025]),
        (REFUSAL, "reasons", ["r"] * 16, ["r"] * 17),
        (REFUSAL, "block_tokens", ["\u00e9" * 1024] * 1024, ["t" * 1025]),
        (REFUSAL, "block_tokens", [""] * 1024, [""] * 1025),
    ],
)
def test_what_an_end_says_of_itself_is_short(message, field, fits, too_long):
    """Red when a peer's texts fill the log of the other end, or a status."""
    decode = decode_to_drafter if message is HELLO else decode_to_target
    for value, is_taken in ((fits, True), (too_long, False)):
        changed = msgspec.structs.replace(message, **{field: value})
        if is_taken:
            assert decode(encode(changed)) == (changed, [])
        else:
            with pytest.raises(ProtocolError):
                decode(encode(changed))


def test_what_a_refusal_says_is_short():
    """Red when a peer's own text fills the log of the other end."""
    header = msgspec.msgpack.encode({"type": "x" * 1_000_000})
    with pytest.raises(ProtocolError) as refusal:
        decode_to_target([bytes([SCHEMA_VERSION]) + header])
    assert len(str(refusal.value)) < 1000


def test_oversize_is_refused_before_it_is_decoded():
    with pytest.raises(ProtocolError, match="bytes a frame"):
        decode_to_drafter([encode(SYNC)[0], bytes(MAX_FRAME_BYTES + 1)])


def test_no_random_damage_escapes_as_another_error():
    rng = random.Random(0)
    originals = [encode(m, [] if ids is None else [ids]) for m, ids in TO_DRAFTER + TO_TARGET]
    for _ in range(4000):
        frames = [bytearray(frame) for frame in rng.choice(originals)]
        victim = rng.choice(frames)
        for _ in range(rng.randint(1, 3)):
            if victim:
                victim[rng.randrange(len(victim))] = rng.randrange(256)
        if rng.random() < 0.3:
            del victim[rng.randrange(len(victim) + 1) :]
        for decode in (decode_to_drafter, decode_to_target):
            try:
                decode([bytes(frame) for frame in frames])
            except ProtocolError:
                continue


def test_token_ids_are_checked_against_a_vocabulary():
    assert are_in_vocabulary([], 10)
    assert are_in_vocabulary([0, 9], 10)
    assert not are_in_vocabulary([0, 10], 10)
    assert not are_in_vocabulary([-1, 3], 10)


@pytest.mark.parametrize("field", ["stop_tokens", "bias_tokens", "bias_values"])
def test_a_rule_has_a_bounded_size(field):
    """Red when a target could make the drafter carry any amount with a request."""
    for length, fits in ((MAX_RULE_TOKENS, True), (MAX_RULE_TOKENS + 1, False)):
        rule = DraftRule(**{field: [1] * length})
        frames = encode(DraftSync(rid="a", generation=1, committed_len=1, rule=rule), [[1]])
        if fits:
            assert decode_to_drafter(frames)[0].rule == rule
        else:
            with pytest.raises(ProtocolError):
                decode_to_drafter(frames)
