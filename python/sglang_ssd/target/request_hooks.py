"""What SGLang does with a request token by token, made right for rounds of several tokens.

Seeds of parallel samples, the text that is streamed, the stop that ends a request, and which
model's weights are saved. Without SSD each of them leaves SGLang as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ssd.core.shared_noise import next_copy_seed
from sglang_ssd.target.algorithm import is_ssd


def register_hooks() -> None:
    managers = "sglang.srt.managers"
    HookRegistry.register(
        f"{managers}.tokenizer_manager.TokenizerManager._send_one_request",
        seed_parallel_samples,
        HookType.BEFORE,
    )
    HookRegistry.register(
        f"{managers}.detokenizer_manager.find_printable_text",
        hold_back_half_characters,
        HookType.AFTER,
    )
    HookRegistry.register(
        f"{managers}.schedule_batch.Req.update_finish_state",
        end_where_plain_decode_ends,
        HookType.AROUND,
    )
    HookRegistry.register(
        f"{managers}.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._accept_grammar_tokens",
        keep_the_token_behind_a_grammars_end,
        HookType.AROUND,
    )
    HookRegistry.register(
        f"{managers}.scheduler_components.weight_updater"
        ".SchedulerWeightUpdaterManager.save_remote_model",
        save_the_target_alone,
        HookType.AROUND,
    )


def seed_parallel_samples(manager: Any, tokenized_obj: Any) -> None:
    """Give each copy of a seeded n > 1 request a seed of its own; the first keeps the request's.

    The copies share one sampling_params object and pass here one after the other, so that object
    carries the seed of the next copy. The max_new_tokens=0 request that warms the prefix cache
    before them has an object of its own.
    """
    shared = tokenized_obj.sampling_params
    if not is_ssd():
        return
    if shared is None or shared.n <= 1 or shared.sampling_seed is None:
        return
    tokenized_obj.sampling_params = copy.copy(shared)
    shared.sampling_seed = next_copy_seed(shared.sampling_seed)


def hold_back_half_characters(printable: str, text: str) -> str | None:
    """What to stream of a text whose last token ends within a character: all before it.

    SGLang holds back words too, so a longer text may have less to show than it had before, and the
    detokenizer sends that part twice; it happens when a round brings several tokens.
    """
    if not is_ssd():
        return None
    return text.rstrip("\ufffd")


def keep_the_token_behind_a_grammars_end(
    accept: Callable[..., list[int]], processor: Any, req: Any, tokens: int | list[int]
) -> list[int]:
    """What a request keeps of a run, and for the end of it, whether its grammar had ended before
    the last token that it keeps.

    Plain decode looks for the end before the grammar takes the token, so one token follows; the
    target chose it freely, as it would have. SGLang drops what follows in a run.
    """
    if not is_ssd():
        return accept(processor, req, tokens)
    had_ended = req.grammar.is_terminated()
    kept = accept(processor, req, tokens)
    if not had_ended and isinstance(tokens, list) and req.grammar.is_terminated():
        had_ended = len(kept) < len(tokens)
        kept = tokens[: len(kept) + 1]
    req.ssd_grammar_had_ended = had_ended
    return kept


def end_where_plain_decode_ends(
    update: Callable[..., None], req: Any, new_accepted_len: int = 1
) -> None:
    """A run ends its request where its tokens one by one would have ended it.

    Plain decode looks for stops after every token; SGLang looks for one stop string after the
    other, then regexes, then tokens, each in the whole run. A grammar that has taken the run is
    looked at only if it had ended before; after a prefill it has not taken the token yet.
    """
    if not is_ssd():
        return update(req, new_accepted_len)
    params, grammar = req.sampling_params, req.grammar
    if not req.__dict__.pop("ssd_grammar_had_ended", True):
        req.grammar = None
    try:
        if new_accepted_len > 1 and (params.stop_strs or params.stop_regex_strs):
            _update_token_by_token(update, req, new_accepted_len)
        else:
            update(req, new_accepted_len)
    finally:
        req.grammar = grammar
    if req.finished():
        # Counted of the whole run; thinking comes first, so what is cut off was counted last.
        num_left = len(req.output_ids_through_stop)
        req.reasoning_tokens = min(req.reasoning_tokens, num_left)


def _update_token_by_token(update: Callable[..., None], req: Any, new_accepted_len: int) -> None:
    run = req.output_ids[-new_accepted_len:]
    del req.output_ids[-new_accepted_len:]
    for index, token in enumerate(run):
        req.output_ids.append(token)
        update(req, 1)
        if req.finished():
            req.output_ids.extend(run[index + 1 :])
            break


def save_the_target_alone(save: Callable[..., None], updater: Any, params: dict[str, Any]) -> None:
    """SGLang saves the model of a draft worker too; ours has none, the drafter has it."""
    if not is_ssd():
        return save(updater, params)
    worker, updater.draft_worker = updater.draft_worker, None
    try:
        save(updater, params)
    finally:
        updater.draft_worker = worker
