"""FR-37: a drafter whose ids mean other tokens stops the start, with sizes and the first such id.

At a reload the same comparison greets it.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from harness.checkpoints import Change, DrafterKind, make_broken, make_drafter
from harness.client import Request, generate_all
from harness.drafter_faults import (
    assert_ends_at_start,
    reload,
    stamp_of,
    status,
    wait_until_ready,
)
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server, ServerPool, ServerSpec

DRAFTER_READY = "sglang_ssd.drafter INFO ready at"
ENDS_WITHIN_S = 60
"""Of a server whose target and drafter have both loaded."""
FIRST_IDS: dict[Change, int] = {"swapped": 1500, "family": 1000}


def size_of(model: Path) -> int:
    size: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return size


@pytest.mark.parametrize("change", ["swapped", "family", "padded"])
def test_fr_37(kind: DrafterKind, change: Change, target: Path, pool: ServerPool) -> None:
    """Red when a wrong vocabulary is noticed late, or without what is wrong with it, or a server
    that has noticed it does not end."""
    wrong = make_broken(make_drafter(kind, target), change)
    says = ["the SSD drafter"]
    if change in FIRST_IDS:
        says.append(first_difference(change))
    if size_of(wrong) != size_of(target):
        sizes = f"vocabulary size {size_of(wrong)} of the drafter, {size_of(target)} of the target"
        says += [sizes, "--ssd-allow-padded-vocab"]
    spec = ServerSpec(model=str(target), drafter=str(wrong))
    log = assert_ends_at_start(pool, spec, *says)
    ended = datetime.now()
    met = max(stamp_of(text, log) for text in ("Load weight end", DRAFTER_READY))
    assert (ended - met).total_seconds() <= ENDS_WITHIN_S


def first_difference(change: Change) -> str:
    return f"first difference: id {FIRST_IDS[change]} is"


def test_fr_37_at_a_reload(kind: DrafterKind, struck_server: Server, target: Path) -> None:
    """Red when a drafter that is exchanged for a wrong one is not compared again, or serves on."""
    before = status(struck_server)["replicas"][0]["drafter_model"]
    for change in FIRST_IDS:
        wrong = make_broken(make_drafter(kind, target), change)
        answer = reload(struck_server, model_path=str(wrong))
        assert answer.status_code == 400, answer.text
        assert first_difference(change) in answer.json()["error"]["message"]
        wait_until_ready(struck_server)
        assert status(struck_server)["replicas"][0]["drafter_model"] == before


def test_fr_37_padded_with_the_flag(
    kind: DrafterKind, serial_server: Server, target: Path, reference: Reference
) -> None:
    """Red when padding that is allowed stops a start, or costs a token or the drafts."""
    assert size_of(Path(str(serial_server.spec.drafter))) > size_of(target)
    assert status(serial_server)["state"] == "ready"
    prompts = load_prompts(serial_server.spec.model, 6)
    cases = [Request(prompt.input_ids, {"max_new_tokens": 32}) for prompt in prompts]
    counter = RoundCounter(serial_server)
    answers = generate_all(serial_server.url, cases)
    assert_drafting(kind, counter.since())
    assert_same(reference, cases, answers)
