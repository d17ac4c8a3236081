"""What changes a row's logits by the tokens before it: penalties and custom logit processors.

SGLang keeps one state per request and round; here every row of a verify gets its own. For that the
worker keeps the committed output of each request that needs it, on every rank: SGLang's own
`output_ids` lacks the last round while rounds overlap. A history begins with each prefill, so a
retracted request goes on with the output that it keeps, and it dies with its request.

Rows of requests without penalties and processors cost nothing here.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from sglang_ssd.core.row_penalties import (
    OutputHistory,
    is_penalised,
    known_tokens,
    penalise_rows,
    penalty_terms,
    row_occurrences,
    verify_runs,
)
from sglang_ssd.target.plain_decode import is_row_function

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo


class RowTransforms:
    """The histories of a worker's requests, and what follows from them."""

    def __init__(self) -> None:
        self._outputs: WeakKeyDictionary[Req, OutputHistory] = WeakKeyDictionary()

    def applies_to(self, reqs: Sequence[Req]) -> bool:
        return bool(self._outputs) and any(req in self._outputs for req in reqs)

    def start(self, reqs: Sequence[Req]) -> None:
        """These requests are prefilled now."""
        for req in reqs:
            if req.custom_logit_processor or is_penalised(req.sampling_params):
                self._outputs[req] = OutputHistory(req.output_ids)

    def extend(self, reqs: Sequence[Req], new_tokens: Sequence[Sequence[int]]) -> None:
        """Tokens that became final, per request; those without a history are passed over."""
        for req, tokens in zip(reqs, new_tokens, strict=True):
            output = self._outputs.get(req)
            if output is not None:
                output.extend(tokens)

    def penalise_prefill(self, batch: ScheduleBatch) -> None:
        """Penalise the token that a resumed request gets from its prefill.

        SGLang starts its own counts anew when a request is prefilled again.
        """
        resumed = [
            (row, output)
            for row, req in enumerate(batch.reqs)
            if is_penalised(req.sampling_params) and (output := self._outputs[req]).tokens
        ]
        if not resumed:
            return
        info = batch.sampling_info
        shape = (len(batch.reqs), info.vocab_size)
        additive = _dense(info.acc_additive_penalties, shape, 0.0, info)
        scaling = _dense(info.acc_scaling_penalties, shape, 1.0, info)
        for row, output in resumed:
            _fill_dense(additive[row], scaling[row], batch.reqs[row], output)
        info.acc_additive_penalties, info.acc_scaling_penalties = additive, scaling

    def penalise(
        self,
        rows: torch.Tensor,  # [B, W, V] float, changed in place
        reqs: Sequence[Req],
        drafts: Sequence[Sequence[int]],
    ) -> None:
        for req, req_rows, req_drafts in zip(reqs, rows, drafts, strict=True):
            params = req.sampling_params
            if is_penalised(params):
                runs = verify_runs(req_drafts)
                penalise_rows(
                    req_rows[: len(runs)],
                    rule=params,
                    output=self._outputs[req],
                    runs=runs,
                    stop_tokens=stop_tokens(req) if params.min_new_tokens > 0 else (),
                )

    def apply_processors(
        self,
        rows: torch.Tensor,  # [B, W, V] float, changed in place
        info: SamplingBatchInfo,
        reqs: Sequence[Req],
        drafts: Sequence[Sequence[int]],
    ) -> None:
        """Each processor once, over all rows that are its own."""
        for entry in (info.custom_logit_processor or {}).values():
            if is_row_function(entry.processor):
                self._apply_to_all_rows(rows, entry, info, reqs, drafts)
            else:
                self._apply_to_first_rows(rows, entry, info, reqs)

    def _apply_to_all_rows(
        self,
        rows: torch.Tensor,  # [B, W, V]
        entry: ProcessorEntry,
        info: SamplingBatchInfo,
        reqs: Sequence[Req],
        drafts: Sequence[Sequence[int]],
    ) -> None:
        """A function of the row: it sees the request as it will be when the row's turn comes."""
        places: list[tuple[int, int]] = []
        params: list[dict[str, Any] | None] = []
        for index in entry.rows:
            output = self._outputs[reqs[index]].tokens
            for place, run in enumerate(verify_runs(drafts[index])):
                places.append((index, place))
                at_row = _request_with(reqs[index], output + array("q", run))
                params.append(_params_with(info, index, at_row))
        at = tuple(torch.tensor(places, device=rows.device).T)
        rows[at] = entry.processor(rows[at], params).to(rows.dtype)

    def _apply_to_first_rows(
        self,
        rows: torch.Tensor,  # [B, W, V]
        entry: ProcessorEntry,
        info: SamplingBatchInfo,
        reqs: Sequence[Req],
    ) -> None:
        """Any other: its requests decode plainly, and it gets their own objects as in SGLang."""
        at = (torch.tensor(entry.rows, device=rows.device), 0)
        params = [_custom_params(info, index) for index in entry.rows]
        own = [reqs[index] for index in entry.rows]
        with _up_to_date(own, [self._outputs[req] for req in own]):
            rows[at] = entry.processor(rows[at], params).to(rows.dtype)


def stop_tokens(req: Req) -> set[int]:
    """What min_new_tokens forbids, as SGLang's penalizer collects it."""
    tokenizer = req.tokenizer
    found = set(req.sampling_params.stop_token_ids or ())
    found |= set(req.eos_token_ids or ())
    found |= set(tokenizer.additional_stop_token_ids or ())
    return {token for token in found | {tokenizer.eos_token_id} if token is not None}


def _request_with(req: Req, output_ids: array[int]) -> Req:
    """The request with another output; everything else is shared."""
    at_row = copy.copy(req)
    at_row.output_ids = output_ids
    return at_row


def _custom_params(info: SamplingBatchInfo, index: int) -> dict[str, Any] | None:
    assert info.custom_params is not None, "a batch with processors has their parameters"
    params: dict[str, Any] | None = info.custom_params[index]
    return params


def _params_with(info: SamplingBatchInfo, index: int, req: Req) -> dict[str, Any] | None:
    params = _custom_params(info, index)
    return params if params is None else {**params, "__req__": req}


@contextmanager
def _up_to_date(reqs: Sequence[Req], outputs: Sequence[OutputHistory]) -> Iterator[None]:
    """Meanwhile output_ids holds the last round's tokens too, which SGLang adds a round later."""
    known = [req.output_ids for req in reqs]
    try:
        for req, output in zip(reqs, outputs, strict=True):
            req.output_ids = output.tokens
        yield
    finally:
        for req, output_ids in zip(reqs, known, strict=True):
            req.output_ids = output_ids


def _dense(
    known: torch.Tensor | None, shape: tuple[int, int], neutral: float, info: SamplingBatchInfo
) -> torch.Tensor:  # [B, V] float32, the caller's own
    if known is not None:
        return known.clone()
    return torch.full(shape, neutral, dtype=torch.float32, device=info.device)


def _fill_dense(
    additive: torch.Tensor,  # [V] float32
    scaling: torch.Tensor,  # [V] float32
    req: Req,
    output: OutputHistory,
) -> None:
    params = req.sampling_params
    tokens, occurrences = row_occurrences(output.counts, [()])
    terms = penalty_terms(params, occurrences)
    columns = torch.from_numpy(tokens).to(additive.device)
    additive.zero_()
    scaling.fill_(1.0)
    additive[columns], scaling[columns] = (term[0].to(additive.device) for term in terms)
    if len(output.tokens) < params.min_new_tokens:
        forbidden = known_tokens(stop_tokens(req), vocab_size=len(additive))
        additive[forbidden] = -torch.inf
