"""What POST /ssd/reload_drafter may ask for, and what its asker is told.

Several may ask at the same time. Each is told the number of his exchange, or why there is none; the
supervisor keeps the state of the last one that was begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from sglang_ssd.drafter.process import check_model
from sglang_ssd.target.supervisor import DrafterSupervisor, Reload

Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00]+\Z")]
"""What a command line can carry."""


class ReloadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /ssd/reload_drafter. Left out: what the drafter was started with."""

    model_path: Text | None = None
    revision: Text | None = None


def reload_drafter(drafter: DrafterSupervisor, asked: ReloadRequest) -> Reload:
    """Ask for it, unless the checkpoint can be seen to be none from here."""
    settings = drafter.settings
    if asked.model_path is not None:
        settings = msgspec.structs.replace(
            settings, model_path=asked.model_path, revision=asked.revision
        )
    elif asked.revision is not None:
        settings = msgspec.structs.replace(settings, revision=asked.revision)
    try:
        check_model(settings)
    except ValueError as error:
        return drafter.refuse_reload(settings.model_path, str(error))
    return drafter.ask_reload(settings)


def is_superseded(answers: Sequence[dict[str, Any]], replicas: Sequence[dict[str, Any]]) -> bool:
    """Whether a later exchange took the place of the one of these answers, in any replica."""

    def latest(states: Sequence[dict[str, Any]]) -> int:
        return max((state["reload"].get("number", 0) for state in states), default=0)

    return latest(replicas) > latest(answers)
