"""The settings that SGLang has no flag for: one strict, typed config that reaches every process.

It travels in the environment variable SGLANG_SSD_CONFIG (a JSON object or the path of one), which
every process of an SGLang server inherits. `launch_server` builds it from --ssd-* flags. What the
struct alone can tell is refused by `load_config`; what depends on num_steps or on the machine by
`validate`. Both name every wrong setting at once, as its flag.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

CONFIG_ENV = "SGLANG_SSD_CONFIG"
"""Environment variable that carries the config: JSON text, or the path of a JSON file."""

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class SsdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields in the order of --help; each has a --ssd-* flag of the same name."""

    mode: Literal["async", "sync", "off"] = "async"
    """async: SSD. sync: ordinary speculation, same drafter. off: plain decode, no drafter."""
    backup: Literal["jit", "none"] = "jit"
    """Serves a missed row: jit drafts it while the batch waits, none decodes it plainly."""

    fan_out: list[Annotated[int, msgspec.Meta(ge=0)]] = msgspec.field(default_factory=lambda: [3])
    """Bonus guesses per accept position: one number for all K+1 positions, or K+1 numbers."""
    fan_out_policy: Literal["uniform", "geometric"] = "uniform"
    """uniform: fan_out as given. geometric: Theorem 12 over the same number of branches."""
    acceptance_rate: Share = 0.8
    power_law_exponent: Positive = 1.0

    endpoint: str | None = None
    """None: start a drafter on a fresh ipc:// endpoint; else connect to the one that listens there."""
    reply_deadline_ms: Positive = 500.0
    start_timeout_s: Positive = 180.0
    lease_s: Positive = 10.0

    drafter_device: str = "auto"
    drafter_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    drafter_max_total_tokens: PositiveInt | None = None
    drafter_max_sequences: PositiveInt | None = None
    drafter_mem_fraction: Share = 0.8
    drafter_context_length: PositiveInt | None = None
    prefill_slice_tokens: PositiveInt = 256

    target_cores: str = "auto"
    drafter_cores: str = "auto"

    allow_padded_vocab: bool = False
    trace: str | None = None


def load_config(env: Mapping[str, str] = os.environ) -> SsdConfig:
    """The config of SGLANG_SSD_CONFIG, or the defaults; ValueError with every reason at once."""
    text = env.get(CONFIG_ENV, "").strip()
    if not text:
        return SsdConfig()
    if not text.startswith("{"):
        text = _read_file(text)
    try:
        settings = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{CONFIG_ENV} must be a JSON object or the path of one: {error}"
        ) from error
    return build_config(settings)


def dump_config(config: SsdConfig) -> str:
    """JSON text for SGLANG_SSD_CONFIG; load_config gives the same config back."""
    return msgspec.json.encode(config).decode()


def build_config(settings: Mapping[str, Any]) -> SsdConfig:
    """A config from names and values; ValueError with every wrong one and what is allowed."""
    fields = {field.name: field for field in msgspec.structs.fields(SsdConfig)}
    reasons, values = [], {}
    for name, value in settings.items():
        if name not in fields:
            known = ", ".join(flag_name(field) for field in fields)
            reasons.append(f"{flag_name(name)}: no such setting; there are {known}")
            continue
        try:
            values[name] = msgspec.convert(value, type=fields[name].type)
        except msgspec.ValidationError:
            reasons.append(_reason(name, value))
            continue
        if isinstance(values[name], float) and not math.isfinite(values[name]):
            reasons.append(_reason(name, value))
    if reasons:
        raise ValueError("Wrong SSD settings:\n  " + "\n  ".join(reasons))
    return SsdConfig(**values)


def validate(config: SsdConfig, num_steps: int) -> list[str]:
    """Reasons against this config for K = num_steps on this machine; empty if there are none."""
    reasons = []
    fan_out = config.fan_out
    if len(fan_out) not in (1, num_steps + 1):
        reasons.append(
            f"{flag_name('fan_out')} {_shown(fan_out)}: {len(fan_out)} numbers; allowed is one, "
            f"or {num_steps + 1} of them (--speculative-num-steps + 1)"
        )
    if fan_out and not any(fan_out):
        reasons.append(
            f"{flag_name('fan_out')} {_shown(fan_out)}: all zero; one at least must be positive"
        )
    if config.endpoint is not None and not _is_local_endpoint(config.endpoint):
        reasons.append(
            f"{flag_name('endpoint')} {config.endpoint!r}: allowed are ipc://PATH and "
            f"tcp://HOST:PORT with a loopback host ({', '.join(LOOPBACK_HOSTS)})"
        )
    if config.trace is not None and not Path(config.trace).absolute().parent.is_dir():
        reasons.append(f"{flag_name('trace')} {config.trace!r}: must lie in an existing folder")
    return reasons


def flag_name(field: str) -> str:
    return "--ssd-" + field.replace("_", "-")


def allowed_values(field: str) -> str:
    """What a setting may be, in words; --help and every refusal say the same."""
    types = {info.name: info.type for info in msgspec.structs.fields(SsdConfig)}
    return _describe(msgspec.inspect.type_info(types[field]))


def _describe(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case msgspec.inspect.UnionType(types=types):
            described = [_describe(part) for part in types if not _is_none(part)]
            return " or ".join(described) + ", or left out"
        case msgspec.inspect.ListType(item_type=item):
            return f"a list, each {_describe(item)}"
        case msgspec.inspect.FloatType(gt=gt, lt=lt):
            return "a number" + _bounds(gt=gt, ge=None, lt=lt)
        case msgspec.inspect.IntType(gt=gt, ge=ge, lt=lt):
            return "a whole number" + _bounds(gt=gt, ge=ge, lt=lt)
        case msgspec.inspect.BoolType():
            return "true or false"
        case _:
            return "a text"


def _is_none(info: msgspec.inspect.Type) -> bool:
    return isinstance(info, msgspec.inspect.NoneType)


def _bounds(*, gt: float | None, ge: float | None, lt: float | None) -> str:
    if gt is not None and lt is not None:
        return f" between {gt:g} and {lt:g}, both excluded"
    if gt is not None:
        return f" above {gt:g}"
    return f" of at least {ge:g}" if ge is not None else ""


def _reason(name: str, value: object) -> str:
    return f"{flag_name(name)} {_shown(value)}: must be {allowed_values(name)}"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return repr(value) if isinstance(value, str) else str(value)


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{CONFIG_ENV} must be a JSON object or the path of one; {path!r}: {error}"
        ) from error


def _is_local_endpoint(endpoint: str) -> bool:
    if endpoint.startswith("ipc://"):
        return len(endpoint) > len("ipc://")
    try:
        parts = urlsplit(endpoint)
        return parts.scheme == "tcp" and parts.hostname in LOOPBACK_HOSTS and parts.port is not None
    except ValueError:
        return False
