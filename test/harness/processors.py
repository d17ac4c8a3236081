"""Custom logit processors as a client sends them: their code travels, so the server need not know
this file."""

from __future__ import annotations

from typing import Any

SOURCE = '''
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    ThinkingBudgetLogitProcessor,
)


class BanRecentTokens(CustomLogitProcessor):
    """Rules out the last params["window"] tokens, and prefers another token at every length."""

    row_function = True

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            output = params["__req__"].output_ids
            recent = list(output[-params["window"]:])
            if recent:
                logits[row, recent] = -float("inf")
            logits[row, 260 + len(output) % 5] += 2.0
        return logits


class Flatter(CustomLogitProcessor):
    """Divides by params["factor"], as a higher temperature does."""

    row_function = True

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            logits[row] /= params["factor"]
        return logits


class CountCalls(CustomLogitProcessor):
    """Changes with every call, which no row that may be thrown away could stand."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            params["calls"] = params.get("calls", 0) + 1
            assert params["calls"] == 1 + len(params["__req__"].output_ids)
            logits[row, 260 + params["calls"] % 5] += 2.0
        return logits


class ShortThought(ThinkingBudgetLogitProcessor):
    """SGLang's own processor for the ids of another model."""

    THINKING_START_TOKEN_ID = 2
    THINKING_END_TOKEN_ID = 3
    NEW_LINE_TOKEN_ID = 198
'''


def serialized(name: str) -> str:
    """The processor of that name, as the server takes it."""
    # dill sends the code of what belongs to the main program, and a name for anything else.
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(SOURCE, scope)
    text: str = scope[name].to_str()
    return text
