"""Carries messages between targets and one drafter: the interfaces, and what they are over ZMQ.

The drafter binds and serves any number of targets, which it tells apart by an opaque peer name.
Nothing here blocks beyond the time it is given: a send to a full or absent peer drops the message
and counts it, a receive returns when something is there or the time is over. Losing a message is
safe (messages.py). Malformed input is counted and dropped; it never reaches the caller.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket as socketlib
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
import zmq

from sglang_ssd.wire.frames import (
    MAX_FRAME_BYTES,
    Ids,
    ProtocolError,
    decode_to_drafter,
    decode_to_target,
    encode,
)
from sglang_ssd.wire.messages import ToDrafter, ToTarget

HIGH_WATER_MARK = 1024
"""Messages that queue per peer and direction before sends are dropped."""

_MAX_PER_RECEIVE = 256  # so that one peer's flood cannot keep the owner from its own work
_IPC = "ipc://"
_DIRECTORY_PREFIX = "sglang-ssd-"
_MAX_IPC_PATH = 103  # sockaddr_un.sun_path holds 104 bytes on the tightest system
_LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")

T = TypeVar("T")


class TransportStats(msgspec.Struct):
    """Messages since start."""

    sent: int = 0
    received: int = 0
    dropped: int = 0  # not sent: the peer's queue was full, or nobody was there
    malformed: int = 0  # received and thrown away


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

    def __init__(self, endpoint: str) -> None:
        self.stats = TransportStats()
        self._context = zmq.Context()
        self._socket = _open_socket(self._context, zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        # Queue only for a peer that is connected: what is meant for this moment is useless later.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.connect(validate_endpoint(endpoint))

    def send(self, message: ToDrafter, frames: Sequence[Ids] = ()) -> bool:
        return _send(self._socket, encode(message, frames), self.stats)

    def receive(self, timeout_s: float) -> list[FromDrafter]:
        return _receive(self._socket, timeout_s, _decode_from_drafter, self.stats)

    def close(self) -> None:
        self._context.destroy(linger=0)


class DrafterSocket:
    """Binds; `endpoint` is the address that targets connect to (a tcp port 0 is resolved)."""

    def __init__(self, endpoint: str) -> None:
        self.stats = TransportStats()
        self._context = zmq.Context()
        self._socket = _open_socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to nobody is an error we count
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a target that reconnects keeps its name
        _refuse_taken_path(validate_endpoint(endpoint))
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: bytes, message: ToTarget, frames: Sequence[Ids] = ()) -> bool:
        return _send(self._socket, [peer, *encode(message, frames)], self.stats)

    def receive(self, timeout_s: float) -> list[FromTarget]:
        return _receive(self._socket, timeout_s, _decode_from_target, self.stats)

    def close(self) -> None:
        if self._context.closed:
            return
        self._context.destroy(linger=0)
        if self.endpoint.startswith(_IPC):  # libzmq leaves the file
            path = Path(self.endpoint.removeprefix(_IPC))
            path.unlink(missing_ok=True)
            if path.parent.name.startswith(_DIRECTORY_PREFIX):
                with contextlib.suppress(OSError):  # not empty, or its maker removed it
                    path.parent.rmdir()


def validate_endpoint(endpoint: str) -> str:
    """The endpoint itself. ValueError unless it is ipc:// or tcp:// on the loopback interface."""
    reason = _refusal(endpoint)
    if reason is not None:
        raise ValueError(
            f"--ssd-endpoint {endpoint}: {reason}; allowed are ipc:///path of a socket and "
            "tcp://127.0.0.1:port (tcp beyond this machine needs encryption, not supported yet)"
        )
    return endpoint


def _refuse_taken_path(endpoint: str) -> None:
    """libzmq would take an ipc path over from a live drafter, which then hears nobody."""
    if not endpoint.startswith(_IPC):
        return
    with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as probe:
        if probe.connect_ex(endpoint.removeprefix(_IPC)) == 0:
            raise ValueError(f"endpoint {endpoint}: another process listens there")


def unique_ipc_endpoint() -> str:
    """A fresh ipc:// endpoint in a new directory that only this user may enter (mode 0700).

    The DrafterSocket that binds it removes both at close.
    """
    return f"{_IPC}{tempfile.mkdtemp(prefix=f'{_DIRECTORY_PREFIX}{os.getpid()}-')}/drafter"


def _refusal(endpoint: str) -> str | None:
    if endpoint.startswith(_IPC):
        path = endpoint.removeprefix(_IPC)
        if not path.startswith("/"):
            return "not an absolute path"
        if len(os.fsencode(path)) > _MAX_IPC_PATH:
            return f"the path is longer than {_MAX_IPC_PATH} bytes"
        return None
    if not endpoint.startswith("tcp://"):
        return "unknown kind of endpoint"
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return str(error)
    if host not in _LOOPBACK_HOSTS:
        return f"host {host} is not the loopback interface"
    if port is None or parts.path:
        return "no port"
    return None


def _open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
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
    stats: TransportStats,
) -> list[T]:
    # One blocking call and no exception on the usual path: a round waits for this.
    received: list[T] = []
    socket.setsockopt(zmq.RCVTIMEO, math.ceil(timeout_s * 1000))
    try:
        frames = socket.recv_multipart()
    except zmq.Again:
        return received
    for num_left in reversed(range(_MAX_PER_RECEIVE)):
        try:
            received.append(decode(frames))
        except ProtocolError:
            stats.malformed += 1
        if not num_left or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            break
        frames = socket.recv_multipart()
    stats.received += len(received)
    return received


def _decode_from_drafter(frames: list[bytes]) -> FromDrafter:
    return FromDrafter(*decode_to_target(frames))


def _decode_from_target(frames: list[bytes]) -> FromTarget:
    return FromTarget(frames[0], *decode_to_drafter(frames[1:]))
