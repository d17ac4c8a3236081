"""Which requests are decoded plainly: the one list of what cannot be exact with drafts.

A custom logit processor speculates if it is a function of each row's logits, its parameters and
`__req__` (`origin_input_ids` and `output_ids` of it), so that a row may be processed before it is
known whether its turn ever comes. SGLang's own processors are such functions; another one says so
with the class attribute `row_function = True`. A grammar speculates if its backend can take tokens
back.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class SamplingParamsView(Protocol):
    """The fields of SGLang's SamplingParams that decide."""

    custom_params: dict[str, Any] | None


class RequestView(Protocol):
    """The fields of SGLang's Req that decide."""

    sampling_params: SamplingParamsView
    custom_logit_processor: str | None  # an empty one is none, as in SGLang
    grammar: BaseGrammarObject | None
    input_embeds: Any
    positional_embed_overrides: Any


def needs_plain_decode(req: RequestView) -> bool:
    """Whether a parameter of this request rules drafts out.

    Embeddings in place of ids are no bar to exactness, but a drafter has only ids to go by.
    """
    processor, grammar = req.custom_logit_processor, req.grammar
    return (
        (bool(processor) and not _is_known_function(processor))
        or (grammar is not None and not can_roll_back(grammar))
        or req.input_embeds is not None
        or req.positional_embed_overrides is not None
    )


def opts_out(req: RequestView) -> bool:
    """Whether the client asked for plain decode: custom_params={"ssd": false}."""
    custom_params = req.sampling_params.custom_params
    return custom_params is not None and custom_params.get("ssd") is False


def is_row_function(processor: CustomLogitProcessor) -> bool:
    """Whether a processor may see rows that are never chosen from."""
    kind = type(processor)
    if kind.__call__.__module__ == CustomLogitProcessor.__module__:
        return True
    return getattr(kind, "row_function", False) is True


def can_roll_back(grammar: BaseGrammarObject) -> bool:
    """Whether a grammar can take back tokens that were drafted and turned out wrong."""
    if isinstance(grammar, ReasonerGrammarObject):
        return grammar.grammar is None or can_roll_back(grammar.grammar)
    return type(grammar).rollback is not BaseGrammarObject.rollback


@lru_cache(maxsize=256)
def _is_known_function(serialized: str) -> bool:
    return is_row_function(CustomLogitProcessor.from_str(serialized))
