"""A drafter that was started by hand behind keys: it may go and come back, and strangers, at either
end, are turned away without anybody's notice. docs/operations.md tells how it is set up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from faults.chaos import wait_until
from harness.client import generate_all, streamed_beside
from harness.drafter_faults import (
    assert_drafts_again,
    long_requests,
    reload,
    status,
    wait_until_ready,
)
from harness.hand_drafter import drafter_by_hand
from harness.idle import assert_drained
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import ServerPool, ServerSpec
from harness.strangers import refused_lines, stranger, talk_nonsense
from servers import free_port
from sglang_ssd.keys import make_keys
from sglang_ssd.wire.curve import KeyFiles
from sglang_ssd.wire.frames import encode
from sglang_ssd.wire.messages import StatusRequest
from sglang_ssd.wire.notices import INTERVAL_S
from sglang_ssd.wire.transport import DrafterSocket

pytestmark = pytest.mark.timeout(1800)
"""Whichever test is first starts the server and the reference, and each waits for a drafter."""

NUM_STRANGERS = 2
"""With the right key, each of whom talks the same nonsense."""


def keys_of(folder: Path, side: Literal["drafter", "target"]) -> KeyFiles:
    peers = {"drafter": "targets", "target": "drafter.key"}[side]
    own = folder / side
    return KeyFiles(secret=str(own / f"{side}.key_secret"), peers=str(own / peers))


class Keyed:
    """A server that waits for its drafter, and the keys."""

    def __init__(self, pool: ServerPool, target: Path, folder: Path) -> None:
        self.ours, self.others = folder / "ours", folder / "others"
        for keys in (self.ours, self.others):
            make_keys(keys)
        mine = keys_of(self.ours, "target")
        port = free_port()
        settings = {
            "endpoint": f"tcp://127.0.0.1:{port}",
            "secret_key": mine.secret,
            "peer_keys": mine.peers,
        }
        self.listens_at = f"tcp://0.0.0.0:{port}"
        """The drafter does."""
        spec = ServerSpec(model=str(target), drafter=str(target), settings=tuple(settings.items()))
        self.server = pool.start(spec)

    @contextmanager
    def drafter(self, log: Path | None = None) -> Iterator[None]:
        """While it is there."""
        keys = keys_of(self.ours, "drafter")
        flags = ("--secret-key", keys.secret, "--peer-keys", keys.peers)
        model = Path(self.server.spec.model)
        with drafter_by_hand(model, self.listens_at, *flags, log=log) as process:
            self.server.wait_until_ready()
            # Not "ready" alone: the target may not have missed the one before yet.
            wait_until(lambda: self.state()["drafter_pid"] == process.pid, "a welcome")
            wait_until_ready(self.server)
            yield

    def state(self) -> dict[str, Any]:
        (replica,) = status(self.server)["replicas"]
        return replica

    def refused_by_drafter(self) -> Counter[str]:
        """By cause, as it last told."""
        return Counter(self.state()["drafter_refused"] or {})


@pytest.fixture(scope="module")
def keyed(
    target: Path, pool: ServerPool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keyed]:
    found = Keyed(pool, target, tmp_path_factory.mktemp("keys"))
    try:
        yield found
    finally:
        found.server.stop()


def test_it_may_go_and_come_back(keyed: Keyed, reference: Reference) -> None:
    """Red when a target needs a restart to find its drafter again, or talks without keys, or to
    another that has taken its drafter's place."""
    server = keyed.server
    with keyed.drafter():
        restarts = keyed.state()["restarts"]
        assert_drafts_again("self", server, reference)
    cases = long_requests(server, 2)
    assert_same(reference, cases, generate_all(server.url, cases))
    assert status(server)["state"] == "dead"
    refused = reload(server)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "the drafter was not started by this server: start another one at its endpoint"
    )
    assert_refuses_another(keyed, reference)
    with keyed.drafter():
        assert keyed.state()["restarts"] == restarts + 1
        assert_drafts_again("self", server, reference)
        assert_drained(server)


def assert_refuses_another(keyed: Keyed, reference: Reference) -> None:
    """One with other keys listens where the target's own did; no request notices."""
    start, log = time.monotonic(), keyed.server.log_text()
    refused = keyed.state()["wire"]["refused"].get("key", 0)
    with (
        closing(DrafterSocket(keyed.listens_at, keys_of(keyed.others, "drafter"))) as other,
        streamed_beside(keyed.server.url, long_requests(keyed.server)) as beside,
    ):
        wait_until(lambda: keyed.state()["wire"]["refused"].get("key", 0) > refused, "a refusal")
        assert keyed.state()["state"] == "dead"
        assert other.receive(0.0) == []
    assert_same(reference, *zip(*beside, strict=True))
    since = keyed.server.log_text().removeprefix(log)
    assert_once_an_interval(since, "a peer is refused", start)


def assert_once_an_interval(log: str, line: str, start: float) -> None:
    assert 1 <= log.count(line) <= 1 + (time.monotonic() - start) / INTERVAL_S, line


def test_strangers_at_the_drafter(keyed: Keyed, reference: Reference, tmp_path: Path) -> None:
    """Red when a peer without the right key gets in, or a message of another version, size, type
    or shape is taken; also when one is not counted, fills the log, or costs a request of the
    honest target its answer or its drafts."""
    server, log = keyed.server, tmp_path / "drafter.log"
    with keyed.drafter(log):
        start, before, counter = time.monotonic(), keyed.state(), RoundCounter(server)
        with streamed_beside(server.url, long_requests(server, 4)) as beside:
            wrong = KeyFiles(
                secret=keys_of(keyed.others, "target").secret,
                peers=keys_of(keyed.ours, "target").peers,
            )
            for keys in (wrong, None):
                assert_kept_out(keyed, keys)
            assert_nonsense_is_counted(keyed)
        assert_same(reference, *zip(*beside, strict=True))
        rounds, after = counter.since(), keyed.state()
        assert_drafting("self", rounds)
        assert "drafter_down" not in rounds.plain_decode
        for name in ("restarts", "drafter_pid"):
            assert after[name] == before[name]
        for name in ("malformed", "refused"):
            assert after["wire"][name] == before["wire"][name], "the target heard of nothing"
        for line in refused_lines().values():
            assert_once_an_interval(log.read_text(), line, start)
        assert_drained(server)


def assert_kept_out(keyed: Keyed, keys: KeyFiles | None) -> None:
    """Somebody asks and is not answered."""
    refused = keyed.refused_by_drafter()["key"]
    with stranger(keyed.server.drafter_endpoint(), keys) as peer:
        peer.send_multipart(encode(StatusRequest()))
        wait_until(lambda: keyed.refused_by_drafter()["key"] > refused, "a refusal")
        assert not peer.poll(0)


def assert_nonsense_is_counted(keyed: Keyed) -> None:
    """By cause, each message once, beside what the honest target asked before its hello."""
    before = keyed.refused_by_drafter()
    endpoint, keys = keyed.server.drafter_endpoint(), keyed.server.drafter_keys()
    expected: Counter[str] = Counter()
    with ExitStack() as peers:
        for _ in range(NUM_STRANGERS):
            expected += talk_nonsense(peers.enter_context(stranger(endpoint, keys)))
        told = before + expected
        wait_until(lambda: keyed.refused_by_drafter() >= told, f"refusals: {expected}")
    added = keyed.refused_by_drafter() - before
    added.pop("key", None)  # of who came before
    assert added == expected
