"""Who is at the other end of the wire: what a drafter that is gone has said no longer counts."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ssd.target.drafter_link import DrafterLink
from sglang_ssd.wire.messages import SCHEMA_VERSION, Hello, Refusal, ToDrafter, ToTarget, Welcome
from sglang_ssd.wire.transport import FromDrafter, TransportStats

HELLO = Hello(
    schema_version=SCHEMA_VERSION,
    target_id="t",
    num_steps=4,
    vocab_size=100,
    context_len=64,
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

    def why_ended(self) -> str:
        return ""

    def note_ready(self) -> None:
        self.notes.append("ready")

    def note_refused(self, reason: str) -> None:
        self.notes.append("refused")


def hear(message: ToTarget, drafter: Process | None) -> DrafterLink:
    wire = Wire()
    link = DrafterLink(wire, hello=HELLO, drafter=drafter, tokens=[], clock=lambda: 0.0)
    wire.inbox.append(message)
    link.receive(0.0)
    return link


def welcome(pid: int) -> Welcome:
    return Welcome(SCHEMA_VERSION, pid, 100, 64, 8, drafter_id="d")


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
    assert drafter.notes == ["refused", "ready"]


def test_of_one_that_another_started_no_pid_is_known() -> None:
    assert hear(Refusal(["no"], drafter_pid=7), None).phase == "refused"
    assert hear(welcome(7), None).phase == "ready"
