"""The supervisor over processes that are only pretended: restarts, pauses, other models."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from sglang_ssd.drafter.process import DrafterSettings
from sglang_ssd.target.reload import ReloadRequest, is_superseded, reload_drafter
from sglang_ssd.target.supervisor import DrafterSupervisor, RestartPace

PATIENCE_S = 10.0
QUICK = RestartPace(delay_s=0.01, delay_max_s=0.04, healthy_s=1000.0, start_timeout_s=1000.0)


class Process:
    """A drafter that dies when told to."""

    def __init__(self, pid: int, model_path: str) -> None:
        self.pid = pid
        self.model_path = model_path
        self.reason: str | None = None
        self.thread = threading.current_thread()

    def alive(self) -> bool:
        return self.reason is None

    def exit_reason(self) -> str | None:
        return self.reason

    def stop(self, timeout_s: float = 0.0) -> None:
        self.reason = self.reason or "stopped"


class Nursery:
    """Starts processes and remembers them; those of a doomed model are dead at once."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.times: list[float] = []
        self.doomed: set[str] = set()

    def start(self, settings: DrafterSettings) -> Process:
        process = Process(len(self.processes) + 1, settings.model_path)
        if settings.model_path in self.doomed:
            process.reason = f"{settings.model_path} is no model"
        self.processes.append(process)
        self.times.append(time.monotonic())
        return process


Supervise = Callable[..., DrafterSupervisor]


@pytest.fixture
def nursery() -> Nursery:
    return Nursery()


@pytest.fixture
def supervise(nursery: Nursery) -> Iterator[Supervise]:
    started: list[DrafterSupervisor] = []

    def make(pace: RestartPace = QUICK) -> DrafterSupervisor:
        settings = DrafterSettings(model_path="first", endpoint="ipc:///x")
        started.append(DrafterSupervisor(nursery.start, settings, pace))
        started[-1].start()
        return started[-1]

    yield make
    for supervisor in started:
        supervisor.stop()
        assert not supervisor._thread.is_alive()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.002)


def test_a_drafter_that_never_served_is_not_started_again(
    nursery: Nursery, supervise: Supervise
) -> None:
    nursery.doomed.add("first")
    supervisor = supervise()
    wait_for(supervisor.has_failed)
    assert supervisor.failure() == "first is no model"
    assert len(nursery.processes) == 1


def test_one_that_served_is_started_again_by_the_same_thread(
    nursery: Nursery, supervise: Supervise
) -> None:
    """The kernel kills the drafter with the thread that started it."""
    supervisor = supervise()
    supervisor.note_ready(supervisor.pid)
    nursery.processes[0].reason = "signal 9"
    wait_for(lambda: len(nursery.processes) == 2 and supervisor.alive())
    assert supervisor.last_error == "signal 9"
    assert (supervisor.num_starts, supervisor.pid) == (2, 2)
    assert nursery.processes[0].thread is nursery.processes[1].thread
    assert nursery.processes[0].thread is not threading.current_thread()


def test_the_pause_doubles_up_to_its_bound(nursery: Nursery, supervise: Supervise) -> None:
    """Red when a drafter that dies at once is started as fast as the machine can."""
    supervisor = supervise(
        RestartPace(delay_s=0.05, delay_max_s=0.2, healthy_s=1000.0, start_timeout_s=1000.0)
    )
    supervisor.note_ready(supervisor.pid)
    nursery.doomed.add("first")
    nursery.processes[0].reason = "signal 9"
    wait_for(lambda: len(nursery.processes) == 6)
    times = nursery.times
    pauses = [after - before for before, after in itertools.pairwise(times[1:])]
    assert all(p >= least for p, least in zip(pauses, [0.1, 0.2, 0.2, 0.2], strict=True))


def test_a_while_of_health_sets_the_pause_back(nursery: Nursery, supervise: Supervise) -> None:
    supervisor = supervise(
        RestartPace(delay_s=0.01, delay_max_s=60.0, healthy_s=0.0, start_timeout_s=1000.0)
    )
    for number in range(12):  # 0.01 * 2**12 s would outlast the test
        wait_for(lambda number=number: len(nursery.processes) == number + 1)
        wait_for(supervisor.alive)
        supervisor.note_ready(supervisor.pid)
        nursery.processes[-1].reason = "signal 9"
    wait_for(lambda: len(nursery.processes) == 13)


def test_another_model_takes_the_place_of_the_first(nursery: Nursery, supervise: Supervise) -> None:
    supervisor = supervise()
    supervisor.note_ready(supervisor.pid)
    supervisor.ask_reload(DrafterSettings(model_path="second"))
    wait_for(lambda: supervisor.pid == 2)
    assert nursery.processes[0].reason == "stopped"
    assert supervisor.reload is not None
    assert supervisor.reload.state == "loading"
    supervisor.note_ready(supervisor.pid)
    assert supervisor.reload.state == "done"
    assert supervisor.model_path == "second"
    assert supervisor.last_error == ""


@pytest.mark.parametrize("how", ["dies", "is refused"])
def test_the_first_comes_back_if_the_other_cannot_serve(
    nursery: Nursery, supervise: Supervise, how: str
) -> None:
    supervisor = supervise()
    supervisor.note_ready(supervisor.pid)
    if how == "dies":
        nursery.doomed.add("second")
    supervisor.ask_reload(DrafterSettings(model_path="second"))
    wait_for(lambda: supervisor.pid >= 2)
    if how == "is refused":
        supervisor.note_refused(supervisor.pid, "vocabulary size 5")
    wait_for(lambda: supervisor.pid == 3 and supervisor.alive())
    assert nursery.processes[-1].model_path == "first"
    assert supervisor.reload is not None
    assert supervisor.reload.state == "failed"
    expected = {"dies": "second is no model", "is refused": "vocabulary size 5"}[how]
    assert supervisor.reload.error == expected


@pytest.mark.parametrize(
    "error",
    [OSError("no more"), ValueError("no more"), RuntimeError("no more")],
    ids=lambda error: type(error).__name__,
)
def test_a_start_that_is_impossible_is_tried_again(
    nursery: Nursery, supervise: Supervise, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    supervisor = supervise()
    supervisor.note_ready(supervisor.pid)
    attempts = []

    def start(settings: DrafterSettings) -> Process:
        attempts.append(settings)
        if len(attempts) == 1:
            raise error
        return nursery.start(settings)

    monkeypatch.setattr(supervisor, "_start", start)
    nursery.processes[0].reason = "signal 9"
    wait_for(lambda: len(attempts) == 2 and supervisor.alive())
    assert supervisor.last_error == "the drafter could not be started: no more"


def test_a_first_start_that_is_impossible_says_why() -> None:
    """Red when whoever waits for the first process waits for ever."""

    def start(settings: DrafterSettings) -> Process:
        raise ValueError("embedded null byte")

    supervisor = DrafterSupervisor(start, DrafterSettings(model_path="m"), QUICK)
    supervisor.start()
    assert supervisor.has_failed()
    assert supervisor.failure() == "the drafter could not be started: embedded null byte"
    supervisor.stop()


def test_a_refused_request_leaves_the_last_exchange_alone(
    nursery: Nursery, supervise: Supervise
) -> None:
    """Red when its asker is told of another's, or the model that served is lost."""
    supervisor = supervise()
    supervisor.note_ready(supervisor.pid)
    begun = reload_drafter(supervisor, ReloadRequest(model_path="second"))
    wait_for(lambda: supervisor.pid == 2)
    refused = reload_drafter(supervisor, ReloadRequest(model_path="/no/such/model"))
    assert (refused.state, refused.number) == ("failed", begun.number + 1)
    assert "/no/such/model is missing" in refused.error
    assert supervisor.reload == begun
    nursery.processes[1].reason = "second is no model"
    wait_for(lambda: supervisor.pid == 3)
    assert nursery.processes[2].model_path == "first"
    assert supervisor.reload is not None
    ended = supervisor.reload
    assert (ended.number, ended.state) == (begun.number, "failed")
    assert reload_drafter(supervisor, ReloadRequest(model_path="/no/such/model")).number == 3
    assert supervisor.reload == ended


def test_a_model_that_hangs_while_it_loads_is_given_up(
    nursery: Nursery, supervise: Supervise
) -> None:
    """Red when it is waited for without end, or the model before it does not come back."""
    supervisor = supervise(msgspec.structs.replace(QUICK, start_timeout_s=0.05))
    supervisor.note_ready(supervisor.pid)
    time.sleep(0.2)  # one that serves has all the time
    assert supervisor.pid == 1
    supervisor.ask_reload(DrafterSettings(model_path="second"))
    wait_for(lambda: supervisor.pid == 3)
    assert nursery.processes[1].reason == "stopped"
    assert nursery.processes[2].model_path == "first"
    assert supervisor.reload is not None
    assert supervisor.reload.state == "failed"
    assert supervisor.reload.error == (
        "the drafter process 2 did not serve within --ssd-start-timeout-s 0.05"
    )
    time.sleep(0.2)  # nobody has asked for it: a paused engine greets no drafter
    assert supervisor.pid == 3
    supervisor.note_greeted()
    wait_for(lambda: supervisor.pid == 4)  # a restarted one that hangs as well


def test_what_is_said_of_an_earlier_process_is_not_of_the_next(
    nursery: Nursery, supervise: Supervise
) -> None:
    """Red when a Welcome that was under way makes a reload done whose drafter has not served."""
    supervisor = supervise()
    supervisor.note_ready(1)
    supervisor.ask_reload(DrafterSettings(model_path="second"))
    wait_for(lambda: supervisor.pid == 2)
    supervisor.note_ready(1)
    supervisor.note_refused(1, "vocabulary size 5")
    assert supervisor.reload is not None
    assert supervisor.reload.state == "loading"
    supervisor.note_ready(2)
    assert supervisor.reload.state == "done"
    assert nursery.processes[1].alive()


def test_while_a_process_is_started_there_is_none(
    nursery: Nursery, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a round meanwhile takes the one before it for the present one."""
    supervisor = supervise()
    supervisor.note_ready(1)
    seen = []

    def start(settings: DrafterSettings) -> Process:
        seen.append((supervisor.pid, supervisor.alive()))
        return nursery.start(settings)

    monkeypatch.setattr(supervisor, "_start", start)
    nursery.processes[0].reason = "signal 9"
    wait_for(lambda: supervisor.pid == 2)
    assert seen == [(-1, False)]


def test_a_reload_knows_when_another_took_its_place() -> None:
    def replicas(*numbers: int) -> list[dict[str, Any]]:
        return [{"reload": {"state": "loading", "number": number}} for number in numbers]

    assert not is_superseded(replicas(1, 2), replicas(1, 2))
    assert is_superseded(replicas(1, 1), replicas(1, 2))
    assert is_superseded(replicas(1, 2), replicas(2, 2))
    assert not is_superseded([{"reload": {"state": "none"}}], [{"reload": {"state": "none"}}])


@pytest.mark.parametrize("field", ["model_path", "revision"])
@pytest.mark.parametrize("text", ["", "\0", "a\0b"])
def test_a_text_that_no_command_line_can_carry_is_refused_by_its_field(
    field: str, text: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(msgspec.json.encode({field: text}), type=ReloadRequest)
    assert msgspec.convert({field: "hub/id\n"}, ReloadRequest)
