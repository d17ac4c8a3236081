"""What POST /ssd/reload_drafter may ask for, and what its asker is told.

Several may ask at the same time. Each is told the number of his exchange, or why there is none; the
supervisor keeps the state of the last one that was begun. Data-parallel replicas exchange their
drafters each for itself: some may do so and others fail, and then nothing is undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from sglang_ssd.drafter.process import check_model
from sglang_ssd.target.supervisor import DrafterSupervisor, Reload

Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00]+\Z")]
"""What a command line can carry."""

_NO_FAILURE = {"done": "serves the new model", "loading": "is still loading it"}


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


def outcomes(
    asked: Sequence[dict[str, Any]], replicas: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What has become of one asker's exchange: the answers to him, and later states, by dp_rank.

    A refusal stays what it was: those states tell of exchanges that were begun.
    """
    return [
        answer if answer["reload"]["state"] == "failed" else state
        for answer, state in zip(asked, replicas, strict=True)
    ]


def is_superseded(asked: Sequence[dict[str, Any]], replicas: Sequence[dict[str, Any]]) -> bool:
    """Whether a later exchange took the place of the one of these answers, in any replica."""
    return any(
        state["reload"].get("number", 0) > answer["reload"].get("number", 0)
        for answer, state in zip(asked, replicas, strict=True)
    )


def failure_text(replicas: Sequence[dict[str, Any]]) -> str:
    """Why which of them did not take the model, each reason once, and which of them did."""
    ranks: dict[str, list[str]] = {}
    for replica in sorted(replicas, key=lambda replica: replica["reload"]["state"] != "failed"):
        reload = replica["reload"]
        text = _NO_FAILURE.get(reload["state"]) or reload["error"]
        ranks.setdefault(text, []).append(str(replica["dp_rank"]))
    if len(replicas) == 1:
        return next(iter(ranks))
    return "; ".join(f"dp_rank {', '.join(of)}: {text}" for text, of in ranks.items())
