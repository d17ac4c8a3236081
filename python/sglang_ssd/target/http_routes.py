"""GET /ssd/status and POST /ssd/reload_drafter on SGLang's own HTTP server.

They run in the HTTP process; the drafter belongs to a scheduler process. A GetInternalStateReq of
SGLang carries the question there and the state back, for every replica; a reload travels as its
`rid`, the one text that the message has. The answers come in any order and say whose they are.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from sglang.srt.managers.io_struct import GetInternalStateReq
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_ssd.config import load_config
from sglang_ssd.target.algorithm import is_ssd
from sglang_ssd.target.reload import ReloadRequest, failure_text, is_superseded, outcomes

RELOAD_PREFIX = "ssd-reload:"
"""Begins the rid of a GetInternalStateReq that asks for a reload; ReloadRequest as JSON follows."""

STATES = ("ready", "off", "degraded", "starting", "restarting", "dead", "refused")
"""States of a drafter, best first; a server of several replicas is in the worst of theirs."""

_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_POLL_S = 0.5
_EXCHANGE_S = 15.0
"""To end the drafter before, and one that hangs, beyond the time that a start may take."""


def add_routes(result: None, manager: Any, *args: Any, **kwargs: Any) -> None:
    """After TokenizerManager.__init__: the HTTP process is the one that has SGLang's app."""
    if not is_ssd():
        return
    module = sys.modules.get(_HTTP_SERVER)
    if module is not None and not any(_is_ours(route) for route in module.app.routes):
        _add_to(module.app, manager)


def _is_ours(route: Any) -> bool:
    return getattr(route, "path", "").startswith("/ssd/")


def _add_to(app: FastAPI, manager: Any) -> None:
    async def ssd_status() -> JSONResponse:
        return JSONResponse(overview(await _ask(manager)))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def ssd_reload_drafter(request: Request) -> JSONResponse:
        return await _reload(manager, await request.body())

    app.add_api_route("/ssd/status", ssd_status, methods=["GET"])
    app.add_api_route("/ssd/reload_drafter", ssd_reload_drafter, methods=["POST"])


def overview(replicas: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst state, and every replica's."""
    worst = max((STATES.index(replica["state"]) for replica in replicas), default=1)
    return {"state": STATES[worst], "replicas": replicas}


async def _reload(manager: Any, body: bytes) -> JSONResponse:
    """Answers when it is known of every replica whether the new drafter serves."""
    try:
        request = msgspec.json.decode(body or b"{}", type=ReloadRequest)
    except msgspec.MsgspecError as error:
        return _answer(400, f"body of /ssd/reload_drafter: {error}; known are model_path, revision")
    asked = await _ask(manager, RELOAD_PREFIX + msgspec.json.encode(request).decode())
    replicas = asked
    deadline = time.monotonic() + load_config().start_timeout_s + _EXCHANGE_S
    while _any_reload(replicas, "loading") and time.monotonic() <= deadline:
        await asyncio.sleep(_POLL_S)
        replicas = outcomes(asked, await _ask(manager))
        if is_superseded(asked, replicas):
            return _answer(409, "another reload took its place; /ssd/status tells how that goes on")
    if _any_reload(replicas, "failed"):
        return _answer(400, failure_text(replicas))
    if _any_reload(replicas, "loading"):
        return _answer(504, "the drafter is still loading; /ssd/status tells how it goes on")
    return JSONResponse(overview(replicas))


def _any_reload(replicas: list[dict[str, Any]], state: str) -> bool:
    return any(replica["reload"]["state"] == state for replica in replicas)


async def _ask(manager: Any, rid: str | None = None) -> list[dict[str, Any]]:
    """The drafter's state in every replica, by dp_rank."""
    manager.auto_create_handle_loop()
    answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=rid))
    states = [answer.internal_state["ssd"] for answer in answers]
    return sorted(states, key=lambda state: state["dp_rank"])


def _answer(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)
