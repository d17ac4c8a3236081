"""What speculation does not honour exactly yet is decoded plainly, and right, beside other rows."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from harness.client import Request, generate_all
from harness.configurations import TABLE, spec_of
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.server import ServerPool

PLAIN: dict[str, list[dict[str, Any]]] = {
    "frequency_penalty": [{"frequency_penalty": value} for value in (-1.0, 0.5, 2.0)],
    "presence_penalty": [{"presence_penalty": value} for value in (-1.0, 0.5, 2.0)],
    "repetition_penalty": [{"repetition_penalty": value} for value in (1.1, 1.5)],
    "min_new_tokens": [{"min_new_tokens": value} for value in (1, 5, 12)],
}


@pytest.mark.parametrize("feature", [*PLAIN, "custom_logit_processor"])
def test_plain_rows_beside_speculating_ones(
    feature: str, pool: ServerPool, reference: Reference, spec_for: Any
) -> None:
    """Red when such a row speculates (its penalties would lag), or its neighbours do not.

    Both servers run without overlap: SGLang's own penalties lag one token under it.
    """
    server = pool.get(spec_of(TABLE[0], spec_for))
    prompts = load_prompts(server.spec.model, 8)
    cases = []
    for index, prompt in enumerate(prompts):
        plain = index % 2 == 0
        params: dict[str, Any] = {"max_new_tokens": 40}
        options: dict[str, Any] = {}
        if plain and feature in PLAIN:
            params |= PLAIN[feature][index // 2 % len(PLAIN[feature])]
        if plain and feature == "min_new_tokens":
            (free,) = reference.answers([Request(prompt.input_ids, {"max_new_tokens": 6})])
            params["stop_token_ids"] = [free.output_ids[min(4, len(free.output_ids) - 1)]]
        if plain and feature == "custom_logit_processor":
            params["custom_params"] = {"token_ids": [28, 260, 198]}
            options["custom_logit_processor"] = DisallowedTokensLogitsProcessor.to_str()
        cases.append(Request(prompt.input_ids, params, options))
    answers = generate_all(server.url, cases)
    assert_same(reference, cases, answers)
    for index, answer in enumerate(answers):
        if index % 2 == 0:
            assert answer.num_correct_drafts == 0
        elif len(answer.output_ids) > 2:
            assert answer.num_correct_drafts > 0
