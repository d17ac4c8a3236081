"""A timeline of both processes on one clock, in the Chrome trace format that Perfetto reads.

A target begins the file anew before its drafter starts; then every process appends its own events:
CLOCK_MONOTONIC is one clock for all processes of a machine, whole lines are written with O_APPEND,
and the format lets the closing bracket be absent. Data-parallel replicas start when they please, so
each has a file of its own.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

_FLUSH_EVENTS = 256
_FLUSH_SECONDS = 1.0


def file_of_replica(path: str, *, dp_rank: int, dp_size: int) -> str:
    """trace.json is trace.dp1.json for the second of several, and trace.json for an only one."""
    if dp_size == 1:
        return path
    file = Path(path)
    return str(file.with_name(f"{file.stem}.dp{dp_rank}{file.suffix}"))


def start_file(path: str) -> None:
    """An empty timeline, in place of any that is there."""
    _begin(path, os.O_TRUNC)


class Tracer:
    """Collects spans of one process; path None makes every call a no-op."""

    def __init__(self, path: str | None, process_name: str) -> None:
        self._path = path
        self._events: list[dict[str, object]] = []
        self._last_flush = time.monotonic()
        if path is None:
            return
        self._pid = os.getpid()
        try:
            with suppress(FileExistsError):
                _begin(path, os.O_EXCL)
        except OSError as error:
            self._give_up(error)
            return
        self._events.append(
            {"ph": "M", "name": "process_name", "pid": self._pid, "args": {"name": process_name}}
        )
        atexit.register(self.flush)

    @contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        """Record how long the body took; args show in the viewer."""
        if self._path is None:
            yield
            return
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(name, start, time.monotonic_ns(), **args)

    def add(self, name: str, start_ns: int, end_ns: int, **args: object) -> None:
        """Record a span whose ends were measured with time.monotonic_ns()."""
        if self._path is None:
            return
        event = {
            "ph": "X",
            "name": name,
            "pid": self._pid,
            "tid": self._pid,
            "ts": start_ns / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "args": args,
        }
        self._events.append(event)
        full = len(self._events) >= _FLUSH_EVENTS
        if full or time.monotonic() - self._last_flush > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Append what was collected."""
        self._last_flush = time.monotonic()
        if self._path is None or not self._events:
            return
        lines = b"".join(msgspec.json.encode(event) + b",\n" for event in self._events)
        self._events.clear()
        try:
            _append(self._path, lines)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("--ssd-trace %s: tracing stops: %s", self._path, error)
        self._path = None


def _begin(path: str, if_there: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | if_there, 0o644)
    os.write(descriptor, b"[\n")
    os.close(descriptor)


def _append(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, data)
    os.close(descriptor)
