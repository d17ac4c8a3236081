"""The transport of tests: both ends in one thread, with every fault that a wire or a peer can have.

Messages pass through the real encoding, so that damaged bytes meet the real checks. Time is a count
of ticks and chance comes from one seed: the same calls give the same run. A target that waits lets
the clock run and the drafter work (`pump`). Nothing sleeps, so whoever has a deadline on this wire
takes the time from `clock`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from sglang_ssd.wire.frames import (
    Ids,
    ProtocolError,
    decode_to_drafter,
    decode_to_target,
    encode,
)
from sglang_ssd.wire.messages import ToDrafter, ToTarget
from sglang_ssd.wire.transport import FromDrafter, FromTarget, TransportStats

T = TypeVar("T")

Direction = Literal["to_drafter", "to_target"]


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What befalls messages of one direction: probabilities, and ticks."""

    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    reorder: float = 0.0  # the message overtakes all that is under way
    delay: int = 0  # up to so many ticks


class _Parcel(msgspec.Struct, order=True):
    due: int
    order: int
    peer: bytes
    frames: list[bytes]


class FakeWire:
    """One drafter and any number of targets; `now` is the clock that `tick` moves on."""

    def __init__(
        self,
        *,
        seed: int = 0,
        to_drafter: Faults | None = None,
        to_target: Faults | None = None,
        tick_s: float = 0.001,
    ) -> None:
        self.now = 0
        self.tick_s = tick_s
        self.pump: Callable[[], None] = _do_nothing
        """What goes on elsewhere while a target waits one tick: usually the drafter's step."""
        self.faults: dict[Direction, Faults] = {
            "to_drafter": to_drafter or Faults(),
            "to_target": to_target or Faults(),
        }
        self._random = random.Random(seed)
        self._under_way: dict[Direction, list[_Parcel]] = {"to_drafter": [], "to_target": []}
        self._dead: set[Direction] = set()
        self._num_sent = 0
        self._pumping = False
        self.drafter = FakeDrafterEnd(self)

    def target(self, peer: bytes = b"target") -> FakeTargetEnd:
        return FakeTargetEnd(self, peer)

    def tick(self) -> None:
        self.now += 1

    def clock(self) -> float:
        """Seconds, as time.monotonic would give them."""
        return self.now * self.tick_s

    def kill(self, direction: Direction) -> None:
        """Lose what is under way and whatever is sent until `revive`."""
        self._dead.add(direction)
        self._under_way[direction].clear()

    def revive(self, direction: Direction) -> None:
        self._dead.discard(direction)

    def wait(self) -> None:
        """One tick in which the other side works; a pump that waits itself does not pump again."""
        self.tick()
        if not self._pumping:
            self._pumping = True
            try:
                self.pump()
            finally:
                self._pumping = False

    def post(self, direction: Direction, peer: bytes, frames: list[bytes]) -> None:
        faults = self.faults[direction]
        if direction in self._dead or self._strikes(faults.drop):
            return
        for _ in range(2 if self._strikes(faults.duplicate) else 1):
            sent = self._corrupt(frames) if self._strikes(faults.corrupt) else frames
            self._enqueue(direction, peer, sent)

    def fetch(self, direction: Direction, peer: bytes | None) -> list[_Parcel]:
        """What is due, for one peer or for all."""
        due: list[_Parcel] = []
        later: list[_Parcel] = []
        for parcel in self._under_way[direction]:
            is_due = parcel.due <= self.now and peer in (None, parcel.peer)
            (due if is_due else later).append(parcel)
        self._under_way[direction] = later
        return sorted(due)

    def _enqueue(self, direction: Direction, peer: bytes, frames: list[bytes]) -> None:
        faults = self.faults[direction]
        under_way = self._under_way[direction]
        self._num_sent += 1
        due = self.now + self._random.randint(0, faults.delay)
        if self._strikes(faults.reorder):
            under_way.append(_Parcel(self.now, -self._num_sent, peer, frames))
            return
        due = max([due, *(p.due for p in under_way if p.peer == peer)])  # first in, first out
        under_way.append(_Parcel(due, self._num_sent, peer, frames))

    def _strikes(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability

    def _corrupt(self, frames: list[bytes]) -> list[bytes]:
        """A flipped bit, a cut frame, a frame too few or too many, or noise."""
        damaged = [bytearray(frame) for frame in frames]
        victim = self._random.randrange(len(damaged))
        match self._random.randrange(5):
            case 0 if damaged[victim]:
                damaged[victim][self._random.randrange(len(damaged[victim]))] ^= 1 << (
                    self._random.randrange(8)
                )
            case 1:
                del damaged[victim][self._random.randint(0, len(damaged[victim])) :]
            case 2:
                del damaged[victim]
            case 3:
                damaged.append(bytearray(b"\x01\x02\x03\x04"))
            case _:
                damaged[victim] = bytearray(self._random.randbytes(16))
        return [bytes(frame) for frame in damaged]


class FakeTargetEnd:
    """A Transport."""

    def __init__(self, wire: FakeWire, peer: bytes) -> None:
        self.stats = TransportStats()
        self._wire = wire
        self._peer = peer

    def send(self, message: ToDrafter, frames: Sequence[Ids] = ()) -> bool:
        self.stats.sent += 1
        self._wire.post("to_drafter", self._peer, encode(message, frames))
        return True

    def receive(self, timeout_s: float) -> list[FromDrafter]:
        received = self._fetch()
        for _ in range(math.ceil(timeout_s / self._wire.tick_s)):
            if received:
                break
            self._wire.wait()
            received = self._fetch()
        return received

    def close(self) -> None:
        self._wire.fetch("to_target", self._peer)

    def _fetch(self) -> list[FromDrafter]:
        parcels = self._wire.fetch("to_target", self._peer)
        return _unpack(parcels, _from_drafter, self.stats)


class FakeDrafterEnd:
    """A DrafterTransport. It never sleeps: nothing can come before the next tick."""

    def __init__(self, wire: FakeWire) -> None:
        self.stats = TransportStats()
        self._wire = wire

    def send(self, peer: bytes, message: ToTarget, frames: Sequence[Ids] = ()) -> bool:
        self.stats.sent += 1
        self._wire.post("to_target", peer, encode(message, frames))
        return True

    def receive(self, timeout_s: float) -> list[FromTarget]:
        return _unpack(self._wire.fetch("to_drafter", None), _from_target, self.stats)

    def close(self) -> None:
        self._wire.fetch("to_drafter", None)


def _from_drafter(parcel: _Parcel) -> FromDrafter:
    return FromDrafter(*decode_to_target(parcel.frames))


def _from_target(parcel: _Parcel) -> FromTarget:
    return FromTarget(parcel.peer, *decode_to_drafter(parcel.frames))


def _unpack(
    parcels: list[_Parcel], decode: Callable[[_Parcel], T], stats: TransportStats
) -> list[T]:
    """What is well-formed; all is counted."""
    received: list[T] = []
    for parcel in parcels:
        try:
            received.append(decode(parcel))
        except ProtocolError as error:
            stats.malformed += 1
            stats.refused[error.cause] = stats.refused.get(error.cause, 0) + 1
    stats.received += len(received)
    return received


def _do_nothing() -> None:
    pass
