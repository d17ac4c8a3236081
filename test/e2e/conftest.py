"""Fixtures of the end-to-end tests: the checkpoints, the servers, and the figures of a run.

Servers are shared: a test asks the pool for a spec and gets the running server if there is one.
The reference servers have pools of their own, so that a switch
of the server under test leaves them alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import DrafterKind, find_target, make_drafter
from harness.reference import Reference, plain_reference
from harness.server import ServerPool, ServerSpec
from harness.size import Size, chosen_size

pytest.importorskip("sglang", reason="the end-to-end tests need sglang")

FIGURES_ENV = "SSD_E2E_FIGURES"
"""Environment variable: path of a JSON file that receives the figures of the run."""

EVERY_CHANGE = frozenset(
    {
        "test_bad_input.py",
        "test_bad_requests.py",
        "test_clients.py",
        "test_compat.py",
        "test_greedy_identity.py",
        "test_soak.py",
        "test_stops_of_a_run.py",
    }
)
"""Files whose tests run for every change although they need servers: these few share them."""
SERVERS = frozenset({"pool", "reference_pool"})

Figures = dict[str, Any]
SpecFor = Callable[..., ServerSpec]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow: ./run-tests leaves it out, ./run-tests -m slow runs it.

    A server takes a minute to start on two cores, so a test is slow if it asks for one of a pool
    and its file is not in EVERY_CHANGE. What asks for none runs for every change, in whichever
    file it stands; if it takes long all the same, as by starting servers of its own, it is marked
    where it stands.
    """
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.model)
            needs_server = SERVERS & set(getattr(item, "fixturenames", ()))
            if needs_server and item.path.name not in EVERY_CHANGE:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def size() -> Size:
    return chosen_size()


@pytest.fixture(scope="session")
def target() -> Path:
    found = find_target()
    if found is None:
        pytest.skip("no checkpoint: run ./run-tests once, or name one in SSD_TEST_MODEL")
    return found


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """The servers under test."""
    servers = ServerPool(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop_all()


@pytest.fixture(scope="session")
def reference_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """The servers whose answers are right by definition; some tests ask two kinds in turn."""
    servers = ServerPool(tmp_path_factory.mktemp("references"), max_live=2)
    yield servers
    servers.stop_all()


@pytest.fixture(scope="session")
def spec_for(target: Path) -> SpecFor:
    """Spec of a server with SSD by drafter kind; other arguments as in ServerSpec."""

    def make(kind: DrafterKind, **fields: Any) -> ServerSpec:
        drafter = make_drafter(kind, target)
        return ServerSpec(model=str(target), drafter=str(drafter), **fields)

    return make


@pytest.fixture(scope="session")
def reference(target: Path, reference_pool: ServerPool) -> Reference:
    """The server without speculation."""
    return plain_reference(reference_pool, target)


@pytest.fixture(scope="session")
def drafts_off(target: Path, reference_pool: ServerPool) -> Reference:
    """The server that samples by shared noise but has no drafter."""
    spec = ServerSpec(model=str(target), drafter=str(target), settings=(("mode", "off"),))
    return Reference(reference_pool, spec)


@pytest.fixture(scope="session")
def all_figures() -> Iterator[dict[str, Figures]]:
    figures: dict[str, Figures] = {}
    yield figures
    if os.environ.get(FIGURES_ENV):
        Path(os.environ[FIGURES_ENV]).write_text(json.dumps(figures, indent=2))


@pytest.fixture
def figures(request: pytest.FixtureRequest, all_figures: dict[str, Figures]) -> Figures:
    """What this test measured; printed by the acceptance run."""
    return all_figures.setdefault(request.node.name, {})
