"""Every refusal of the product: its words, the file that has them, and the test that shows them.

The words are the source's own, with {what it puts there}; test/unit/test_refusals.py reads them
there, so a new refusal, or other words, want a row. A row names the part that is said by one place:
reasons are joined, and some are parts of others. What each setting may be is in SETTINGS.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

Kind = Literal["start", "drafter's start", "request", "reload", "nobody"]
"""What is refused; a request by HTTP 400, a reload by 400, 409 or 504. Nobody meets some texts."""


class Refusal(msgspec.Struct, frozen=True):
    kind: Kind
    where: str
    """Product file, below python/sglang_ssd."""
    says: str
    shown: str
    """A test by its file below test/ and its name; of nobody's: why."""
    case: str
    """Which of the test's cases; "" if it has none."""


Cases = dict[str, str | tuple[str, ...]]
"""What is said, by case."""


def _rows(kind: Kind, where: str, shown: str, cases: Cases) -> Iterator[Refusal]:
    for case, said in cases.items():
        for says in (said,) if isinstance(said, str) else said:
            yield Refusal(kind, where, says, shown, case)


_ARGUMENTS = "e2e/test_bad_input.py::test_refused_with_flag_value_and_what_is_allowed"
_SUPPORT = "e2e/test_bad_input.py::test_every_row_of_the_support_table"
_REQUESTS = "e2e/test_bad_requests.py::test_generate_refuses_with_the_whole_reason"
_EMBEDDINGS = "e2e/test_row_transforms.py::test_embeddings_that_do_not_fit_are_refused"
_PROCESSORS = "e2e/test_row_transforms.py::test_a_processor_that_is_none_is_refused"
_WIRE = "integration/test_start_refusals.py::test_a_drafters_wire"
_FLAGS = "integration/test_start_refusals.py::test_a_drafters_flags"
_CHECKPOINTS = "integration/test_start_refusals.py::test_a_drafters_checkpoint"
_HELLOS = "integration/test_start_refusals.py::test_a_target_that_a_drafter_cannot_serve"
_STARTS = "integration/test_start_refusals.py::test_a_drafter_that_does_not_come"
_ATTENTION = "e2e/test_cpu_platform.py::test_an_attention_of_another_kind_is_refused"
_ENDPOINTS = "integration/test_transport.py::test_other_endpoints_are_refused_by_name"
_RELOADS = "e2e/test_reload_answer.py::test_a_reload_that_fails"
_LATE = "e2e/test_reload_answer.py::test_a_reload_that_takes_too_long"
_LINK = "unit/test_drafter_link.py::test_a_"

OF_A_START = (
    *_rows(
        "start",
        "target/algorithm.py",
        _ARGUMENTS,
        {
            "all-at-once": "--speculative-algorithm {ALGORITHM} cannot start:\n  {lines}",
            "no-steps": "--speculative-num-steps {num_steps}: must be 1 to {MAX_NUM_STEPS}",
            "topk": "--speculative-eagle-topk {topk}: must be 1 or left out",
            "wide": "--speculative-num-draft-tokens {width}: must be {num_steps + 1} "
            "(--speculative-num-steps + 1) or left out",
            "no-drafter": "--speculative-draft-model-path: missing; name a draft model with the "
            "target's vocabulary, or --ssd-endpoint of a running drafter, or --ssd-mode off",
        },
    ),
    *_rows(
        "start",
        "target/algorithm.py",
        _SUPPORT,
        {
            "larger pages": "must be 1",
            "LoRA": "must be left out",
            "attention data parallelism": "must be 1; --enable-dp-attention must be left out",
            "a prefill server of a pair": "must be null",
            "quantised KV on a CPU": "must be auto on the CPU platform",
            "hierarchical cache on a CPU": "must be left out on the CPU platform",
            "other speculative flags": "{as_flag(field.name)} {value}: not used by SSD; "
            "must be left out",
            "multimodal targets": (
                "--model-path {server_args.model_path}",
                "{model}: a multimodal model; must be text only",
            ),
            "targets with recurrent state": "{model}: a model with recurrent state; must have "
            "attention alone",
        },
    ),
    *_rows(
        "start",
        "target/algorithm.py",
        "e2e/test_bad_input.py::test_on_a_gpu_what_would_answer_wrongly_is_refused",
        {"": ("must be triton on a GPU", "must be given on a GPU")},
    ),
    *_rows(
        "start",
        "config.py",
        _ARGUMENTS,
        {
            "mode": "{flag_name(name)} {_shown(value)}: must be {allowed_values(name)}",
            "unknown-key": "{flag_name(name)}: no such setting; there are {known}",
            "bad-json": "{CONFIG_ENV} must be a JSON object or the path of one: {error}",
            "one-key": "{flag_name(given)}: needs {flag_name(other)} as well",
            "keys-without-endpoint": "{flag_name('secret_key')}: needs {flag_name('endpoint')} "
            "as well",
        },
    ),
    *_rows(
        "start",
        "config.py",
        "unit/test_config.py::test_every_wrong_setting_is_in_one_refusal",
        {"": "Wrong SSD settings:\n  "},
    ),
    *_rows(
        "start",
        "core/fan_out.py",
        _ARGUMENTS,
        {
            "fan-out-length": (
                "--ssd-fan-out {shown}: {one}",
                "{len(fan_out)} numbers; allowed is one, or {num_steps + 1} of them "
                "(--speculative-num-steps + 1)",
            ),
            "fan-out-zero": "all zero; one at least must be positive",
        },
    ),
    *_rows(
        "start",
        "core/fan_out.py",
        "unit/test_fan_out.py::test_refusal_names_flag_value_and_what_is_allowed",
        {"": "a negative number; none may be"},
    ),
    *_rows(
        "start",
        "platform/affinity.py",
        _ARGUMENTS,
        {
            "cores": "{flag_name(field)} {text!r}: no core {format_cores(missing)} here; this "
            "process may use {format_cores(lent)}",
        },
    ),
    *_rows(
        "start",
        "platform/affinity.py",
        "unit/test_affinity.py::test_wrong_texts",
        {
            "a": (
                "{flag_name(field)} {text!r}: {error}; must be {ALLOWED_TEXTS[field]}",
                "{part!r} is neither a core number nor a range",
            ),
            "2-1": "range {part!r} runs backwards",
        },
    ),
    *_rows(
        "start",
        "platform/cpu_attention.py",
        _ATTENTION,
        {
            "": (
                "--attention-backend {CPU_PLATFORM} serves plain MHA/GQA only; "
                "{type(model_runner.model).__name__} needs: {', '.join(reasons)}",
                "MLA (latent attention)",
                "sliding window attention",
                "cross attention",
                "bidirectional attention",
                "logit soft capping",
                "different head sizes for queries and values",
                "attention temperature",
            ),
        },
    ),
    *_rows(
        "start",
        "launch_server.py",
        "e2e/test_bad_input.py::test_launcher_without_the_algorithm_refuses_what_only_it_reads",
        {
            "": (
                "{', '.join(idle)}: mean something only with --speculative-algorithm SSD "
                "(given: {algorithm})",
                "sglang-ssd: {error}",
            ),
        },
    ),
    *_rows(
        "start",
        "launch_server.py",
        "e2e/test_bad_input.py::test_launcher_refuses_a_foreign_platform",
        {
            "another package's platform": "{PLATFORM_ENV}={selected}: SGLang loads no plugin of "
            "ours under another platform; unset it (GPU) or set it to {CPU_PLATFORM} (CPU)",
        },
    ),
    *_rows(
        "start",
        "compat.py",
        "e2e/test_compat.py::test_another_version_registers_and_is_refused_before_anything_loads",
        {"": "sglang {installed}: this sglang-ssd is tested with sglang{required}"},
    ),
    *_rows(
        "start",
        "compat.py",
        "e2e/test_compat.py::test_changed_functions_are_named",
        {
            "": (
                "sglang has no {path}: {error}",
                "sglang's {path} takes {actual}; expected {parameters}",
            ),
        },
    ),
    *_rows(
        "start",
        "plugin.py",
        "e2e/test_compat.py::test_a_plugin_without_its_hooks_is_refused",
        {"": "hooks: {type(error).__name__}: {error}"},
    ),
    *_rows(
        "start",
        "plugin.py",
        "unit/test_plugin.py::test_a_child_whose_parent_has_ended_ends",
        {"": "sglang-ssd: the server {parent.pid} ended while this process was starting"},
    ),
    *_rows(
        "start",
        "target/handshake.py",
        _STARTS,
        {
            "late": "the SSD drafter was not ready within --ssd-start-timeout-s {timeout_s}; "
            "raise it for a large draft model, or see the drafter's log above",
            "ended": "the SSD drafter did not start: {drafter.failure()}",
        },
    ),
    *_rows(
        "start",
        "target/drafter_link.py",
        f"{_LINK}drafter_that_welcomes_another_size_is_refused_by_the_target",
        {
            "": (
                "the SSD drafter refuses this target: {reason}",
                "vocabulary size {welcome.vocab_size} of the drafter, {hello.vocab_size} of the "
                "target",
                "schema version {welcome.schema_version}, the target {SCHEMA_VERSION}",
            ),
        },
    ),
    *_rows(
        "start",
        "target/drafter_link.py",
        f"{_LINK}refused_vocabulary_is_one_sentence_with_the_first_difference",
        {
            "swapped": "first difference: id {start + offset} is {mine!r} for the target, "
            "{other!r} for the drafter",
        },
    ),
    *_rows(
        "start",
        "target/supervisor.py",
        "unit/test_supervisor.py::test_a_first_start_that_is_impossible_says_why",
        {"": "the drafter could not be started: {error}"},
    ),
    *_rows(
        "start",
        "drafter/process.py",
        "integration/test_drafter_process.py::test_the_log_of_a_killed_drafter_is_no_reason",
        {"": ("the drafter process {self.pid} ended with {how}", "signal {-code}")},
    ),
    *_rows(
        "start",
        "drafter/process.py",
        "integration/test_drafter_process.py::test_a_failed_start_says_why_within_seconds",
        {"": "exit code {code}"},
    ),
)

OF_A_DRAFTERS_START = (
    *_rows(
        "drafter's start",
        "drafter/__main__.py",
        _WIRE,
        {"one key": "--secret-key and --peer-keys: give both, or neither"},
    ),
    *_rows("drafter's start", "drafter/__main__.py", _FLAGS, {"": "must be {_allowed(field)}"}),
    *_rows(
        "drafter's start",
        "drafter/__main__.py",
        "integration/test_start_refusals.py::test_a_drafters_cores",
        {"": "--cores {cores!r}: none of them is here: {error}"},
    ),
    *_rows(
        "drafter's start",
        "drafter/process.py",
        "integration/test_drafter_process.py::test_a_device_that_is_none_is_refused_by_its_flag",
        {"": "device {device!r}: must be {allowed}"},
    ),
    *_rows(
        "drafter's start",
        "drafter/checkpoint.py",
        _CHECKPOINTS,
        {
            "no folder": "draft model: {model_dir} is missing",
            "no config": "draft model: {path} is missing",
            "broken config": "draft model: {file} is not as it should be: {error}",
            "other class": "draft model: class {name} is not supported; allowed are {allowed}",
            "sliding window": "draft model: {config.architectures[0]} with use_sliding_window is "
            "not supported; allowed is plain attention",
            "no weights": "draft model: no weights in {model_dir} (model.safetensors is missing)",
            "cut": "draft model: {file} is truncated: {size} of {expected} bytes",
            "cut in its header": "draft model: {file} is truncated: {size} bytes, its header is "
            "cut",
        },
    ),
    *_rows(
        "drafter's start",
        "drafter/checkpoint.py",
        "unit/test_checkpoint.py::test_what_never_ends_is_not_read",
        {"": "draft model: {path} is no regular file"},
    ),
    *_rows(
        "drafter's start",
        "drafter/checkpoint.py",
        "unit/test_checkpoint.py::test_a_file_that_cannot_be_read_is_named",
        {"": "draft model: {error}"},
    ),
    *_rows(
        "drafter's start",
        "drafter/handshake.py",
        _HELLOS,
        {
            "version": "schema version {hello.schema_version}, the drafter speaks {SCHEMA_VERSION}",
            "steps": "num_steps {hello.num_steps}, allowed are 1..{MAX_NUM_STEPS}",
            "size": "vocabulary size {abilities.vocab_size} of the drafter, {hello.vocab_size} of "
            "the target (--ssd-allow-padded-vocab accepts vocabularies that differ in padding "
            "only)",
            "tokens": "the drafter's tokenizer maps ids to other tokens than the target's",
        },
    ),
    *_rows(
        "drafter's start",
        "wire/curve.py",
        _WIRE,
        {
            "readable by others": "{path}: mode {mode}; must be readable by its owner alone "
            "(chmod 600)",
            "public for secret": "{path}: holds no secret key; must be a .key_secret file",
            "peers in no folder": "{folder}: must be a folder with the targets' .key files",
            "no peers": "{folder}: holds no .key file",
        },
    ),
    *_rows(
        "drafter's start",
        "wire/curve.py",
        "integration/test_start_refusals.py::test_a_secret_of_somebody_else",
        {"": "{path}: belongs to user {status.st_uid}; must be ours"},
    ),
    *_rows(
        "drafter's start",
        "wire/endpoints.py",
        _ENDPOINTS,
        {
            "tcp://0.0.0.0:5555": (
                "{endpoint!r}: {refusal}; must be {ALLOWED_ENDPOINTS}",
                "host {host} is not the loopback interface, and there are no keys",
            ),
            "tcp://127.0.0.1": "no port",
            "ipc://relative": "not an absolute path",
            "ipc:///": "the path is longer than {_MAX_IPC_PATH} bytes",
            "inproc://x": "unknown kind of endpoint",
        },
    ),
    *_rows(
        "drafter's start",
        "wire/endpoints.py",
        "integration/test_transport.py::test_an_endpoint_with_keys_has_a_host_and_a_port",
        {"tcp://:5555": "no host"},
    ),
    *_rows(
        "drafter's start",
        "wire/transport.py",
        "integration/test_transport.py::test_a_file_in_the_way_is_kept",
        {"": "{endpoint!r}: a file is there that is no socket"},
    ),
    *_rows(
        "drafter's start",
        "wire/transport.py",
        "integration/test_transport.py::test_a_live_drafter_keeps_its_endpoint",
        {"": "{endpoint!r}: another process listens there"},
    ),
    *_rows(
        "drafter's start",
        "keys.py",
        "integration/test_curve.py::"
        "test_the_command_makes_what_both_sides_need_and_overwrites_nothing",
        {"": "{folder}: there is something already; name a new folder"},
    ),
)

OF_A_REQUEST = (
    *_rows(
        "request",
        "target/refusals.py",
        _REQUESTS,
        {
            "mask": "{one}: not served with --speculative-algorithm {ALGORITHM}",
            "beams": "beam_width {beam_width}",
            "top-k": "top_k {top_k}: must be at most {MAX_TOP_K}",
            "opt-out": "custom_params ssd {opt_out!r}: must be true, false or null",
            "custom-params": "custom_params {custom_params!r}: must be an object",
            "logprobs": (
                "logprob_start_len {start}: must be at least -1",
                "top_logprobs_num {num_ranked}: must be 0 to {vocab_size}",
            ),
            "stops": "stop_token_ids {wrong}: must be 0 to {vocab_size - 1} where min_new_tokens "
            "is given",
            "processor": "custom_logit_processor {shown!r}: must be the text of "
            "CustomLogitProcessor.to_str() ({problem})",
            "empty-text": "prompt {input_text!r}: must have a token",
            "foreign-id": "input_ids {least if least < 0 else most}: must be 0 to {vocab_size - 1}",
            "overrides": "positional_embed_overrides {overrides!r}: must be a PositionalEmbeds",
        },
    ),
    *_rows(
        "request", "target/refusals.py", _PROCESSORS, {"": "it is a {type(processor).__name__}"}
    ),
    *_rows(
        "request",
        "target/refusals.py",
        "e2e/test_operator.py::test_score_with_embeddings",
        {
            "": (
                "of shape {list(embeds.shape)}",
                "positional_embed_overrides {shown}: must be a tensor [number, {hidden_size}]",
            ),
        },
    ),
)

OF_A_RELOAD = (
    *_rows(
        "reload",
        "target/http_routes.py",
        "e2e/test_bad_requests.py::test_reload_refuses_a_body",
        {
            "unknown-field": "body of /ssd/reload_drafter: {error}; known are model_path, revision",
        },
    ),
    *_rows(
        "reload",
        "target/http_routes.py",
        _RELOADS,
        {"overtaken": "another reload took its place; /ssd/status tells how that goes on"},
    ),
    *_rows(
        "reload",
        "target/http_routes.py",
        _LATE,
        {"all": "the drafter is still loading; /ssd/status tells how it goes on"},
    ),
    *_rows(
        "reload",
        "target/reload.py",
        _RELOADS,
        {
            "everywhere": "dp_rank {', '.join(of)}: {text}",
            "in one replica, before the other serves": "serves the new model",
        },
    ),
    *_rows(
        "reload",
        "target/reload.py",
        _LATE,
        {"one, and another failed": "is still loading it"},
    ),
    *_rows("reload", "target/hooks.py", _RELOADS, {"off": "this server has no drafter"}),
    *_rows(
        "reload",
        "target/hooks.py",
        "e2e/test_keyed_drafter.py::test_it_may_go_and_come_back",
        {"": "the drafter was not started by this server: start another one at its endpoint"},
    ),
    *_rows(
        "reload",
        "target/supervisor.py",
        "unit/test_supervisor.py::test_a_model_that_hangs_while_it_loads_is_given_up",
        {
            "": "the drafter process {self.pid} did not serve within --ssd-start-timeout-s "
            "{timeout_s}"
        },
    ),
)

OF_NOBODY = (
    *_rows(
        "nobody",
        "compat.py",
        "a broken build of ours",
        {"": "{DISTRIBUTION} is installed without a requirement on sglang"},
    ),
    *_rows("nobody", "compat.py", "what is looked for, not said", {"": "sglang{required}"}),
    *_rows(
        "nobody",
        "core/speculation_cache.py",
        "of the wire, as ProtocolErrors",
        {
            "": (
                "base {base_committed_len}, but only {self.committed_len} ids are known",
                "committed_tokens: got none, a sequence has at least one token",
            ),
        },
    ),
    *_rows(
        "nobody",
        "drafter/__main__.py",
        "becomes what the flag may be",
        {"": "not a finite number"},
    ),
    *_rows(
        "nobody",
        "drafter/__main__.py",
        "whoever would read it is gone",
        {"": "the parent {parent_pid} is gone already"},
    ),
    *_rows(
        "nobody",
        "drafter/process.py",
        "refused before, in other words",
        {"": "--speculative-draft-model-path: got none, SSD needs a draft model"},
    ),
    *_rows(
        "nobody",
        "target/supervisor.py",
        "of a drafter that is exchanged, in the log",
        {"": "it makes room for another model"},
    ),
)

TABLE = (*OF_A_START, *OF_A_DRAFTERS_START, *OF_A_REQUEST, *OF_A_RELOAD, *OF_NOBODY)

_POSITIVE = "a number above 0"
_COUNT = "a whole number above 0"
_SHARE = "a number between 0 and 1, both excluded"
_TRUTH = "true or false"
_CORES = "auto, or core numbers such as 0-2,5"
SETTINGS = {
    "mode": "one of async, off, sync",
    "backup": "one of jit, none",
    "fan_out": "a list, each a whole number of at least 0",
    "fan_out_policy": "one of geometric, uniform",
    "acceptance_rate": _SHARE,
    "power_law_exponent": _POSITIVE,
    "overlap": _TRUTH,
    "max_batch_size": f"{_COUNT}, or left out",
    "endpoint": "ipc:///PATH of a socket, tcp://127.0.0.1:PORT or, with both keys, "
    "tcp://HOST:PORT, or left out",
    "secret_key": "a .key_secret file of python -m sglang_ssd.keys, or left out",
    "peer_keys": "a .key file of python -m sglang_ssd.keys, or left out",
    "reply_deadline_ms": _POSITIVE,
    "reply_deadline_min_ms": _POSITIVE,
    "start_timeout_s": _POSITIVE,
    "lease_s": _POSITIVE,
    "restart_delay_s": _POSITIVE,
    "restart_delay_max_s": _POSITIVE,
    "restart_healthy_s": _POSITIVE,
    "resync_tokens": _COUNT,
    "drafter_device": "auto, cpu, cuda or cuda:N",
    "drafter_dtype": "one of auto, bfloat16, float16, float32",
    "drafter_max_total_tokens": f"{_COUNT}, or left out",
    "drafter_max_sequences": f"{_COUNT}, or left out",
    "drafter_mem_fraction": _SHARE,
    "drafter_context_length": f"{_COUNT}, or left out",
    "prefill_slice_tokens": _COUNT,
    "target_cores": _CORES,
    "drafter_cores": _CORES,
    "allow_padded_vocab": _TRUTH,
    "trace": "a file in an existing folder, or left out",
}
"""What each setting of SsdConfig must be, as its refusal says it."""
