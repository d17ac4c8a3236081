"""Reply rows on their way out: rows of one commit that are ready together leave in one message."""

from __future__ import annotations

import msgspec

from sglang_ssd.wire.messages import Served, SpeculateReply
from sglang_ssd.wire.transport import DrafterTransport


class ReplyRow(msgspec.Struct, frozen=True):
    """One row of a SpeculateReply."""

    rid: str
    generation: int
    base_committed_len: int
    drafts: list[int]
    served: Served
    bonus_rank: int = -1


class Outbox:
    """Rows by target and round, until they are sent."""

    def __init__(self, transport: DrafterTransport) -> None:
        self._transport = transport
        self._rows: dict[tuple[bytes, int], list[ReplyRow]] = {}

    def add(self, peer: bytes, round_id: int, row: ReplyRow) -> None:
        self._rows.setdefault((peer, round_id), []).append(row)

    def send(self) -> None:
        for (peer, round_id), rows in self._rows.items():
            drafts = [token for row in rows for token in row.drafts]
            self._transport.send(peer, _reply(round_id, rows), [drafts])
        self._rows.clear()


def _reply(round_id: int, rows: list[ReplyRow]) -> SpeculateReply:
    return SpeculateReply(
        round_id=round_id,
        rids=[row.rid for row in rows],
        generations=[row.generation for row in rows],
        base_committed_lens=[row.base_committed_len for row in rows],
        num_drafts=[len(row.drafts) for row in rows],
        served=[row.served for row in rows],
        bonus_ranks=[row.bonus_rank for row in rows],
    )
