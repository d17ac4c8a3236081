"""How one verify ended: the key of the speculation cache (paper, Definition 4)."""

import msgspec


class Outcome(msgspec.Struct, frozen=True, order=True):
    """num_correct_drafts of the round's drafts were right, then the target chose bonus_token."""

    num_correct_drafts: int
    bonus_token: int
