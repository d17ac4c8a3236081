"""Who is at the other end of the wire: what a drafter that is gone has said no longer counts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from sglang_ssd.config import SsdConfig
from sglang_ssd.drafter.handshake import Abilities, answer_hello
from sglang_ssd.target.drafter_link import DrafterLink
from sglang_ssd.wire.messages import SCHEMA_VERSION, Hello, Refusal, ToDrafter, ToTarget, Welcome
from sglang_ssd.wire.token_map import TOKENS_PER_BLOCK, digest_blocks
from sglang_ssd.wire.transport import FromDrafter, TransportStats

HELLO = Hello(
    schema_version=SCHEMA_VERSION,
    target_id="t",
    num_steps=4,
    vocab_size=100,
    token_map_blocks=[],
    allow_padded_vocab=False,
)


class Wire:
    """A Transport whose messages a test puts in."""

    def __init__(self) -> None:
        self.stats = TransportStats()
        self.inbox: list[ToTarget] = []

    def send(self, message: ToDrafter, frames: Sequence[Sequence[int]] = ()) -> bool:
        return True

    def receive(self, timeout_s: float) -> list[FromDrafter]:
        arrived, self.inbox = self.inbox, []
        return [FromDrafter(message, []) for message in arrived]

    def close(self) -> None: ...


class Process:
    """A drafter that we supervise; it notes what is said of it."""

    pid = 8
    num_starts = 2

    def __init__(self) -> None:
        self.notes: list[str] = []

    def alive(self) -> bool:
        return True

    def note_greeted(self) -> None: ...

    def note_ready(self, pid: int) -> None:
        self.notes.append(f"{pid} ready")

    def note_refused(self, pid: int, reason: str) -> None:
        self.notes.append(f"{pid} refused")


def hear(
    message: ToTarget,
    drafter: Process | None,
    *,
    hello: Hello = HELLO,
    tokens: Sequence[str] = (),
) -> DrafterLink:
    wire = Wire()
    link = DrafterLink(wire, hello=hello, drafter=drafter, tokens=[*tokens], clock=lambda: 0.0)
    wire.inbox.append(message)
    link.receive(0.0)
    return link


def welcome(pid: int) -> Welcome:
    return Welcome(SCHEMA_VERSION, pid, 100, 64, drafter_id="d")


def test_a_drafter_that_is_gone_neither_serves_nor_refuses() -> None:
    """Red when a refusal that was under way ends the healthy drafter that came after it."""
    for message in (Refusal(["no"], drafter_pid=7), welcome(7)):
        drafter = Process()
        assert hear(message, drafter).phase == "greeting"
        assert drafter.notes == []


def test_the_present_one_does() -> None:
    drafter = Process()
    assert hear(Refusal(["no"], drafter_pid=8), drafter).phase == "refused"
    assert hear(welcome(8), drafter).phase == "ready"
    assert drafter.notes == ["8 refused", "8 ready"]


def test_of_one_that_another_started_no_pid_is_known() -> None:
    assert hear(Refusal(["no"], drafter_pid=7), None).phase == "refused"
    assert hear(welcome(7), None).phase == "ready"


REFUSES = "the SSD drafter refuses this target: "
SIZES = (
    "vocabulary size {} of the drafter, {} of the target "
    "(--ssd-allow-padded-vocab accepts vocabularies that differ in padding only)"
)
OTHER_TOKENS = "the drafter's tokenizer maps ids to other tokens than the target's; "
COMMON = [f"t{index}" for index in range(TOKENS_PER_BLOCK + 3)]
END = len(COMMON)
LONG = "x" * 5000


def said_between(
    ours: list[str], theirs: list[str], *, padded: bool, num_pads: tuple[int, int] = (0, 0)
) -> str:
    """What a target with these tokens says once the drafter has answered; "" if it is welcome.

    num_pads: ids without a token behind the target's and behind the drafter's.
    """
    hello = msgspec.structs.replace(
        HELLO,
        vocab_size=len(ours) + num_pads[0],
        token_map_blocks=digest_blocks(ours),
        allow_padded_vocab=padded,
    )
    drafter = Abilities.of(vocab_size=len(theirs) + num_pads[1], context_len=64, tokens=theirs)
    answer = answer_hello(hello, drafter, config=SsdConfig())
    return hear(answer, None, hello=hello, tokens=ours).last_error


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ([*COMMON, "a", "b"], [*COMMON, "b", "a"], f"{END} is 'a' for the target, 'b'"),
        (["x", *COMMON[1:]], COMMON, "0 is 'x' for the target, 't0'"),
        ([*COMMON[:-1], ""], COMMON, f"{END - 1} is '' for the target, 't{END - 1}'"),
        ([*COMMON, "a"], COMMON, f"{END} is 'a' for the target, None"),
        ([LONG, "a"], [LONG, "b"], "1 is 'a' for the target, 'b'"),
        (COMMON, [*COMMON, "b"], f"{END} is None for the target, 'b'"),
        (COMMON, COMMON[:TOKENS_PER_BLOCK], f"{END - 3} is 't{END - 3}' for the target, None"),
    ],
    ids=[
        "swapped",
        "first block",
        "gap",
        "drafter lacks it",
        "after a long one",
        "target lacks it",
        "whole block",
    ],
)
def test_a_refused_vocabulary_is_one_sentence_with_the_first_difference(
    ours: list[str], theirs: list[str], difference: str, padded: bool
) -> None:
    """Red when an id, a side or a size is told wrong; the flag for padding excuses no token."""
    sizes = (
        "" if padded or len(ours) == len(theirs) else f"{SIZES.format(len(theirs), len(ours))}; "
    )
    expected = f"{REFUSES}{sizes}{OTHER_TOKENS}first difference: id {difference} for the drafter"
    assert said_between(ours, theirs, padded=padded) == expected


@pytest.mark.parametrize("num_pads", [(0, 64), (64, 0)], ids=["drafter", "target"])
def test_padding_behind_the_tokens_is_accepted_with_its_flag_only(
    num_pads: tuple[int, int],
) -> None:
    """Red when either side still refuses it, or does not say which flag accepts it."""
    assert said_between(COMMON, COMMON, padded=True, num_pads=num_pads) == ""
    expected = REFUSES + SIZES.format(END + num_pads[1], END + num_pads[0])
    assert said_between(COMMON, COMMON, padded=False, num_pads=num_pads) == expected


def test_a_drafter_that_welcomes_another_size_is_refused_by_the_target() -> None:
    """Red when the target takes a drafter's word for it: after a restart it may be another."""
    other = msgspec.structs.replace(welcome(7), vocab_size=99)
    expected = f"{REFUSES}vocabulary size 99 of the drafter, 100 of the target"
    assert hear(other, None).last_error == expected
    padded = msgspec.structs.replace(HELLO, allow_padded_vocab=True)
    assert hear(other, None, hello=padded).phase == "ready"
    older = msgspec.structs.replace(welcome(7), schema_version=1)
    assert hear(older, None).last_error == (
        f"{REFUSES}schema version 1, the target {SCHEMA_VERSION}"
    )
