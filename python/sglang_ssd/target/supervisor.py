"""Keeps a drafter process running: starts it, starts it again when it ends, exchanges its model.

One thread does all of it and lives as long as the server, because the drafter asks the kernel to be
killed with the thread that started it, and because no round may wait for a process to start. The
first drafter is not started again if it never served: the server's start fails with its reason.

    pause before a restart   delay_s, doubled by every failure up to delay_max_s; a drafter that
                             served for healthy_s sets it back
    another model            takes the place of the one that runs; if it does not come up, or is
                             refused, the model that served last comes back
    a drafter that hangs     is given up if it does not serve within start_timeout_s, as one that
                             ended; a restarted one has it from the first Hello, which a paused
                             engine does not send; the first is the server's start to give up
                             (handshake.py)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from sglang_ssd.drafter.process import DrafterSettings

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_STOP_S = 5.0


class Handle(Protocol):
    """A started drafter (drafter/process.py)."""

    pid: int

    def alive(self) -> bool: ...

    def exit_reason(self) -> str | None: ...

    def stop(self, timeout_s: float = ...) -> None: ...


class RestartPace(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    delay_s: float
    delay_max_s: float
    healthy_s: float
    start_timeout_s: float


class Reload(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange of the drafter's model; number counts those that were asked for."""

    number: int
    model_path: str
    state: Literal["loading", "done", "failed"]
    error: str = ""


class DrafterSupervisor:
    """One drafter at a time at one endpoint. Other threads look, ask for a reload, and stop it."""

    def __init__(
        self,
        start: Callable[[DrafterSettings], Handle],
        settings: DrafterSettings,
        pace: RestartPace,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._settings = settings
        self._tried = settings  # of the present process
        self._proven: DrafterSettings | None = None  # the last that served
        self._pace = pace
        self._clock = clock
        self._delay_s = pace.delay_s
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._started = threading.Event()
        self._handle: Handle | None = None
        self._started_at = 0.0
        self._greeted_at: float | None = None
        self._ready_at: float | None = None
        self._verdict = ""  # why the present process has to go, although it runs
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="drafter-supervisor", daemon=True)
        self.endpoint = settings.endpoint
        self.num_starts = 0
        self.last_error = ""
        self._num_reloads = 0
        self.reload: Reload | None = None
        """The last that was begun, or was refused while none was under way."""

    # What others may do -------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when the first process was started, which says nothing of how it fares."""
        self._thread.start()
        self._started.wait()

    @property
    def pid(self) -> int:
        return self._handle.pid if self._handle is not None else -1

    @property
    def model_path(self) -> str:
        return self._settings.model_path

    def alive(self) -> bool:
        return self._handle is not None and self._handle.alive()

    def has_failed(self) -> bool:
        """Whether the first drafter ended before it served: there will be no other."""
        return self._proven is None and self._started.is_set() and not self.alive()

    def failure(self) -> str:
        """Of a first drafter that has failed: all that is known."""
        reason = self._handle.exit_reason() if self._handle is not None else None
        return reason or self.last_error

    def note_greeted(self) -> None:
        """A Hello was sent to the present drafter."""
        if self._greeted_at is None:
            self._greeted_at = self._clock()

    def note_ready(self, pid: int) -> None:
        """The drafter with this pid was welcomed and serves."""
        with self._lock:
            if pid != self.pid:
                return
            self._ready_at = self._clock()
            self._proven = self._tried
            if self._is_reloading() and self._tried is self._settings:
                self._note_reload("done")

    def note_refused(self, pid: int, reason: str) -> None:
        """The drafter with this pid runs, but will not serve this target."""
        with self._lock:
            if pid == self.pid and self._proven is not None:
                self._verdict = reason
                self._wake.set()

    def ask_reload(self, settings: DrafterSettings) -> Reload:
        """Have the drafter exchanged for one of these settings; `reload` tells how it goes."""
        with self._lock:
            self.reload = self._new_reload(settings.model_path, "loading")
            self._settings = msgspec.structs.replace(settings, endpoint=self.endpoint)
            self._verdict = "it makes room for another model"
            self._delay_s = self._pace.delay_s
            self._wake.set()
            return self.reload

    def refuse_reload(self, model_path: str, error: str) -> Reload:
        """What to tell the asker; `reload` goes on to tell of the last one that was begun."""
        with self._lock:
            return self._new_reload(model_path, "failed", error)

    @property
    def settings(self) -> DrafterSettings:
        """Of the drafter that serves, or that is to."""
        return self._settings

    def stop(self) -> None:
        """End the drafter for good."""
        with self._lock:
            self._stopping = True
            handle = self._handle
        self._wake.set()
        if handle is not None:
            handle.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)

    # The thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._start_one()
            finally:
                self._started.set()
            self._watch()
            if not self._stopping:
                self._bury()

    def _start_one(self) -> None:
        with self._lock:
            if self._stopping:
                return
            self._handle = None
            self._started_at = self._clock()
            self._greeted_at = None
            self._ready_at = None
            self._verdict = ""
            self._tried = self._settings
            self.num_starts += 1
            try:
                self._handle = self._start(self._settings)
            except Exception as error:  # no thread, no process, no memory: another try may do
                self.last_error = f"the drafter could not be started: {error}"
                logger.warning("SSD: %s", self.last_error, exc_info=True)

    def _watch(self) -> None:
        """Until the process has ended, or has to."""
        while self.alive() and not self._verdict and not self._stopping:
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            self._give_up_if_overdue()
        while self.has_failed() and not self._stopping:
            self._wake.wait()
            self._wake.clear()

    def _give_up_if_overdue(self) -> None:
        with self._lock:
            if self._proven is None or self._ready_at is not None or self._verdict:
                return
            since = self._started_at if self._is_reloading() else self._greeted_at
            timeout_s = self._pace.start_timeout_s
            if since is not None and self._clock() - since >= timeout_s:
                self._verdict = (
                    f"the drafter process {self.pid} did not serve within "
                    f"--ssd-start-timeout-s {timeout_s:g}"
                )

    def _bury(self) -> None:
        """Note how it ended, settle what comes next, and pause."""
        handle, verdict = self._handle, self._verdict
        if handle is not None and verdict:
            handle.stop()
        if handle is not None and self._tried is self._settings:
            self.last_error = verdict or handle.exit_reason() or self.last_error
        if self._is_replaced():
            return
        if self._ready_at is not None and self._clock() - self._ready_at >= self._pace.healthy_s:
            self._delay_s = self._pace.delay_s
        # The one warning is the client's, who knows whether requests are affected.
        logger.info("SSD: another drafter starts in %.1f s; %s", self._delay_s, self.last_error)
        self._pause(self._delay_s)
        self._delay_s = min(2 * self._delay_s, self._pace.delay_max_s)

    def _is_replaced(self) -> bool:
        """Whether other settings wait for their turn; those that did not serve lose it."""
        with self._lock:
            if self._tried is not self._settings:
                return True
            if self._is_reloading():
                self._note_reload("failed", self.last_error)
            if self._proven is not None:
                self._settings = self._proven
            return False

    def _is_reloading(self) -> bool:
        return self.reload is not None and self.reload.state == "loading"

    def _new_reload(
        self, model_path: str, state: Literal["loading", "failed"], error: str = ""
    ) -> Reload:
        self._num_reloads += 1
        return Reload(number=self._num_reloads, model_path=model_path, state=state, error=error)

    def _note_reload(self, state: Literal["done", "failed"], error: str = "") -> None:
        assert self.reload is not None, "a reload was asked for"
        self.reload = msgspec.structs.replace(self.reload, state=state, error=error)

    def _pause(self, seconds: float) -> None:
        until = self._clock() + seconds
        while not self._stopping and (left := until - self._clock()) > 0:
            self._wake.wait(left)
            self._wake.clear()
            if self._tried is not self._settings and self._is_reloading():
                return
