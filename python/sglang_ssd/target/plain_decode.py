"""Which requests are decoded plainly: the one list of what speculation does not honour exactly."""

from __future__ import annotations

from typing import Any, Protocol


class SamplingParamsView(Protocol):
    """The fields of SGLang's SamplingParams that decide."""

    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    custom_params: dict[str, Any] | None


class RequestView(Protocol):
    """The fields of SGLang's Req that decide."""

    sampling_params: SamplingParamsView
    custom_logit_processor: str | None
    return_hidden_states: bool
    return_sampling_mask: bool


def needs_plain_decode(req: RequestView) -> str | None:
    """Name of the parameter for which this request decodes plainly; None if it speculates.

    Penalties and min_new_tokens depend on the tokens before each verify row, drafts included, while
    SGLang keeps one penalty row per request and round; a custom processor sees one history of it.
    """
    params = req.sampling_params
    causes = {
        "frequency_penalty": params.frequency_penalty != 0.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "min_new_tokens": params.min_new_tokens > 0,
        "custom_logit_processor": bool(req.custom_logit_processor),
        "return_hidden_states": req.return_hidden_states,
        "return_sampling_mask": req.return_sampling_mask,
    }
    return next((name for name, applies in causes.items() if applies), None)


def opts_out(req: RequestView) -> bool:
    """Whether the client asked for plain decode: custom_params={"ssd": false}."""
    custom_params = req.sampling_params.custom_params
    return custom_params is not None and custom_params.get("ssd") is False
