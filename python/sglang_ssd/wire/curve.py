"""CURVE keys of a wire that leaves the machine: their files, and who may connect.

Each side has a secret key and knows the public keys of the other: a target the one of its drafter,
a drafter a folder with those of its targets, read anew for every connection. The files are
pyzmq's certificates, made by `python -m sglang_ssd.keys`. A secret that others may read is refused.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from sglang_ssd.wire.notices import NoticeLog

logger = logging.getLogger(__name__)

_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake broke off",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the other side does not use CURVE, or not this key",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the other side refuses our key, or we refuse theirs",
}


class KeyFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths; peers is a public key file (target) or a folder of them (drafter)."""

    secret: str
    peers: str


class KeyPair(msgspec.Struct, frozen=True):
    public: bytes
    secret: bytes


def load_secret(path: str) -> KeyPair:
    """ValueError names the file and what is wrong with it."""
    try:
        status = Path(path).stat()
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ValueError(f"{path}: mode {mode:o}; must be readable by its owner alone (chmod 600)")
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{path}: belongs to user {status.st_uid}; must be ours")
    if secret is None:
        raise ValueError(f"{path}: holds no secret key; must be a .key_secret file")
    return KeyPair(public, secret)


def load_public(path: str) -> bytes:
    """The public key of one peer."""
    try:
        public, _ = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return public


def load_public_keys(folder: str) -> set[bytes]:
    """Those of all *.key files of a folder."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: must be a folder with the targets' .key files")
    keys = {load_public(str(path)) for path in sorted(Path(folder).glob("*.key"))}
    if not keys:
        raise ValueError(f"{folder}: holds no .key file")
    return keys


def secure_target(socket: zmq.Socket[bytes], keys: KeyFiles) -> None:
    """Before connect: only the drafter that owns the public key is talked to."""
    pair = load_secret(keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, load_public(keys.peers))


def secure_drafter(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: KeyFiles
) -> ThreadAuthenticator:
    """Before bind: only targets whose public key is in the folder get in. Stop what is returned."""
    pair = load_secret(keys.secret)
    load_public_keys(keys.peers)  # a folder that is wrong from the start is said at the start
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(credentials_provider=_Guests(keys.peers))
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    return guard


class _Guests:
    """pyzmq's credentials provider: reads the folder anew, so that keys come and go at run time."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._notices = NoticeLog(logger)

    def callback(self, domain: str, key: bytes) -> bool:
        return any(self._holds(path, key) for path in Path(self._folder).glob("*.key"))

    def _holds(self, path: Path, key: bytes) -> bool:
        try:
            return load_public(str(path)) == key
        except ValueError as error:  # a file that is being copied locks nobody else out
            self._notices.warn("key file", f"SSD wire: passes over a key: {error}")
            return False


class HandshakeMonitor:
    """Counts the handshakes that failed on a socket; says so once per interval."""

    def __init__(self, socket: zmq.Socket[bytes], notices: NoticeLog, endpoint: str) -> None:
        events = 0
        for event in _FAILURES:
            events |= event
        self._socket = socket
        self._events: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        self._notices = notices
        self._endpoint = endpoint

    def look(self) -> bool:
        """Whether one has failed since the last look."""
        has_failed = False
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event: dict[str, Any] = dict(recv_monitor_message(self._events))
            why = _FAILURES.get(event["event"])
            if why is not None:
                has_failed = True
                self._notices.warn("key", f"SSD wire {self._endpoint}: a peer is refused: {why}.")
        return has_failed

    def close(self) -> None:
        self._socket.disable_monitor()
