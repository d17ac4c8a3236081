"""What a request cannot ask for together with drafts: HTTP 400 with the parameter's name.

Registered on `TokenizerManager._create_tokenized_object`, where SGLang's own checks of parameters
are: what is raised there reaches the client as its own errors do, streamed or not.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_ssd.config import ALGORITHM
from sglang_ssd.target.algorithm import is_ssd

REFUSED_FIELDS = ("return_sampling_mask", "return_routed_experts", "return_indexer_topk")
"""Outputs that SGLang collects in its own sampler, or per decode step."""
MAX_TOP_K = 2**31 - 1
"""What SGLang's tensor of them holds; more ends it."""
SHOWN_CHARS = 40
"""Of a text of the client's that is refused."""

_UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, NameError, ImportError, EOFError),
    *(ArithmeticError, RecursionError, MemoryError, pickle.UnpicklingError, struct.error),
)
"""What the reading of a pickle that is none raises; what else does is answered as an error of the
server, which goes on."""


def register_hooks() -> None:
    tokenizer = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    HookRegistry.register(
        f"{tokenizer}._create_tokenized_object", refuse_unserved_parameters, HookType.BEFORE
    )


def refuse_unserved_parameters(
    manager: Any,
    obj: Any,
    input_text: str | None = None,
    input_ids: list[int] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Raises ValueError with every parameter of this request that is not served."""
    if not is_ssd():
        return
    fields = vars(obj)
    if fields.get("custom_logit_processor") == "":
        obj.custom_logit_processor = None  # SGLang reads an empty one beside another's real one
    if not get_exec().features.enable_custom_logit_processor:
        # SGLang has refused those already; a text that is not asked for is never unpickled here.
        fields = {**fields, "custom_logit_processor": None}
    vocab_size = manager.model_config.vocab_size
    reasons = _prompt_reasons(fields, input_text, input_ids, vocab_size)
    reasons += _override_reasons(fields, manager.model_config)
    reasons += refusal_reasons(fields, vocab_size=vocab_size)
    if reasons:
        raise ValueError("; ".join(reasons))


def refusal_reasons(fields: Mapping[str, Any], *, vocab_size: int) -> list[str]:
    """Of one request's fields; sampling_params among them."""
    found = [f"{name} {fields[name]}" for name in REFUSED_FIELDS if fields.get(name)]
    params = fields.get("sampling_params") or {}
    beam_width = params.get("beam_width")
    if isinstance(beam_width, int) and beam_width > 1:
        found.append(f"beam_width {beam_width}")
    reasons = [f"{one}: not served with --speculative-algorithm {ALGORITHM}" for one in found]
    top_k = params.get("top_k")
    if isinstance(top_k, int) and top_k > MAX_TOP_K:
        reasons.append(f"top_k {top_k}: must be at most {MAX_TOP_K}")
    custom_params = params.get("custom_params")
    if not (custom_params is None or isinstance(custom_params, dict)):
        reasons.append(f"custom_params {custom_params!r}: must be an object")
        custom_params = None
    opt_out = (custom_params or {}).get("ssd")
    if not (opt_out is None or isinstance(opt_out, bool)):
        reasons.append(f"custom_params ssd {opt_out!r}: must be true, false or null")
    reasons += _processor_reasons(fields.get("custom_logit_processor"))
    reasons += _logprob_reasons(fields, vocab_size)
    return reasons + _stop_token_reasons(params, vocab_size)


def _prompt_reasons(
    fields: Mapping[str, Any],
    input_text: str | None,
    input_ids: Sequence[int] | None,
    vocab_size: int,
) -> list[str]:
    """SGLang ends itself by a forward of no row, and by ids that are no tokens."""
    if input_ids is None or fields.get("input_embeds") is not None:
        return []
    if len(input_ids) == 0:
        if fields.get("session_params") or fields.get("session_id"):  # the rows of earlier turns
            return []
        return [f"prompt {input_text!r}: must have a token"]
    least, most = min(input_ids), max(input_ids)
    if least >= 0 and most < vocab_size:
        return []
    return [f"input_ids {least if least < 0 else most}: must be 0 to {vocab_size - 1}"]


def _override_reasons(fields: Mapping[str, Any], model_config: Any) -> list[str]:
    """SGLang ends itself by embeddings that do not fit among its model's."""
    overrides = fields.get("positional_embed_overrides")
    if overrides is None:
        return []
    if not isinstance(overrides, PositionalEmbeds):
        return [f"positional_embed_overrides {overrides!r}: must be a PositionalEmbeds"]
    embeds, hidden_size = overrides.embeds, model_config.hidden_size
    if isinstance(embeds, torch.Tensor) and embeds.shape[1:] == (hidden_size,):
        return []
    shown = f"of shape {list(embeds.shape)}" if isinstance(embeds, torch.Tensor) else repr(embeds)
    return [f"positional_embed_overrides {shown}: must be a tensor [number, {hidden_size}]"]


def _logprob_reasons(fields: Mapping[str, Any], vocab_size: int) -> list[str]:
    """SGLang ends itself by logprobs of what there is none of."""
    if not fields.get("return_logprob"):
        return []
    reasons = []
    start, num_ranked = fields.get("logprob_start_len"), fields.get("top_logprobs_num")
    if isinstance(start, int) and start < -1:
        reasons.append(f"logprob_start_len {start}: must be at least -1")
    if isinstance(num_ranked, int) and not 0 <= num_ranked <= vocab_size:
        reasons.append(f"top_logprobs_num {num_ranked}: must be 0 to {vocab_size}")
    return reasons


def _processor_reasons(text: Any) -> list[str]:
    """SGLang reads the text in its scheduler, and ends itself if that fails."""
    if not (isinstance(text, str) and text):  # an empty one is none to SGLang
        return []
    try:
        processor = CustomLogitProcessor.from_str(text)
    except _UNREADABLE as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if callable(processor):
            return []
        problem = f"it is a {type(processor).__name__}"
    shown = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + ".."
    return [
        f"custom_logit_processor {shown!r}: must be the text of CustomLogitProcessor.to_str() "
        f"({problem})"
    ]


def _stop_token_reasons(params: Mapping[str, Any], vocab_size: int) -> list[str]:
    """SGLang indexes by the stop ids of a request with min_new_tokens, and ends itself by ids that
    are none; the vocabulary's size alone is harmless to it."""
    min_new_tokens, stops = params.get("min_new_tokens"), params.get("stop_token_ids")
    if not (isinstance(min_new_tokens, int | float) and min_new_tokens > 0):
        return []
    if not isinstance(stops, list):
        return []
    try:
        wrong = [stop for stop in stops if not 0 <= int(stop) <= vocab_size]
    except (TypeError, ValueError, OverflowError):
        return []  # SGLang converts them likewise, and says what it cannot
    if not wrong:
        return []
    return [f"stop_token_ids {wrong}: must be 0 to {vocab_size - 1} where min_new_tokens is given"]
