"""The fake wire itself: each fault does what its name says, and one seed gives one run."""

from __future__ import annotations

from sglang_ssd.wire.fake import FakeWire, Faults
from sglang_ssd.wire.messages import (
    DraftClose,
    DraftRule,
    DraftSync,
    SpeculateReply,
    StatusRequest,
)


def numbered(number: int) -> DraftClose:
    return DraftClose(rids=[str(number)], generations=[number])


def send_numbered(wire: FakeWire, count: int) -> None:
    target = wire.target()
    for number in range(count):
        target.send(numbered(number))


def arrivals(wire: FakeWire, ticks: int = 0) -> list[int]:
    """Numbers in the order in which they arrive over so many ticks."""
    numbers = []
    for _ in range(ticks + 1):
        numbers += [m.generations[0] for _, m, _ in wire.drafter.receive(0.0)]
        wire.tick()
    return numbers


def test_without_faults_everything_arrives_at_once_and_in_order():
    wire = FakeWire()
    send_numbered(wire, 5)
    assert arrivals(wire) == [0, 1, 2, 3, 4]
    wire.drafter.send(b"target", SpeculateReply(1, ["a"], [1], [2], [1], ["hit"], [0]), [[7]])
    assert [ids for _, ids in wire.target().receive(0.0)] == [[7]]


def test_dropped_messages_do_not_arrive():
    wire = FakeWire(to_drafter=Faults(drop=0.5))
    send_numbered(wire, 200)
    assert 60 < len(arrivals(wire)) < 140


def test_duplicated_messages_arrive_twice():
    wire = FakeWire(to_drafter=Faults(duplicate=1.0))
    send_numbered(wire, 3)
    assert arrivals(wire) == [0, 0, 1, 1, 2, 2]


def test_delay_keeps_the_order():
    wire = FakeWire(to_drafter=Faults(delay=4))
    send_numbered(wire, 50)
    assert arrivals(wire) != list(range(50))
    assert arrivals(wire, ticks=4)[-1] == 49
    wire = FakeWire(to_drafter=Faults(delay=4))
    send_numbered(wire, 50)
    assert arrivals(wire, ticks=4) == list(range(50))


def test_reorder_breaks_the_order_and_loses_nothing():
    wire = FakeWire(to_drafter=Faults(reorder=0.5))
    send_numbered(wire, 50)
    arrived = arrivals(wire)
    assert arrived != list(range(50))
    assert sorted(arrived) == list(range(50))


def test_corruption_is_met_by_the_real_checks():
    wire = FakeWire(to_drafter=Faults(corrupt=1.0))
    target = wire.target()
    for _ in range(300):
        target.send(
            DraftSync(rid="a", generation=1, committed_len=3, rule=DraftRule()), [[1, 2, 3]]
        )
    received = wire.drafter.receive(0.0)
    assert wire.drafter.stats.malformed > 200
    assert len(received) + wire.drafter.stats.malformed == 300
    assert all(ids != [1, 2, 3] or message.rid for _, message, ids in received)


def test_a_killed_direction_is_silent_until_it_is_revived():
    wire = FakeWire(to_drafter=Faults(delay=3))
    send_numbered(wire, 5)
    wire.kill("to_drafter")
    send_numbered(wire, 5)
    assert arrivals(wire, ticks=5) == []
    wire.revive("to_drafter")
    send_numbered(wire, 2)
    assert arrivals(wire, ticks=5) == [0, 1]


def test_peers_get_their_own():
    wire = FakeWire()
    one, two = wire.target(b"one"), wire.target(b"two")
    one.send(StatusRequest())
    two.send(StatusRequest())
    assert [peer for peer, _, _ in wire.drafter.receive(0.0)] == [b"one", b"two"]
    wire.drafter.send(b"two", SpeculateReply(1, [], [], [], [], [], []), [[]])
    assert one.receive(0.0) == []
    assert len(two.receive(0.0)) == 1


def test_the_same_seed_gives_the_same_run():
    faults = Faults(drop=0.2, duplicate=0.2, reorder=0.3, delay=3)

    def run(seed: int) -> list[int]:
        wire = FakeWire(seed=seed, to_drafter=faults)
        send_numbered(wire, 60)
        return arrivals(wire, ticks=3)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_waiting_target_lets_the_drafter_work():
    wire = FakeWire(to_drafter=Faults(delay=2), to_target=Faults(delay=2))

    def answer() -> None:
        for peer, _, _ in wire.drafter.receive(0.0):
            wire.drafter.send(peer, SpeculateReply(1, [], [], [], [], [], []), [[]])

    wire.pump = answer
    target = wire.target()
    target.send(StatusRequest())
    assert len(target.receive(5.0)) == 1


def test_a_wait_in_vain_lasts_its_timeout_on_the_wires_clock():
    wire = FakeWire(tick_s=0.004)
    assert wire.target().receive(0.02) == []
    assert wire.clock() == 0.02
