"""A wire that misbehaves on command, between a target and a drafter that are both real.

One thread: a ROUTER where the target connects, and for each target a DEALER to the drafter under
the target's own name. Replies can be held back, the connection cut, frames of any kind slipped in.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from sglang_ssd.wire.frames import ProtocolError, decode_to_target
from sglang_ssd.wire.messages import HelloRequest, Welcome

_POLL_MS = 20


class FaultyProxy:
    """Set `delay_s` at any time; the other faults are asked for by `cut` and `slip_in`."""

    def __init__(self, front: str, back: str) -> None:
        self._front_endpoint, self._back_endpoint = front, back
        self._context = zmq.Context()
        self._front: zmq.Socket[bytes] | None = None
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._late: deque[tuple[float, list[bytes]]] = deque()
        self._wishes: deque[Callable[[], None]] = deque()
        self._stopping = False
        self.delay_s = 0.0
        self.welcomed_at = 0.0
        """When the last drafter that was new said Welcome."""
        self._gone_pid = 0
        self.last_replies: deque[list[bytes]] = deque(maxlen=20)
        self.last_commits: deque[list[bytes]] = deque(maxlen=20)
        self._bind()
        self._thread = threading.Thread(target=self._run, name="faulty-proxy", daemon=True)
        self._thread.start()

    def slip_in(self, *, to_target: list[list[bytes]], to_drafter: list[list[bytes]]) -> None:
        """Frames that neither side has sent, for every target and in its name."""

        def send() -> None:
            for peer, back in self._backs.items():
                for frames in to_target:
                    self._to_target([peer, *frames])
                for frames in to_drafter:
                    _try_send(back, frames)

        self._wishes.append(send)

    def cut(self) -> None:
        """Drop every connection; `mend` makes the proxy reachable again."""
        self._wishes.append(self._unbind)

    def mend(self) -> None:
        self._wishes.append(self._bind)

    def expect_drafter_other_than(self, pid: int) -> None:
        """Its Welcome will set welcomed_at."""
        self.welcomed_at = 0.0
        self._gone_pid = pid

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(5)

    def _run(self) -> None:
        while not self._stopping:
            while self._wishes:
                self._wishes.popleft()()
            poller = zmq.Poller()
            for socket in ([self._front] if self._front is not None else []) + list(
                self._backs.values()
            ):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(_POLL_MS))
            if self._front is not None and self._front in ready:
                self._forward(self._front.recv_multipart())
            for peer, back in list(self._backs.items()):
                if back in ready:
                    self._take_reply(peer, back.recv_multipart())
            while self._late and self._late[0][0] <= time.monotonic():
                self._to_target(self._late.popleft()[1])
        self._unbind()
        self._context.destroy(linger=0)

    def _forward(self, frames: list[bytes]) -> None:
        peer = frames[0]
        if peer not in self._backs:
            back = self._context.socket(zmq.DEALER)
            back.setsockopt(zmq.LINGER, 0)
            back.setsockopt(zmq.IMMEDIATE, 1)
            back.setsockopt(zmq.IDENTITY, peer)
            back.connect(self._back_endpoint)
            self._backs[peer] = back
        if len(frames) == 3:
            self.last_commits.append(frames[1:])
        _try_send(self._backs[peer], frames[1:])

    def _take_reply(self, peer: bytes, frames: list[bytes]) -> None:
        with contextlib.suppress(ProtocolError):
            message, _ = decode_to_target(frames)
            is_new = isinstance(message, Welcome) and message.drafter_pid != self._gone_pid
            if is_new and not self.welcomed_at:
                self.welcomed_at = time.monotonic()
            if not isinstance(message, Welcome | HelloRequest):
                self.last_replies.append(frames)
        if self.delay_s or self._late:
            self._late.append((time.monotonic() + self.delay_s, [peer, *frames]))
        else:
            self._to_target([peer, *frames])

    def _to_target(self, frames: list[bytes]) -> None:
        if self._front is not None:
            _try_send(self._front, frames)

    def _bind(self) -> None:
        if self._front is None:
            self._front = self._context.socket(zmq.ROUTER)
            self._front.setsockopt(zmq.LINGER, 0)
            self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._front.bind(self._front_endpoint)

    def _unbind(self) -> None:
        for socket in (*self._backs.values(), *([self._front] if self._front else [])):
            socket.close(0)
        self._backs.clear()
        self._front = None


def _try_send(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    with contextlib.suppress(zmq.Again):
        socket.send_multipart(frames, flags=zmq.NOBLOCK)
