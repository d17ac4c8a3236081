"""The servers of the field cases: one for each drafter, shared by all of them.

The tests are put in an order in which each server starts once: a drafter's cases on its shared
server, those that strike the drafter, the one that changes it for good, and those without overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import KINDS, DrafterKind, make_broken, make_drafter
from harness.server import OVERLAP, Server, ServerPool, ServerSpec

NUM_STEPS = 4
CHUNK = 16
SHARED: dict[str, Any] = {
    "num_steps": NUM_STEPS,
    "flags": (
        *("--chunked-prefill-size", str(CHUNK)),
        "--enable-metrics",
    ),
    "settings": (("allow_padded_vocab", True), *OVERLAP),
}
TURNS = ("server", "struck_server", "last_server", "serial_server")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [here in item.path.parents for item in items]
    sorted_ = iter(sorted((x for x, mine in zip(items, ours, strict=True) if mine), key=_turn))
    items[:] = [next(sorted_) if mine else item for item, mine in zip(items, ours, strict=True)]


def _turn(item: Any) -> tuple[int, int]:
    """Tests without a shared server come first."""
    turns = [turn for turn, name in enumerate(TURNS) if name in item.fixturenames]
    if not turns:
        return -1, 0
    return KINDS.index(item.callspec.params["kind"]), max(turns)


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> DrafterKind:
    drafter: DrafterKind = request.param
    return drafter


@pytest.fixture
def server(kind: DrafterKind, pool: ServerPool, spec_for: Any) -> Server:
    return pool.get(spec_for(kind, **SHARED))


@pytest.fixture
def struck_server(server: Server) -> Server:
    """The shared server, for a test that strikes its drafter and sees it come back."""
    return server


@pytest.fixture
def last_server(server: Server, pool: ServerPool) -> Iterator[Server]:
    """The shared server, for a test after which nobody may use it."""
    yield pool.take(server.spec)
    server.stop()


@pytest.fixture
def serial_server(kind: DrafterKind, target: Path, pool: ServerPool) -> Server:
    """Without overlap, as the reference: SGLang's own penalties lag under it.

    Its drafters are padded from the start, which the flag allows and which changes no draft.
    """
    padded = make_broken(make_drafter(kind, target), "padded")
    spec = ServerSpec(
        model=str(target),
        drafter=str(padded),
        settings=(("allow_padded_vocab", True),),
    )
    return pool.get(spec)
