"""What a session keeps of an ended turn: the tokens and the KV that plain decode would have left.

A run may go on behind a turn's end, and the last token of a run, the bonus, has no KV before the
next round. Plain decode has neither, and SGLang's sessions count on that.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ssd.target.algorithm import is_ssd


def register_hooks() -> None:
    """Register every hook of this module; called once per process by the plugin."""
    HookRegistry.register(
        "sglang.srt.session.session_controller.Session.create_req",
        forget_behind_the_end,
        HookType.BEFORE,
    )
    HookRegistry.register(
        "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
        forget_kv_of_the_last_token,
        HookType.AFTER,
    )


def forget_behind_the_end(session: Any, *args: Any, **kwargs: Any) -> None:
    """The next turn continues what the client has seen of this one."""
    if not is_ssd():
        return
    for node in session.req_nodes.values():
        end = node.req.finished_len
        if end is not None and end < len(node.req.output_ids):
            node.req.output_ids = node.req.output_ids_through_stop


def forget_kv_of_the_last_token(is_kept: bool, streaming_session: Any, req: Any) -> None:
    """The next turn computes the KV of this one's last token, which may be a bonus without any."""
    if not is_kept or not is_ssd() or not req.output_ids:
        return
    kv = streaming_session.slots[req.session.session_id].kv
    before_last = len(req.origin_input_ids) + len(req.output_ids) - 1
    kv.kv_committed_len = max(min(kv.kv_committed_len, before_last), kv.cache_protected_len)
