"""The settings that SGLang has no flag for: one strict, typed config that reaches every process.

It travels in the environment variable SGLANG_SSD_CONFIG (a JSON object or the path of one), which
every process of an SGLang server inherits. `launch_server` builds it from --ssd-* flags. What the
struct alone can tell is refused by `load_config`; what depends on num_steps or on the machine by
`validate`. Both name every wrong setting at once, as its flag.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from sglang_ssd.core.fan_out import fan_out_reasons
from sglang_ssd.wire.endpoints import ALLOWED_ENDPOINTS, endpoint_refusal, is_here
from sglang_ssd.wire.messages import MAX_NUM_STEPS as MAX_NUM_STEPS

CONFIG_ENV = "SGLANG_SSD_CONFIG"
"""Environment variable that carries the config: JSON text, or the path of a JSON file."""

ALGORITHM = "SSD"
"""Our name among SGLang's speculative algorithms."""

PLATFORM_ENV = "SGLANG_PLATFORM"
CPU_PLATFORM = "ssd_cpu"
"""Our platform's name in SGLang's variable, and that of its attention backend."""

DEFAULT_NUM_STEPS = 4

ALLOWED_TEXTS = {
    "endpoint": ALLOWED_ENDPOINTS,
    "secret_key": "a .key_secret file of python -m sglang_ssd.keys",
    "peer_keys": "a .key file of python -m sglang_ssd.keys",
    "drafter_device": "auto, cpu, cuda or cuda:N",
    "target_cores": "auto, or core numbers such as 0-2,5",
    "drafter_cores": "auto, or core numbers such as 0-2,5",
    "trace": "a file in an existing folder",
}
"""What those settings may be that are texts of a form of their own."""

Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class SettingsError(ValueError):
    """Settings that a user has to change; the message says which, and to what."""


def _help(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class SsdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields in the order of --help; each has a --ssd-* flag of the same name."""

    mode: Annotated[
        Literal["async", "sync", "off"],
        _help(
            "async: SSD, the drafter works while the target verifies. sync: ordinary speculative "
            "decoding with the same drafter. off: plain decode without a drafter."
        ),
    ] = "async"
    backup: Annotated[
        Literal["jit", "none"],
        _help(
            "What serves a request whose outcome was not guessed. jit: the drafter drafts it while "
            "the batch waits. none: it decodes plainly this round, nobody waits."
        ),
    ] = "jit"

    fan_out: Annotated[
        list[Count],
        _help(
            "Guesses of the bonus token per accept position: one number for every position, or "
            "num-steps + 1 numbers, separated by commas on the command line."
        ),
    ] = msgspec.field(default_factory=lambda: [3])
    fan_out_policy: Annotated[
        Literal["uniform", "geometric"],
        _help(
            "uniform: --ssd-fan-out as it is. geometric: as many branches, spread over the "
            "positions by Theorem 12 of the paper."
        ),
    ] = "uniform"
    acceptance_rate: Annotated[
        Share, _help("How often one draft is accepted, for the geometric fan-out.")
    ] = 0.8
    power_law_exponent: Annotated[
        Positive, _help("How fast misses fall with the fan-out, for the geometric fan-out.")
    ] = 1.0

    overlap: Annotated[
        bool,
        _help(
            "SGLang's overlap scheduling. A round waits for its outcome here, so that nothing is "
            "hidden by it, and every token comes a round later."
        ),
    ] = False
    max_batch_size: Annotated[
        PositiveInt | None,
        _help(
            "Batches of more requests than this decode plainly. Left out: every batch speculates."
        ),
    ] = None

    endpoint: Annotated[
        str | None,
        _help(
            "Connect to the drafter that listens here. Left out: the server starts a drafter of "
            "its own."
        ),
    ] = None
    secret_key: Annotated[str | None, _help("Our CURVE key, for a drafter on another machine.")] = (
        None
    )
    peer_keys: Annotated[str | None, _help("The CURVE key of the drafter on another machine.")] = (
        None
    )
    reply_deadline_ms: Annotated[
        Positive, _help("Longest wait for drafts in a round; past it the round decodes plainly.")
    ] = 500.0
    reply_deadline_min_ms: Annotated[
        Positive,
        _help(
            "The wait adapts to twice the slowest of the last 256 replies, between this and "
            "--ssd-reply-deadline-ms; as large as that, the wait is fixed."
        ),
    ] = 100.0
    start_timeout_s: Annotated[
        Positive,
        _help(
            "Longest wait for the drafter to come up; past it the server stops at its start, and "
            "later another drafter is started."
        ),
    ] = 180.0
    lease_s: Annotated[
        Positive,
        _help(
            "The drafter frees a sequence of which it has not heard for this long. It hears of "
            "each with every round and every chunk of a prefill; longer than either takes."
        ),
    ] = 60.0
    restart_delay_s: Annotated[
        Positive,
        _help(
            "Pause before a drafter of ours that ended is started again; each failure doubles it."
        ),
    ] = 0.5
    restart_delay_max_s: Annotated[
        Positive, _help("The pause before a restart of the drafter grows no longer than this.")
    ] = 30.0
    restart_healthy_s: Annotated[
        Positive,
        _help("A drafter that served this long begins anew with the shortest pause."),
    ] = 30.0
    resync_tokens: Annotated[
        PositiveInt,
        _help(
            "Tokens of running requests that a drafter which is back is told per round at most; "
            "at least one request is."
        ),
    ] = 4096

    drafter_device: Annotated[
        str, _help("Device of the drafter. auto: that of the target, a GPU shared with it.")
    ] = "auto"
    drafter_dtype: Annotated[
        Dtype,
        _help(
            "Data type of the drafter's weights and KV. auto: that of its checkpoint, float16 for "
            "float32."
        ),
    ] = "auto"
    drafter_max_total_tokens: Annotated[
        PositiveInt | None,
        _help(
            "KV slots of the drafter. Left out: as many as its share of memory holds, "
            "on CPU 1 GiB of them."
        ),
    ] = None
    drafter_max_sequences: Annotated[
        PositiveInt | None,
        _help("Requests drafted for at the same time; others decode plainly. Left out: 64."),
    ] = None
    drafter_mem_fraction: Annotated[
        Share,
        _help(
            "Share of its device's free memory that the drafter may take. Without effect on CPU, "
            "whose memory it shares with the target."
        ),
    ] = 0.8
    drafter_context_length: Annotated[
        PositiveInt | None,
        _help("Longest sequence drafted for. Left out: that of the draft model."),
    ] = None
    prefill_slice_tokens: Annotated[
        PositiveInt,
        _help(
            "Most tokens of a drafter forward that reads a slice of a prompt, those of other "
            "requests counted; up to 8 of the prompt are read in any case."
        ),
    ] = 256

    target_cores: Annotated[
        str,
        _help(
            "Cores of the target on a CPU machine. auto: two thirds of the cores, or all of them "
            "where no drafter runs on this machine. Holds without SSD too."
        ),
    ] = "auto"
    drafter_cores: Annotated[
        str, _help("Cores of the drafter on a CPU machine. auto: those the target leaves.")
    ] = "auto"

    allow_padded_vocab: Annotated[
        bool, _help("Accept two vocabularies that differ only in padding at the end.")
    ] = False
    trace: Annotated[
        str | None,
        _help(
            "Write a timeline of target and drafter to this file (Perfetto JSON). One that is "
            "there already is overwritten. With --dp-size above 1, FILE.json is FILE.dp0.json, "
            "FILE.dp1.json and so on, one for each replica."
        ),
    ] = None


OF_THE_DRAFTER = frozenset(
    {
        *("mode", "backup", "fan_out", "fan_out_policy", "acceptance_rate", "power_law_exponent"),
        *("lease_s", "prefill_slice_tokens"),
        *("restart_delay_s", "restart_delay_max_s", "restart_healthy_s"),
        *(name for name in SsdConfig.__struct_fields__ if name.startswith("drafter_")),
    }
)
"""What a drafter that was started by hand has of its own; a target that connects to it goes by
none of them, but for mode off."""


def drafter_is_here(config: SsdConfig) -> bool:
    """Whether the drafter of a target of this config is on the target's machine."""
    return config.endpoint is None or is_here(config.endpoint)


def without_effect(config: SsdConfig) -> list[str]:
    """Flags that differ from their defaults and mean nothing to a target of this config."""
    if config.endpoint is None or config.mode == "off":
        return []
    defaults = SsdConfig()
    # A target leaves those cores to a drafter on its machine.
    unread = OF_THE_DRAFTER - ({"drafter_cores"} if drafter_is_here(config) else set())
    return [
        flag_name(name)
        for name in SsdConfig.__struct_fields__
        if name in unread and getattr(config, name) != getattr(defaults, name)
    ]


class ConfigReading(msgspec.Struct, frozen=True):
    """The settings that could be read, defaults for the others, and why those could not."""

    config: SsdConfig
    reasons: list[str]


def load_config(env: Mapping[str, str] = os.environ) -> SsdConfig:
    """The config of SGLANG_SSD_CONFIG, or the defaults; SettingsError with every reason at once."""
    return _unless_wrong(read_config(env))


def read_config(env: Mapping[str, str] = os.environ) -> ConfigReading:
    """As load_config, but the reasons are returned: others may have more to say."""
    try:
        settings = raw_settings(env)
    except SettingsError as error:
        return ConfigReading(SsdConfig(), [str(error)])
    return read_settings(settings)


def raw_settings(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What SGLANG_SSD_CONFIG holds, right or wrong; SettingsError if that is no JSON object."""
    text = env.get(CONFIG_ENV, "").strip()
    if not text:
        return {}
    try:
        if not text.startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        return msgspec.json.decode(text, type=dict[str, Any])
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        reason = f"{CONFIG_ENV} must be a JSON object or the path of one: {error}"
        raise SettingsError(reason) from error


def dump_config(config: SsdConfig) -> str:
    """JSON text for SGLANG_SSD_CONFIG; load_config gives the same config back."""
    return msgspec.json.encode(config).decode()


def build_config(settings: Mapping[str, Any]) -> SsdConfig:
    """A config from names and values; SettingsError with every wrong one and what is allowed."""
    return _unless_wrong(read_settings(settings))


def from_texts(texts: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from the texts of a command line; what does not convert stays text, and is wrong."""
    values = {}
    for field in msgspec.structs.fields(SsdConfig):
        if field.name in texts:
            values[field.name] = texts[field.name]
            with contextlib.suppress(msgspec.ValidationError):
                values[field.name] = msgspec.convert(
                    texts[field.name], type=field.type, strict=False
                )
    return values


def read_settings(settings: Mapping[str, Any]) -> ConfigReading:
    """The settings of these names and values."""
    fields = {field.name: field for field in msgspec.structs.fields(SsdConfig)}
    reasons, values = [], {}
    for name, value in settings.items():
        if name not in fields:
            known = ", ".join(flag_name(field) for field in fields)
            reasons.append(f"{flag_name(name)}: no such setting; there are {known}")
            continue
        try:
            converted = msgspec.convert(value, type=fields[name].type)
        except msgspec.ValidationError:
            reasons.append(_reason(name, value))
            continue
        if isinstance(converted, float) and not math.isfinite(converted):
            reasons.append(_reason(name, value))
            continue
        values[name] = converted
    return ConfigReading(SsdConfig(**values), reasons)


def _unless_wrong(reading: ConfigReading) -> SsdConfig:
    if reading.reasons:
        raise SettingsError("Wrong SSD settings:\n  " + "\n  ".join(reading.reasons))
    return reading.config


def validate(config: SsdConfig, num_steps: int) -> list[str]:
    """Reasons against this config for K = num_steps on this machine; empty if there are none."""
    reasons = fan_out_reasons(config.fan_out, num_steps=num_steps)
    has_keys = config.secret_key is not None and config.peer_keys is not None
    if config.endpoint is not None:
        refusal = endpoint_refusal(config.endpoint, has_keys=has_keys)
        if refusal is not None:
            reasons.append(f"{_reason('endpoint', config.endpoint)} ({refusal})")
    for given, other in (("secret_key", "peer_keys"), ("peer_keys", "secret_key")):
        if getattr(config, given) is not None and getattr(config, other) is None:
            reasons.append(f"{flag_name(given)}: needs {flag_name(other)} as well")
    if has_keys and config.endpoint is None:
        reasons.append(f"{flag_name('secret_key')}: needs {flag_name('endpoint')} as well")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.drafter_device):
        reasons.append(_reason("drafter_device", config.drafter_device))
    if config.trace is not None and not _may_be_written(Path(config.trace).absolute()):
        reasons.append(_reason("trace", config.trace))
    return reasons


def _may_be_written(path: Path) -> bool:
    return path.is_file() or (path.parent.is_dir() and not path.exists())


def as_flag(field: str) -> str:
    """How a command line spells a field of SGLang's or of the drafter's settings."""
    return "--" + field.replace("_", "-")


def flag_name(field: str) -> str:
    """How it spells a field of SsdConfig."""
    return as_flag(f"ssd_{field}")


def allowed_values(field: str) -> str:
    """What a setting may be, in words; --help and every refusal say the same."""
    described = _describe(_type_info(field))
    if field in ALLOWED_TEXTS:
        return ALLOWED_TEXTS[field] + (", or left out" if described.endswith("left out") else "")
    return described


def help_text(field: str, struct: type[msgspec.Struct] = SsdConfig) -> str:
    """What a setting does, in a sentence or two."""
    info = _type_info(field, struct)
    assert isinstance(info, msgspec.inspect.Metadata), f"{field} has no help text"
    assert info.extra_json_schema is not None, f"{field} has no help text"
    return str(info.extra_json_schema["description"])


def shown_default(value: object) -> str:
    """A default as --help names it."""
    if value is None:
        return "left out"
    if isinstance(value, list):
        return _shown(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type_info(field: str, struct: type[msgspec.Struct] = SsdConfig) -> msgspec.inspect.Type:
    types = {info.name: info.type for info in msgspec.structs.fields(struct)}
    return msgspec.inspect.type_info(types[field])


def _describe(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.Metadata(type=described):
            return _describe(described)
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case msgspec.inspect.UnionType(types=types):
            parts = [_describe(part) for part in types if not _is_none(part)]
            return " or ".join(parts) + ", or left out"
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
