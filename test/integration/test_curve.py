"""A wire that leaves the machine: keys, their files, and peers that have the wrong ones."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_ssd import keys as keys_command
from sglang_ssd.wire import curve, transport
from sglang_ssd.wire.curve import KeyFiles, load_public, load_public_keys, load_secret
from sglang_ssd.wire.messages import HelloRequest, StatusRequest
from sglang_ssd.wire.transport import DrafterSocket, TargetSocket

PATIENCE_S = 10.0

Connect = Callable[[KeyFiles | None], TargetSocket]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert keys_command.main([str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


def drafter_keys(folder: Path) -> KeyFiles:
    drafter = folder / "drafter"
    return KeyFiles(secret=str(drafter / "drafter.key_secret"), peers=str(drafter / "targets"))


def target_keys(folder: Path) -> KeyFiles:
    target = folder / "target"
    return KeyFiles(secret=str(target / "target.key_secret"), peers=str(target / "drafter.key"))


@pytest.fixture
def drafter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DrafterSocket]:
    monkeypatch.setattr(transport, "_MONITOR_S", 0.0)
    socket = DrafterSocket("tcp://0.0.0.0:0", drafter_keys(folder))
    yield socket
    socket.close()


@pytest.fixture
def connect(drafter: DrafterSocket) -> Iterator[Connect]:
    sockets: list[TargetSocket] = []

    def to_drafter(keys: KeyFiles | None) -> TargetSocket:
        port = drafter.endpoint.rsplit(":", 1)[1]
        sockets.append(TargetSocket(f"tcp://127.0.0.1:{port}", keys))
        return sockets[-1]

    yield to_drafter
    for socket in sockets:
        socket.close()


def exchange(target: TargetSocket, drafter: DrafterSocket) -> bool:
    """Whether a question and its answer pass within the time."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        target.send(StatusRequest())
        for peer, _, _ in drafter.receive(0.02):
            drafter.send(peer, HelloRequest())
        if target.receive(0.02):
            return True
    return False


def refused(drafter: DrafterSocket, target: TargetSocket) -> int:
    """How often the peer was refused; it tries again by itself."""
    deadline = time.monotonic() + PATIENCE_S
    while not drafter.stats.refused.get("key") and time.monotonic() < deadline:
        target.send(StatusRequest())
        assert target.receive(0.0) == []
        assert drafter.receive(0.02) == []
    return drafter.stats.refused.get("key", 0)


def test_the_right_keys_talk(connect: Connect, drafter: DrafterSocket, folder: Path) -> None:
    assert exchange(connect(target_keys(folder)), drafter)


def test_a_wrong_key_is_refused_counted_and_said_once(
    connect: Connect,
    drafter: DrafterSocket,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Red when a stranger gets in, fills the log, or disturbs the target that may."""
    keys_command.make_keys(tmp_path / "others")
    stranger_keys = KeyFiles(
        secret=target_keys(tmp_path / "others").secret, peers=target_keys(folder).peers
    )
    with caplog.at_level(logging.WARNING):
        stranger = connect(stranger_keys)
        while refused(drafter, stranger) < 3:
            stranger.receive(0.0)
            drafter.receive(0.05)
    said = [r.message for r in caplog.records if "a peer is refused" in r.message]
    assert len(said) == 2, "once by each side"
    assert exchange(connect(target_keys(folder)), drafter)
    assert stranger.receive(0.0) == []


def test_a_peer_without_keys_is_refused(connect: Connect, drafter: DrafterSocket) -> None:
    assert refused(drafter, connect(None))


def test_a_target_does_not_talk_to_another_drafter(
    connect: Connect, drafter: DrafterSocket, folder: Path, tmp_path: Path
) -> None:
    keys_command.make_keys(tmp_path / "others")
    expects_another = KeyFiles(
        secret=target_keys(folder).secret, peers=target_keys(tmp_path / "others").peers
    )
    target = connect(expects_another)
    assert refused(drafter, target)
    assert not target.send(StatusRequest())


def test_a_target_may_be_let_in_later(
    connect: Connect, drafter: DrafterSocket, folder: Path, tmp_path: Path
) -> None:
    keys_command.make_keys(tmp_path / "more")
    newcomer = KeyFiles(
        secret=target_keys(tmp_path / "more").secret, peers=target_keys(folder).peers
    )
    target = connect(newcomer)
    assert refused(drafter, target)
    shutil.copy(tmp_path / "more/drafter/targets/target.key", folder / "drafter/targets/second.key")
    assert exchange(target, drafter)


def test_a_key_file_that_cannot_be_read_locks_nobody_else_out(
    connect: Connect, drafter: DrafterSocket, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when a file that is still being copied into the folder keeps every target away."""
    (folder / "drafter/targets/half.key").touch()
    with caplog.at_level(logging.WARNING):
        assert exchange(connect(target_keys(folder)), drafter)
        guests = curve._Guests(str(folder / "drafter/targets"))
        assert not any(guests.callback("", b"a key that nobody has") for _ in range(2))
    said = [r.message for r in caplog.records if "half.key" in r.message]
    assert 1 <= len(said) <= 2, "once by each reader of the folder"


def test_tcp_beyond_the_machine_needs_keys() -> None:
    for make in (DrafterSocket, TargetSocket):
        with pytest.raises(ValueError, match="there are no keys"):
            make("tcp://192.0.2.1:5555")


def test_the_command_makes_what_both_sides_need_and_overwrites_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_public(target_keys(folder).peers) == load_secret(drafter_keys(folder).secret).public
    assert load_public_keys(drafter_keys(folder).peers) == {
        load_secret(target_keys(folder).secret).public
    }
    before = sorted(folder.rglob("*"))
    assert keys_command.main([str(folder)]) == 1
    says = f"{folder}: there is something already; name a new folder\n"
    assert capsys.readouterr().err == says
    assert sorted(folder.rglob("*")) == before


def test_a_secret_that_others_may_read_is_refused(folder: Path) -> None:
    secret = Path(drafter_keys(folder).secret)
    secret.chmod(0o640)
    with pytest.raises(ValueError, match="mode 640; must be readable by its owner alone"):
        DrafterSocket("tcp://127.0.0.1:0", drafter_keys(folder))


@pytest.mark.parametrize("what", ["missing", "public", "empty"])
def test_a_file_that_is_no_secret_key_is_named(folder: Path, tmp_path: Path, what: str) -> None:
    path = tmp_path / "file"
    if what == "public":
        shutil.copy(target_keys(folder).peers, path)
    elif what == "empty":
        path.touch()
    if what != "missing":
        path.chmod(0o600)
    with pytest.raises(ValueError, match=f"^{path}"):
        load_secret(str(path))


def test_a_folder_without_keys_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{tmp_path}: holds no .key file"):
        load_public_keys(str(tmp_path))
    with pytest.raises(ValueError, match=f"^{tmp_path}/none: must be a folder"):
        load_public_keys(str(tmp_path / "none"))
