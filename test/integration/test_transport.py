"""The ZMQ sockets: several targets, deadlines, full queues, rubbish, restarts, endpoints."""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path

import pytest
import zmq

from sglang_ssd.drafter.process import make_endpoint, remove_endpoint
from sglang_ssd.wire import transport
from sglang_ssd.wire.endpoints import endpoint_refusal, validate_endpoint
from sglang_ssd.wire.frames import MAX_FRAME_BYTES, encode
from sglang_ssd.wire.messages import (
    DraftClose,
    DraftRule,
    DraftSync,
    SpeculateReply,
    StatusRequest,
)
from sglang_ssd.wire.transport import (
    HIGH_WATER_MARK,
    DrafterSocket,
    TargetSocket,
)

PATIENCE_S = 10.0  # a deadline for the test to fail by; nothing here waits so long when it works


def sync(rid: str) -> DraftSync:
    return DraftSync(rid=rid, generation=1, committed_len=2, rule=DraftRule())


def reply(rid: str) -> SpeculateReply:
    return SpeculateReply(1, [rid], [1], [2], [1], ["hit"], [0])


def receive(end, count: int = 1) -> list:
    """The next `count` messages."""
    received: list = []
    deadline = time.monotonic() + PATIENCE_S
    while len(received) < count and time.monotonic() < deadline:
        received += end.receive(0.1)
    assert len(received) == count
    return received


def send_connected(target: TargetSocket, message, frames=()) -> None:
    """Sends as soon as the connection stands: what is sent before is dropped."""
    deadline = time.monotonic() + PATIENCE_S
    while not target.send(message, frames):
        assert time.monotonic() < deadline, "no connection"
        time.sleep(0.01)


@pytest.fixture
def drafter(tmp_path):
    socket = DrafterSocket(f"ipc://{tmp_path}/drafter")
    yield socket
    socket.close()


@pytest.fixture
def connect():
    targets = []

    def connect_to(endpoint: str) -> TargetSocket:
        targets.append(TargetSocket(endpoint))
        return targets[-1]

    yield connect_to
    for target in targets:
        target.close()


def test_one_drafter_answers_each_of_several_targets(drafter, connect):
    targets = {name: connect(drafter.endpoint) for name in ("one", "two", "three")}
    for name, target in targets.items():
        send_connected(target, sync(name), [[5, 6]])
    peers = {}
    for peer, message, ids in receive(drafter, 3):
        assert ids == [5, 6]
        peers[message.rid] = peer
    assert len(set(peers.values())) == 3
    for name, peer in peers.items():
        assert drafter.send(peer, reply(name), [[len(name)]])
    for name, target in targets.items():
        assert [(m.rids, ids) for m, ids in receive(target)] == [([name], [len(name)])]


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


IPV6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on the loopback interface here")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=IPV6)])
def test_tcp_on_the_loopback_works_and_names_its_port(connect, host):
    """Red when an endpoint that is allowed is one that cannot be bound, or never reached."""
    drafter = DrafterSocket(f"tcp://{host}:0")
    try:
        assert not drafter.endpoint.endswith(":0")
        send_connected(connect(drafter.endpoint), StatusRequest())
        assert receive(drafter)[0].message == StatusRequest()
    finally:
        drafter.close()


def test_waits_end_at_their_deadline(drafter, connect):
    target = connect(drafter.endpoint)
    for end in (drafter, target):
        start = time.monotonic()
        assert end.receive(0.05) == []
        assert end.receive(0.0) == []
        assert 0.04 < time.monotonic() - start < 5.0


def test_an_idle_drafter_sleeps(drafter):
    start = time.process_time()
    assert drafter.receive(0.5) == []
    assert time.process_time() - start < 0.1


def test_a_message_ends_the_wait(drafter, connect):
    target = connect(drafter.endpoint)
    send_connected(target, StatusRequest())
    start = time.monotonic()
    assert drafter.receive(PATIENCE_S)
    assert time.monotonic() - start < PATIENCE_S / 2


def test_a_full_queue_drops_and_counts_but_never_blocks(drafter, connect):
    """The drafter does not read, as when it is frozen."""
    target = connect(drafter.endpoint)
    send_connected(target, sync("first"), [[1, 2]])
    big = list(range(2_000))
    message = DraftSync(rid="a", generation=1, committed_len=len(big), rule=DraftRule())
    start = time.monotonic()
    while not target.stats.dropped and time.monotonic() - start < PATIENCE_S:
        target.send(message, [big])
    assert target.stats.dropped
    assert target.stats.sent <= 4 * HIGH_WATER_MARK


def test_nobody_there_drops_and_counts(drafter, connect, tmp_path):
    lonely = connect(f"ipc://{tmp_path}/nobody")
    assert not lonely.send(StatusRequest())
    assert lonely.stats.dropped == 1
    assert not drafter.send(b"unknown peer", reply("a"), [[1]])
    assert drafter.stats.dropped == 1


def test_an_oversize_frame_is_counted_and_costs_nobody_else(drafter, connect):
    context = zmq.Context()
    vandal = context.socket(zmq.DEALER)
    vandal.connect(drafter.endpoint)
    vandal.send_multipart([encode(sync("a"))[0], bytes(MAX_FRAME_BYTES + 1)])
    deadline = time.monotonic() + PATIENCE_S
    while not drafter.stats.malformed and time.monotonic() < deadline:
        assert drafter.receive(0.1) == []
    context.destroy(linger=0)
    assert drafter.stats.refused == {"oversize": 1}
    send_connected(connect(drafter.endpoint), StatusRequest())
    assert receive(drafter)[0].message == StatusRequest()


def test_a_frame_above_the_limit_of_libzmq_ends_its_own_connection_alone(drafter, connect):
    """Red when such a frame is read whole, costs another target its messages, or keeps its sender
    away for good."""
    sender, other = connect(drafter.endpoint), connect(drafter.endpoint)
    for target in (sender, other):
        send_connected(target, sync("first"), [[1, 2]])
    receive(drafter, 2)
    events = sender._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    sender._socket.send_multipart([encode(sync("huge"))[0], bytes(2 * MAX_FRAME_BYTES + 1)])
    assert other.send(sync("beside"), [[1, 2]])
    assert receive(drafter)[0].message.rid == "beside"
    assert events.poll(1000 * PATIENCE_S), "the connection stands"
    sender._socket.disable_monitor()
    assert other.send(sync("after"), [[1, 2]])
    assert receive(drafter)[0].message.rid == "after"
    arrived: list = []
    deadline = time.monotonic() + PATIENCE_S
    while not arrived and time.monotonic() < deadline:
        sender.send(sync("again"), [[3, 4]])  # what is sent before the loss is noticed is lost
        arrived = drafter.receive(0.1)
    assert [(one.message.rid, one.ids) for one in arrived[:1]] == [("again", [3, 4])]
    assert drafter.stats.malformed == 0


def test_rubbish_is_counted_and_costs_nobody_else(drafter, connect, caplog):
    context = zmq.Context()
    vandal = context.socket(zmq.DEALER)
    vandal.connect(drafter.endpoint)
    header = encode(sync("a"))[0]
    rubbish = [[b""], [b"\xff" * 100], [header], [header, b"123"], [header, b"1" * 8, b"2"]]
    for frames in rubbish:
        vandal.send_multipart(frames)
    deadline = time.monotonic() + PATIENCE_S
    while drafter.stats.malformed < len(rubbish) and time.monotonic() < deadline:
        assert drafter.receive(0.1) == []
    context.destroy(linger=0)
    assert drafter.stats.malformed == len(rubbish)
    assert drafter.stats.refused == {"header": 2, "id_frame": 3}
    assert len(caplog.records) == 2, "once per cause"
    send_connected(connect(drafter.endpoint), StatusRequest())
    assert receive(drafter)[0].message == StatusRequest()


def test_one_receive_is_bounded(drafter, connect):
    target = connect(drafter.endpoint)
    for number in range(600):
        send_connected(target, DraftClose(rids=[str(number)], generations=[1]))
    time.sleep(0.2)
    first = drafter.receive(1.0)
    assert len(first) <= 256
    received = first + receive(drafter, 600 - len(first))
    assert [one.message.rids for one in received] == [[str(number)] for number in range(600)]


def test_one_receive_is_bounded_in_bytes_too(drafter, connect):
    """Red when a peer's long messages are all decoded at once, for seconds."""
    target = connect(drafter.endpoint)
    ids = list(range(1 << 18))  # 1 MiB
    for number in range(4):
        message = DraftSync(rid=str(number), generation=1, committed_len=len(ids), rule=DraftRule())
        send_connected(target, message, [ids])
    time.sleep(0.2)
    for number in range(4):
        assert [one.message.rid for one in drafter.receive(PATIENCE_S)] == [str(number)]


def test_a_target_finds_a_drafter_that_was_started_again(tmp_path, connect):
    endpoint = f"ipc://{tmp_path}/drafter"
    target = connect(endpoint)
    for _ in range(2):
        drafter = DrafterSocket(endpoint)
        send_connected(target, sync("a"), [[1, 2]])
        (peer, _, _), *_ = receive(drafter)
        drafter.send(peer, reply("a"), [[3]])
        assert receive(target)[0].ids == [3]
        drafter.close()
        deadline = time.monotonic() + PATIENCE_S
        while target.send(StatusRequest()) and time.monotonic() < deadline:
            time.sleep(0.01)  # until the loss of the connection is noticed


def test_a_stranger_at_the_endpoint_is_outlived(tmp_path, connect, monkeypatch):
    """Red when a process that babbled where the drafter was keeps its target away for good."""
    monkeypatch.setattr(transport, "RECONNECT_S", 0.2)
    path = tmp_path / "drafter"
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        stranger.settimeout(PATIENCE_S)
        target = connect(f"ipc://{path}")
        babble, _ = stranger.accept()
        with babble:
            babble.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(500))
            babble.settimeout(PATIENCE_S)
            while babble.recv(100):  # until libzmq turns away
                pass
    path.unlink()
    drafter = DrafterSocket(f"ipc://{path}")
    send_connected(target, sync("a"), [[1, 2]])
    assert receive(drafter)[0].ids == [1, 2]
    drafter.close()


def test_close_is_idempotent_and_removes_the_socket(tmp_path):
    drafter = DrafterSocket(f"ipc://{tmp_path}/drafter")
    assert (tmp_path / "drafter").exists()
    drafter.close()
    drafter.close()
    assert list(tmp_path.iterdir()) == []


def test_a_live_drafter_keeps_its_endpoint(drafter):
    with pytest.raises(ValueError, match="another process listens") as refusal:
        DrafterSocket(drafter.endpoint)
    assert str(refusal.value) == f"{drafter.endpoint!r}: another process listens there"


def test_the_socket_of_a_killed_drafter_is_in_nobodys_way(tmp_path):
    path = tmp_path / "drafter"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    DrafterSocket(f"ipc://{path}").close()


def test_a_file_in_the_way_is_kept(tmp_path):
    """Red when a mistyped endpoint costs a user the file of that name."""
    path = tmp_path / "data"
    path.write_text("mine")
    with pytest.raises(ValueError, match="a file is there") as refusal:
        DrafterSocket(f"ipc://{path}")
    assert str(refusal.value) == f"'ipc://{path}': a file is there that is no socket"
    assert path.read_text() == "mine"


def test_unique_endpoints_are_private_and_outlive_a_drafter():
    """Red when the next drafter finds no directory to bind in, or another user's."""
    endpoints = [make_endpoint(), make_endpoint()]
    assert len(set(endpoints)) == 2
    for endpoint in endpoints:
        directory = Path(endpoint.removeprefix("ipc://")).parent
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        DrafterSocket(endpoint).close()
        DrafterSocket(endpoint).close()
        remove_endpoint(endpoint)
        assert not directory.exists()


@pytest.mark.parametrize(
    "endpoint",
    ["ipc:///run/x/drafter", "tcp://127.0.0.1:5555", "tcp://localhost:1", "tcp://[::1]:7000"],
)
def test_local_endpoints_are_allowed(endpoint):
    assert validate_endpoint(endpoint) == endpoint


def test_an_endpoint_with_keys_has_a_host_and_a_port():
    for endpoint, says in {"tcp://:5555": "no host", "tcp://example.org": "no port"}.items():
        assert endpoint_refusal(endpoint, has_keys=True) == says
    assert endpoint_refusal("tcp://example.org:5555", has_keys=True) is None


def far(host: str) -> str:
    return f"host {host} is not the loopback interface, and there are no keys"


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("tcp://0.0.0.0:5555", far("0.0.0.0")),
        ("tcp://*:5555", far("*")),
        ("tcp://192.168.1.5:5555", far("192.168.1.5")),
        ("tcp://example.org:5555", far("example.org")),
        ("tcp://127.0.0.1.example.org:5555", far("127.0.0.1.example.org")),
        ("tcp://127.0.0.1", "no port"),
        ("tcp://127.0.0.1:99999", "Port out of range 0-65535"),
        ("tcp://127.0.0.1:5555/x", "no port"),
        ("ipc://relative", "not an absolute path"),
        ("ipc://@abstract", "not an absolute path"),
        ("ipc://", "not an absolute path"),
        ("ipc:///" + "x" * 120, "the path is longer than 103 bytes"),
        ("inproc://x", "unknown kind of endpoint"),
        ("udp://127.0.0.1:5555", "unknown kind of endpoint"),
        ("/run/drafter", "unknown kind of endpoint"),
        ("", "unknown kind of endpoint"),
    ],
)
def test_other_endpoints_are_refused_by_name(endpoint, says):
    """Red when one is taken that no drafter of ours listens at, or is refused for another cause."""
    with pytest.raises(ValueError, match="must be ipc:///PATH") as refusal:
        validate_endpoint(endpoint)
    assert str(refusal.value) == (
        f"{endpoint!r}: {says}; must be ipc:///PATH of a socket, tcp://127.0.0.1:PORT or, with "
        "both keys, tcp://HOST:PORT"
    )
