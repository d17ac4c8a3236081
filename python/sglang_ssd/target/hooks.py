"""The drafter's life in SGLang's scheduler process: start, connection, closes, state, reload.

One scheduler process serves one target, so the drafter's handle and client of that process live
here, between the hook that starts the drafter (before the target's weights load) and the worker
that connects to it. Each hook names the SGLang function it is registered on.
"""

from __future__ import annotations

import atexit
import functools
import logging
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_device, get_observability, get_parallel

from sglang_ssd.config import SsdConfig, load_config
from sglang_ssd.drafter.process import (
    make_endpoint,
    remove_endpoint,
    settings_for_target,
    start_drafter,
)
from sglang_ssd.platform.cpu import drafter_cores
from sglang_ssd.target import http_routes
from sglang_ssd.target.algorithm import is_ssd
from sglang_ssd.target.draft_client import DraftClient
from sglang_ssd.target.handshake import connect
from sglang_ssd.target.metrics import MetricsExporter
from sglang_ssd.target.reload import ReloadRequest, reload_drafter
from sglang_ssd.target.reporting import RoundReporter
from sglang_ssd.target.stats import summarize
from sglang_ssd.target.supervisor import DrafterSupervisor, Reload, RestartPace
from sglang_ssd.trace import file_of_replica, start_file

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_ssd.trace import Tracer

logger = logging.getLogger(__name__)

_drafter: DrafterSupervisor | None = None
_client: DraftClient | None = None
_reporter: RoundReporter | None = None
_asked_reload: Reload | None = None
"""What has come of the reload that the question now answered asks for; None if it asks for none."""
_metric_labels: dict[str, str] | None = None
"""SGLang's own labels of this scheduler; None without --enable-metrics."""

NO_DRAFTER = {"state": "off", "reload": {"state": "failed", "error": "this server has no drafter"}}
"""The state with --ssd-mode off."""


def register_hooks() -> None:
    """Register every hook of this module; called once per process by the plugin."""
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    tokenizer = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    state = "sglang.srt.managers.scheduler_components.internal_state"
    before, after = HookType.BEFORE, HookType.AFTER
    HookRegistry.register(f"{scheduler}.init_tp_model_worker", start_before_target_loads, before)
    HookRegistry.register(f"{scheduler}.on_idle", close_when_idle, after)
    HookRegistry.register(
        "sglang.srt.mem_cache.common.release_kv_cache", close_released_request, after
    )
    HookRegistry.register(f"{tokenizer}.__init__", http_routes.add_routes, after)
    controller = f"{state}.SchedulerInternalStateController"
    HookRegistry.register(f"{controller}._add_speculative", add_ssd_state, after)
    HookRegistry.register(f"{controller}.get_internal_state", reload_if_asked, before)


def start_before_target_loads(scheduler: Scheduler) -> None:
    """Rank 0 starts its drafter, so that both models load at the same time."""
    global _drafter, _metric_labels
    if not is_ssd() or get_parallel().tp_rank != 0:
        return
    if scheduler.metrics_collector is not None:
        _metric_labels = dict(scheduler.metrics_collector.labels)
    config = replica_config()
    if config.trace is not None:
        start_file(config.trace)  # before the drafter, which adds to it
    if config.mode == "off" or config.endpoint is not None:
        return
    settings = settings_for_target(
        scheduler.server_args,
        msgspec.structs.replace(config, endpoint=make_endpoint()),
        target_device=get_device().device,
        cores=drafter_cores(config),
        gpu_id=get_device().gpu_id,
    )
    _drafter = DrafterSupervisor(
        functools.partial(start_drafter, config=config),
        settings,
        RestartPace(
            delay_s=config.restart_delay_s,
            delay_max_s=config.restart_delay_max_s,
            healthy_s=config.restart_healthy_s,
            start_timeout_s=config.start_timeout_s,
        ),
    )
    _drafter.start()
    atexit.register(_end_drafter, _drafter)


def replica_config() -> SsdConfig:
    """The settings, as they hold for this data-parallel replica."""
    config = load_config()
    if config.trace is None:
        return config
    trace = file_of_replica(config.trace, dp_rank=_dp_rank(), dp_size=get_parallel().dp_size)
    return msgspec.structs.replace(config, trace=trace)


def _dp_rank() -> int:
    """SGLang's is None without data parallelism."""
    return get_parallel().dp_rank or 0


def _end_drafter(drafter: DrafterSupervisor) -> None:
    drafter.stop()
    remove_endpoint(drafter.endpoint)


def connect_client(
    *,
    server_args: Any,
    config: SsdConfig,
    model_config: Any,
    tokenizer: Any,
    num_steps: int,
    tracer: Tracer,
) -> DraftClient | None:
    """The client of this process's drafter, handshake done; None with drafts off.

    Raises RuntimeError with the drafter's reason if it does not come up within start_timeout_s.
    """
    global _client
    if config.mode == "off":
        return None
    _client = connect(
        drafter=_drafter,
        config=config,
        vocab_size=model_config.vocab_size,
        context_len=model_config.context_len,
        tokenizer=tokenizer,
        num_steps=num_steps,
        tracer=tracer,
    )
    return _client


def make_reporter(client: DraftClient) -> RoundReporter:
    """What tells of this process's rounds; made after the spawn, as metrics.py asks for."""
    global _reporter
    exporter = None if _metric_labels is None else MetricsExporter(_metric_labels)
    _reporter = RoundReporter(
        client, exporter=exporter, log_interval=get_observability().decode_log_interval
    )
    return _reporter


def close_when_idle(result: None, scheduler: Scheduler) -> None:
    """on_idle polls while the server has no batch; a server that is wholly idle mirrors nothing."""
    if _client is not None and scheduler.is_fully_idle():
        _client.note_idle()
    if _reporter is not None:
        _reporter.note_idle()


def close_released_request(result: None, req: Any, *args: Any, **kwargs: Any) -> None:
    """Finish, abort, retraction and preemption all release the request's KV."""
    if _client is not None:
        _client.close(req.rid)


def add_ssd_state(result: None, controller: Any, state: dict[str, Any]) -> None:
    """/server_info and Engine.get_server_info() show the drafter's state under "ssd"."""
    if is_ssd():
        state["ssd"] = {"dp_rank": _dp_rank(), **_ssd_state()}


def _ssd_state() -> dict[str, Any]:
    if _client is None:
        return NO_DRAFTER
    _client.look()
    _client.request_status()  # notices if nobody is there
    state = {**summarize(_client.stats), **drafter_state(_client, _drafter)}
    if _asked_reload is not None:
        state["reload"] = msgspec.to_builtins(_asked_reload)
    return state


def reload_if_asked(controller: Any, recv_req: Any) -> None:
    """POST /ssd/reload_drafter; the asker is told of his own, later of how the last one goes."""
    global _asked_reload
    _asked_reload = None
    if _client is None or not (recv_req.rid or "").startswith(http_routes.RELOAD_PREFIX):
        return
    asked = msgspec.json.decode(
        recv_req.rid.removeprefix(http_routes.RELOAD_PREFIX), type=ReloadRequest
    )
    if _drafter is not None:
        _asked_reload = reload_drafter(_drafter, asked)


def drafter_state(client: DraftClient, drafter: DrafterSupervisor | None) -> dict[str, Any]:
    """How the drafter fares, beside the counters; `drafter` is None if another started it."""
    welcome, status = client.link.welcome, client.drafter_status
    return {
        "state": client.state,
        "live_sequences": client.num_live,
        "reply_deadline_ms": round(1000 * client.deadline_s, 3),
        "wire": msgspec.to_builtins(client.transport_stats),
        "drafter_refused": status and status.refused,
        "drafter_pid": drafter.pid if drafter is not None else welcome and welcome.drafter_pid,
        "drafter_alive": drafter.alive() if drafter is not None else None,
        "drafter_model": drafter.model_path if drafter is not None else None,
        "restarts": client.num_restarts,
        "last_error": (drafter.last_error if drafter is not None else "") or client.link.last_error,
        "reload": _reload_state(client, drafter),
    }


def _reload_state(client: DraftClient, drafter: DrafterSupervisor | None) -> dict[str, Any]:
    if drafter is None:
        error = "the drafter was not started by this server: start another one at its endpoint"
        return {"state": "failed", "error": error}
    return msgspec.to_builtins(drafter.reload) or {"state": "none"}
