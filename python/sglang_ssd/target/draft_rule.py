"""What of a request's sampling is told to the drafter, so that it drafts what the target chooses.

Nothing here is needed for exactness, so what is large is cut: of a long logit_bias the strongest
entries are sent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sglang_ssd.target.row_transforms import stop_tokens
from sglang_ssd.wire.messages import MAX_COUNT, MAX_RULE_TOKENS, DraftRule

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def draft_rule(req: Req, *, seed: int) -> DraftRule:
    """seed keys the noise of a sampled request; a greedy one draws nothing."""
    params = req.sampling_params
    sampling: dict[str, Any] = {}
    if params.top_k != 1:  # how SGLang normalises temperature 0
        sampling = {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": seed,
        }
    bias = _strongest(params.logit_bias or {})
    least = math.ceil(min(params.min_new_tokens, MAX_COUNT)) if params.min_new_tokens > 0 else 0
    ends = sorted(stop_tokens(req)) if least > 0 else []
    return DraftRule(
        **sampling,
        prompt_len=len(req.origin_input_ids),
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=least,
        stop_tokens=ends[:MAX_RULE_TOKENS],
        bias_tokens=list(bias),
        bias_values=list(bias.values()),
    )


def _strongest(logit_bias: dict[str, float]) -> dict[int, float]:
    known = {int(token): value for token, value in logit_bias.items() if math.isfinite(value)}
    if len(known) <= MAX_RULE_TOKENS:
        return known
    by_strength = sorted(known.items(), key=lambda item: -abs(item[1]))
    return dict(by_strength[:MAX_RULE_TOKENS])
