"""Every kind of fault once over real sockets and processes; only the target's model is pretended.

A thread plays the scheduler: it knows the texts, accepts what agrees with them, and takes a moment
for every verify. The client, the link, the proxy, the supervisor and the drafter are the real ones.
"""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import psutil
import pytest

from faults.chaos import (
    WEIGHTS,
    Chaos,
    Drafter,
    Fault,
    Leftovers,
    Result,
    ask_status,
    schedule,
)
from faults.proxy import FaultyProxy
from sglang_ssd.target.draft_client import DraftClient
from sglang_ssd.target.reply_deadline import ReplyDeadline
from sglang_ssd.wire.messages import SCHEMA_VERSION, DraftRule, Hello
from sglang_ssd.wire.transport import TargetSocket

VOCAB_SIZE = 997
NUM_STEPS = 4
PROMPT_LEN = 20
VERIFY_S = 0.02


class PretendedTarget:
    """Rounds over known texts in a thread of its own, until stopped."""

    def __init__(self, endpoint: str, texts: list[list[int]]) -> None:
        hello = Hello(SCHEMA_VERSION, "pretended", NUM_STEPS, VOCAB_SIZE, [], False)
        self.client = DraftClient(
            TargetSocket(endpoint),
            hello=hello,
            deadline=ReplyDeadline(least_s=0.05, most_s=0.2),
            resync_tokens=400,
        )
        self._texts = {f"r{index}": text for index, text in enumerate(texts)}
        self._lens: dict[str, int] = {}
        self._stopping = False
        self.num_finished = 0
        self.thread = threading.Thread(target=self._run, daemon=True)

    def stop(self) -> None:
        self._stopping = True
        self.thread.join(10)

    def _run(self) -> None:
        while not self._stopping:
            for rid in [rid for rid in self._texts if rid not in self._lens]:
                self._lens[rid] = PROMPT_LEN
                tokens = self._texts[rid][:PROMPT_LEN]
                self.client.open(rid=rid, tokens=tokens, rule=DraftRule())
            self._round(list(self._lens))
        for rid in list(self._lens):
            self.client.close(rid)
        self.client.note_idle()
        self.client.look(0.1)
        self.client.stop()

    def _round(self, rids: list[str]) -> None:
        drafts = self.client.collect(rids)
        time.sleep(VERIFY_S)
        new_tokens = [self._verify(rid, row) for rid, row in zip(rids, drafts, strict=True)]
        num_verified = [len(row) for row in drafts]
        self.client.commit(rids=rids, new_tokens=new_tokens, num_verified=num_verified)
        for rid in [rid for rid in rids if self._lens[rid] == len(self._texts[rid])]:
            self.client.close(rid)
            del self._lens[rid]
            self.num_finished += 1

    def _verify(self, rid: str, drafts: list[int]) -> list[int]:
        ahead = self._texts[rid][self._lens[rid] :]
        correct = 0
        while correct < min(len(drafts), len(ahead) - 1) and drafts[correct] == ahead[correct]:
            correct += 1
        self._lens[rid] += correct + 1
        return ahead[: correct + 1]


def test_hits_come_back_after_every_kind_of_fault(tmp_path: Path) -> None:
    """Red when a part of the wire does not get over a fault, or leaves a sequence or a process."""
    rng = random.Random(0)
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(150)] for _ in range(8)]
    table = tmp_path / "table.json"
    table.write_text(json.dumps(texts))
    front, back = f"ipc://{tmp_path}/front", f"ipc://{tmp_path}/back"
    drafter = Drafter(back, table, VOCAB_SIZE)
    proxy = FaultyProxy(front, back)
    target = PretendedTarget(front, texts)
    target.thread.start()
    try:
        deadline = time.monotonic() + 60
        while not target.client.stats.hits and time.monotonic() < deadline:
            time.sleep(0.05)
        drafter.supervisor.note_ready(drafter.supervisor.pid)
        chaos = Chaos(lambda: target.client.stats.hits, proxy, drafter, seed=0)
        outcomes = [chaos.inflict(Fault(kind, 0.4)) for kind in WEIGHTS]
        target.stop()
        assert [one.kind for one in outcomes] == list(WEIGHTS)
        stats = target.client.stats
        assert stats.rows == stats.hits + stats.misses + sum(stats.plain_decode.values())
        assert target.num_finished > 0
        held = ask_status(back, until=lambda status: status.live_sequences == 0)
        assert (held.live_sequences, held.free_slots) == (0, held.total_slots)
    finally:
        target.stop()
        proxy.stop()
        drafter.supervisor.stop()
    assert not any(psutil.pid_exists(pid) for pid in drafter.pids)


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_has_every_kind_and_its_kills(seed: int) -> None:
    """Red when a seed leaves a kind of fault out, or a long run has fewer kills than it claims."""
    kinds = [fault.kind for fault in schedule(200, seed)]
    assert len(kinds) == 200
    assert kinds.count("kill") >= 30
    first = [fault.kind for fault in schedule(len(WEIGHTS), seed)]
    assert sorted(first) == sorted(WEIGHTS)
    assert kinds[: len(WEIGHTS)] != list(WEIGHTS), "always in the same order"
    assert [len(schedule(num, seed)) for num in (1, 2, 8, 16)] == [1, 2, 8, 16]


@pytest.mark.parametrize("num_rows", [11, 12, 13])
def test_every_row_of_a_run_is_counted_once(num_rows: int) -> None:
    """Red when a run passes in which a fault had rows forgotten, or counted twice."""
    rows = {"hits": 9, "misses": 1, "plain: late": 2}
    result = Result(
        outcomes=[],
        num_answers=1,
        different=[],
        num_different=0,
        lost=[],
        rows=rows,
        num_rows=num_rows,
        hit_share=0.75,
        leftovers=Leftovers(0, 0, 0, 0, 0),
        seconds=1.0,
    )
    wrong = [f"{rows} are not all of {num_rows} rows"] if num_rows != 12 else []
    assert result.failures() == wrong
