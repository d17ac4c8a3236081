"""One request as the target's DraftClient mirrors it: its ids, and how far the drafter is told."""

from __future__ import annotations

from array import array

from sglang_ssd.wire.messages import DraftRule, Served

_FULL_S = 2.0
_MOST_DOUBLINGS = 4


class DraftSequence:
    """One request that the drafter mirrors, or will when it is there."""

    __slots__ = (
        "acked_len",
        "drafts",
        "full_until",
        "generation",
        "has_caught_up",
        "is_being_read",
        "is_synced",
        "num_refusals",
        "reply_len",
        "rid",
        "rule",
        "served",
        "tokens",
        "told_len",
        "was_told",
    )

    def __init__(self, *, rid: str, rule: DraftRule, tokens: array[int]) -> None:
        self.rid = rid
        self.generation = 0
        self.rule = rule
        self.tokens = tokens  # all committed ids, the bonus included
        self.is_synced = False  # whether this drafter was told of it
        self.was_told = False  # whether any was
        self.has_caught_up = True  # whether its replies are worth a wait
        self.is_being_read = False  # its prompt is, or has just been, and drafts follow
        self.full_until = 0.0  # when a drafter that had no room is asked again
        self.num_refusals = 0
        self.acked_len = len(tokens)
        self.told_len = len(tokens)  # committed length that the drafter was last told of
        self.reply_len = -1  # committed length that `drafts` continue
        self.drafts: list[int] = []
        self.served: Served = "none"

    def note_full(self, now: float) -> None:
        """The drafter has no room for it: another try after 2, 4, 8, .. seconds."""
        self.is_synced = False
        self.full_until = now + _FULL_S * 2 ** min(self.num_refusals, _MOST_DOUBLINGS)
        self.num_refusals += 1

    @property
    def is_answered(self) -> bool:
        return self.reply_len == len(self.tokens)

    @property
    def awaits_reply(self) -> bool:
        """Whether a reply is owed that is worth a wait."""
        is_told = self.is_synced and self.told_len == len(self.tokens)
        return is_told and self.has_caught_up and not self.is_answered
