"""Which requests the drafter is told of, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ssd.target.worker import SSDWorker
from sglang_ssd.wire.messages import MAX_RID_CHARS

PROMPT = [5, 6, 7]


class ClientSpy:
    """What a DraftClient was asked to do."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.declined: dict[str, str] = {}

    def knows(self, rid: str) -> bool:
        return rid in self.opened or rid in self.declined

    def open(self, *, rid: str, tokens: Any, rule: Any) -> None:
        assert list(tokens) == PROMPT
        self.opened.append(rid)

    def decline(self, rid: str, cause: str) -> None:
        self.declined[rid] = cause


def request(max_new_tokens: int | None, *, rid: str = "a", num_output: int = 0) -> Req:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0, custom_params=None)
    params.normalize(None)
    req = Req(rid, "", PROMPT, params, vocab_size=100)
    req.output_ids.extend([1] * num_output)
    req.full_untruncated_fill_ids = PROMPT
    return req


@pytest.fixture
def worker() -> Any:
    worker: Any = SSDWorker.__new__(SSDWorker)
    worker._target_worker = SimpleNamespace(random_seed=0)
    return worker


@pytest.mark.parametrize(
    ("req", "cause"),
    [
        (request(0), "ending"),
        (request(1), "ending"),
        (request(2), None),
        (request(None), None),
        (request(5, num_output=4), "ending"),
        (request(5, num_output=3), None),
        (request(9, rid="r" * MAX_RID_CHARS), None),
        (request(9, rid="r" * (MAX_RID_CHARS + 1)), "parameter"),
    ],
    ids=[
        *("no-token", "one-token", "two-tokens", "no-limit"),
        *("retracted-before-its-last", "retracted", "longest-name", "name-too-long"),
    ],
)
def test_only_who_may_use_a_draft_opens_a_sequence(
    worker: Any, req: Req, cause: str | None
) -> None:
    """Red when scoring and health checks, which end with their prompt, occupy the drafter."""
    client = ClientSpy()
    worker._open_sequences(client, [req])
    worker._open_sequences(client, [req])
    assert client.opened == ([] if cause else [req.rid])
    assert client.declined == ({req.rid: cause} if cause else {})
