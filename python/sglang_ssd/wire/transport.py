"""Carries messages between targets and one drafter: the interfaces, and what they are over ZMQ.

The drafter binds and serves any number of targets, which it tells apart by an opaque peer name.
Nothing here blocks beyond the time it is given: a send to a full or absent peer drops the message
and counts it, a receive returns when something is there or the time is over. Losing a message is
safe (messages.py). Malformed input is counted and dropped; it never reaches the caller.
"""

from __future__ import annotations

import logging
import math
import socket as socketlib
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import zmq

from sglang_ssd.wire.curve import HandshakeMonitor, KeyFiles, secure_drafter, secure_target
from sglang_ssd.wire.endpoints import IPC, validate_endpoint
from sglang_ssd.wire.frames import (
    MAX_FRAME_BYTES,
    Ids,
    ProtocolError,
    decode_to_drafter,
    decode_to_target,
    encode,
)
from sglang_ssd.wire.messages import ToDrafter, ToTarget
from sglang_ssd.wire.notices import NoticeLog

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 1024
"""Messages that queue per peer and direction before sends are dropped."""

RECONNECT_S = 5.0
"""How long nobody takes a message before the endpoint is connected to anew."""
_MONITOR_S = 1.0
# So that one peer's flood cannot keep the owner from its own work; the rest waits in the socket.
_MAX_PER_RECEIVE = 256
_MAX_BYTES_PER_RECEIVE = 1 << 20  # with what passes it nothing else is taken

T = TypeVar("T")


class TransportStats(msgspec.Struct):
    """Messages since start."""

    sent: int = 0
    received: int = 0
    dropped: int = 0  # not sent: the peer's queue was full, or nobody was there
    malformed: int = 0  # received and thrown away
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    """What was thrown away or kept out, by cause (frames.Cause, and "key": a failed handshake)."""


class FromDrafter(NamedTuple):
    message: ToTarget
    ids: list[int]


class FromTarget(NamedTuple):
    peer: bytes
    message: ToDrafter
    ids: list[int]


class Transport(Protocol):
    """A target's end."""

    stats: TransportStats

    def send(self, message: ToDrafter, frames: Sequence[Ids] = ()) -> bool:
        """Hand over without waiting; False if it was dropped. `frames`: [ids] or nothing."""
        ...

    def receive(self, timeout_s: float) -> list[FromDrafter]:
        """What has arrived; waits for the first message at most timeout_s (0 polls)."""
        ...

    def close(self) -> None:
        """Idempotent; unsent messages are lost."""
        ...


class DrafterTransport(Protocol):
    """The drafter's end."""

    stats: TransportStats

    def send(self, peer: bytes, message: ToTarget, frames: Sequence[Ids] = ()) -> bool: ...

    def receive(self, timeout_s: float) -> list[FromTarget]: ...

    def close(self) -> None: ...


class TargetSocket:
    """Connects to a drafter that may not be there yet, or that is started again later."""

    def __init__(self, endpoint: str, keys: KeyFiles | None = None) -> None:
        validate_endpoint(endpoint, has_keys=keys is not None)
        self._gate = _Gate(endpoint)
        self.stats = self._gate.stats
        self._context = zmq.Context()
        self._socket = _open_socket(self._context, zmq.DEALER, endpoint)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        # Queue only for a peer that is connected: what is meant for this moment is useless later.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        if keys is not None:
            secure_target(self._socket, keys)
            self._gate.watch(self._socket)
        self._endpoint = endpoint
        self._next_connect = time.monotonic() + RECONNECT_S
        self._socket.connect(endpoint)

    def send(self, message: ToDrafter, frames: Sequence[Ids] = ()) -> bool:
        is_sent = _send(self._socket, encode(message, frames), self.stats)
        if not is_sent and time.monotonic() >= self._next_connect:
            self._connect_again()
        return is_sent

    def _connect_again(self) -> None:
        """libzmq itself gives up where a handshake was refused or a stranger has answered."""
        self._next_connect = time.monotonic() + RECONNECT_S
        self._socket.disconnect(self._endpoint)
        self._socket.connect(self._endpoint)

    def receive(self, timeout_s: float) -> list[FromDrafter]:
        if self._gate.look():
            self._connect_again()
        return _receive(self._socket, timeout_s, _decode_from_drafter, self._gate)

    def close(self) -> None:
        if not self._context.closed:
            self._gate.close()
            self._context.destroy(linger=0)


class DrafterSocket:
    """Binds; `endpoint` is the address that targets connect to (a tcp port 0 is resolved)."""

    def __init__(self, endpoint: str, keys: KeyFiles | None = None) -> None:
        _refuse_taken_path(validate_endpoint(endpoint, has_keys=keys is not None))
        self._gate = _Gate(endpoint)
        self.stats = self._gate.stats
        self._context = zmq.Context()
        self._guard = None
        self._socket = _open_socket(self._context, zmq.ROUTER, endpoint)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to nobody is an error we count
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a target that reconnects keeps its name
        if keys is not None:
            self._guard = secure_drafter(self._context, self._socket, keys)
            self._gate.watch(self._socket)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: bytes, message: ToTarget, frames: Sequence[Ids] = ()) -> bool:
        return _send(self._socket, [peer, *encode(message, frames)], self.stats)

    def receive(self, timeout_s: float) -> list[FromTarget]:
        self._gate.look()
        return _receive(self._socket, timeout_s, _decode_from_target, self._gate)

    def close(self) -> None:
        if self._context.closed:
            return
        self._gate.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=0)
        if self.endpoint.startswith(IPC):  # libzmq leaves the file
            Path(self.endpoint.removeprefix(IPC)).unlink(missing_ok=True)


class _Gate:
    """What one end refuses: counted by cause, said once per cause and interval."""

    def __init__(self, endpoint: str) -> None:
        self.stats = TransportStats()
        self._endpoint = endpoint
        self._notices = NoticeLog(logger)
        self.stats.refused = self._notices.counts
        self._monitor: HandshakeMonitor | None = None
        self._next_look = 0.0

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Count failed handshakes of this socket too."""
        self._monitor = HandshakeMonitor(socket, self._notices, self._endpoint)

    def look(self) -> bool:
        """Now and then, on the way to receive; whether a handshake has failed."""
        if self._monitor is None or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _MONITOR_S
        return self._monitor.look()

    def refuse(self, error: ProtocolError) -> None:
        self.stats.malformed += 1
        self._notices.warn(error.cause, f"SSD wire {self._endpoint}: a message is refused: {error}")

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


def _refuse_taken_path(endpoint: str) -> None:
    """libzmq would take an ipc path over from a live drafter, which then hears nobody, and would
    replace any other file."""
    if not endpoint.startswith(IPC):
        return
    path = Path(endpoint.removeprefix(IPC))
    if path.exists() and not path.is_socket():
        raise ValueError(f"{endpoint!r}: a file is there that is no socket")
    with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as probe:
        if probe.connect_ex(endpoint.removeprefix(IPC)) == 0:
            raise ValueError(f"{endpoint!r}: another process listens there")


def _open_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    # A frame above our limit is counted and refused; far above, libzmq ends the connection.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)
    return socket


def _send(socket: zmq.Socket[bytes], frames: list[bytes], stats: TransportStats) -> bool:
    try:
        socket.send_multipart(frames, flags=zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            raise
        stats.dropped += 1
        return False
    stats.sent += 1
    return True


def _receive(
    socket: zmq.Socket[bytes],
    timeout_s: float,
    decode: Callable[[list[bytes]], T],
    gate: _Gate,
) -> list[T]:
    # One blocking call and no exception on the usual path: a round waits for this.
    received: list[T] = []
    socket.setsockopt(zmq.RCVTIMEO, math.ceil(timeout_s * 1000))
    try:
        frames = socket.recv_multipart()
    except zmq.Again:
        return received
    bytes_left = _MAX_BYTES_PER_RECEIVE
    for num_left in reversed(range(_MAX_PER_RECEIVE)):
        bytes_left -= sum(map(len, frames))
        try:
            received.append(decode(frames))
        except ProtocolError as error:
            gate.refuse(error)
        is_enough = not num_left or bytes_left <= 0
        if is_enough or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            break
        frames = socket.recv_multipart()
    gate.stats.received += len(received)
    return received


def _decode_from_drafter(frames: list[bytes]) -> FromDrafter:
    return FromDrafter(*decode_to_target(frames))


def _decode_from_target(frames: list[bytes]) -> FromTarget:
    return FromTarget(frames[0], *decode_to_drafter(frames[1:]))
