"""The target's speculative worker: one round of SSD, seen from the target.

`forward_batch_generation` is the round. It follows SGLang's spec-V2 worker contract (speculative/
base_spec_worker.py): state between rounds travels in the result alone, because the scheduler undoes
every change to the batch. Only TP rank 0 has a DraftClient; it broadcasts the drafts once a round,
after all waits, so the ranks cannot diverge. The drafter hears of an outcome before the scheduler
processes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_device, get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_ssd.core.acceptance import accept_chain
from sglang_ssd.core.shared_noise import request_seed
from sglang_ssd.target import hooks
from sglang_ssd.target.draft_client import DraftClient
from sglang_ssd.target.draft_rule import draft_rule
from sglang_ssd.target.plain_decode import needs_plain_decode, opts_out
from sglang_ssd.target.reporting import RoundClock, RoundReporter
from sglang_ssd.target.row_transforms import RowTransforms
from sglang_ssd.target.stats import PlainCause
from sglang_ssd.target.verify import (
    CoupledSampler,
    SSDDraftInput,
    SSDVerifyInput,
    build_verify_tokens,
    choose_target_tokens,
)
from sglang_ssd.trace import Tracer
from sglang_ssd.wire.messages import MAX_RID_CHARS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

Publish = Callable[[torch.Tensor], None]


class Drafts:
    """The drafts of one round, equal on every rank."""

    __slots__ = ("num_drafts", "tokens", "width")

    def __init__(self, *, num_drafts: torch.Tensor, tokens: torch.Tensor, width: int) -> None:
        self.num_drafts = num_drafts  # [B] int64
        self.tokens = tokens  # [B, K] int64
        self.width = width  # verify width W = 1 + max(num_drafts)


class SSDWorker(BaseSpecWorker):
    """Verifies the drafter's chains on SGLang's target worker."""

    def __init__(
        self,
        server_args: ServerArgs,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._config = hooks.replica_config()
        self._device = get_device().device
        self._num_steps: int = get_spec().speculative_num_steps
        # Of a round at the context's end: what lies behind it is never committed, and models with
        # learned positions have none there.
        self._last_position: int = target_worker.model_config.context_len - 1
        self._tp_group = get_parallel().tp_group
        self._is_first_rank = self._tp_group.rank_in_group == 0
        self._tracer = Tracer(self._config.trace if self._is_first_rank else None, "target")
        self._transforms = RowTransforms()
        self._sampler = CoupledSampler()
        target_worker.model_runner.sampler = self._sampler
        self._client: DraftClient | None = None
        if self._is_first_rank:
            self._client = hooks.connect_client(
                server_args=server_args,
                config=self._config,
                model_config=target_worker.model_config,
                tokenizer=target_worker.tokenizer,
                num_steps=self._num_steps,
                tracer=self._tracer,
            )
        self._reporter: RoundReporter | None = None
        if self._client is not None:
            self._reporter = hooks.make_reporter(self._client)

    @property
    def draft_worker(self) -> None:
        """None: no draft model lives here; SGLang's hooks for its pools and graphs are no-ops."""
        return None

    def clear_cache_pool(self) -> None:
        """SGLang's /flush_cache: the drafter's sequences go with the target's."""
        if self._client is not None:
            self._client.close_all()

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None = None,
        pp_proxy_tensors: None = None,
    ) -> GenerationBatchResult:
        """One prefill chunk, or one round: drafts in, verify, accept, outcome out."""
        if batch.forward_mode.is_extend() or batch.forward_mode.is_idle():
            return self._prefill(batch, on_publish)
        times = RoundClock()
        drafts = self._collect_drafts(batch)
        times.note_drafts()
        verify = self._prepare_verify(batch, drafts)
        with self._tracer.span("verify", rows=len(batch.reqs), width=drafts.width):
            result = self._target_worker.forward_batch_generation(batch, is_verify=True)
        with self._tracer.span("accept"):
            target_tokens = self._choose(batch, drafts, verify, result)
            num_correct, accept_lens = accept_chain(
                drafts.tokens[:, : drafts.width - 1], target_tokens, drafts.num_drafts
            )
            self._fill_result(batch, result, target_tokens, accept_lens, on_publish)
            self._commit(batch, drafts, target_tokens, num_correct, times)
        if self._reporter is not None:
            self._reporter.note_round(times)
        batch.forward_mode = ForwardMode.DECODE
        return result

    def _prefill(self, batch: ScheduleBatch, on_publish: Publish | None) -> GenerationBatchResult:
        """A prefill chunk; the drafter hears of the prompt first, so that both prefill at once."""
        if self._client is not None:
            self._open_sequences(self._client, batch.reqs)
            self._client.keep_alive()
        self._sampler.seeds = self._seeds(batch)
        self._transforms.start(batch.reqs)
        self._transforms.penalise_prefill(batch)
        with self._tracer.span("prefill", tokens=batch.extend_num_tokens or 0):
            result = self._target_worker.forward_batch_generation(batch)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        result.next_draft_input = SSDDraftInput(bonus_tokens=result.next_token_ids.to(torch.int64))
        result.accept_lens = torch.ones(len(batch.reqs), dtype=torch.int32, device=self._device)
        result.new_seq_lens = batch.seq_lens
        result.speculative_num_draft_tokens = self._num_steps + 1
        self._commit_first_tokens(batch.reqs, result.next_token_ids)
        return result

    def _open_sequences(self, client: DraftClient, reqs: list[Req]) -> None:
        for req in reqs:
            if client.knows(req.rid):
                continue
            cause = self._why_plain(req)
            if cause is not None:
                client.decline(req.rid, cause)
                continue
            client.open(
                rid=req.rid,
                tokens=req.full_untruncated_fill_ids,
                rule=draft_rule(req, seed=self._seed(req)),
            )

    def _why_plain(self, req: Req) -> PlainCause | None:
        """Why drafts could never serve this request: scoring, health checks and aborts end here."""
        max_new_tokens = req.sampling_params.max_new_tokens
        num_left = None if max_new_tokens is None else max_new_tokens - len(req.output_ids)
        if req.to_finish or (num_left is not None and num_left <= 1):
            return "ending"
        if opts_out(req):
            return "opt_out"
        if needs_plain_decode(req) or len(req.rid) > MAX_RID_CHARS:
            return "parameter"
        return None

    def _commit_first_tokens(self, reqs: list[Req], next_token_ids: torch.Tensor) -> None:
        """Report the first token of prompts that ended here; a middle chunk's token is junk."""
        if self._client is None and not self._transforms.applies_to(reqs):
            return
        done = [
            (req, [token])
            for req, token in zip(reqs, next_token_ids.tolist(), strict=True)
            if req.extend_end == len(req.full_untruncated_fill_ids)
        ]
        new_tokens = [tokens for _, tokens in done]
        self._transforms.extend([req for req, _ in done], new_tokens)
        if self._client is not None:
            self._client.commit(
                rids=[req.rid for req, _ in done],
                new_tokens=new_tokens,
                num_verified=[0] * len(done),
            )

    def _collect_drafts(self, batch: ScheduleBatch) -> Drafts:
        """This round's drafts: rank 0 waits for them, at most the deadline, and tells all ranks."""
        rows: list[list[int]] = [[] for _ in batch.reqs]
        if self._client is not None:
            rows = self._client.collect([req.rid for req in batch.reqs])
        padded = [[len(row), *row, *[0] * (self._num_steps - len(row))] for row in rows]
        packed = torch.tensor(padded, dtype=torch.int64, device=self._device)  # [B, 1 + K]
        width = 1 + max(len(row) for row in rows)
        if self._tp_group.world_size > 1:
            packed = self._tp_group.broadcast(packed, src=0)
            width = 1 + int(packed[:, 0].max())
        return Drafts(num_drafts=packed[:, 0], tokens=packed[:, 1:], width=width)

    def _prepare_verify(self, batch: ScheduleBatch, drafts: Drafts) -> SSDVerifyInput:
        """Make the decode batch a verify of width W whose KV goes behind the committed prefix."""
        tokens = build_verify_tokens(
            batch.spec_info.bonus_tokens.to(torch.int64),
            drafts.tokens,
            drafts.num_drafts,
            drafts.width,
        )
        places = batch.seq_lens[:, None] + torch.arange(drafts.width, device=self._device)
        rows = batch.req_to_token_pool.req_to_token[batch.req_pool_indices[:, None], places]
        verify = SSDVerifyInput(
            verify_tokens=tokens,
            positions=places.reshape(-1).clamp(max=self._last_position).to(torch.int64),
            capture_hidden_mode=(
                CaptureHiddenMode.FULL if batch.return_hidden_states else CaptureHiddenMode.NULL
            ),
        )
        batch.spec_info = verify
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = tokens.reshape(-1)
        batch.out_cache_loc = rows.reshape(-1).to(torch.int64)
        return verify

    def _choose(
        self,
        batch: ScheduleBatch,
        drafts: Drafts,
        verify: SSDVerifyInput,
        result: GenerationBatchResult,
    ) -> torch.Tensor:
        """The target's own tokens [B, W] int64, the same on every rank."""
        target_tokens = choose_target_tokens(
            result.logits_output.next_token_logits,
            batch=batch,
            verify_tokens=verify.verify_tokens,
            num_drafts=drafts.num_drafts,
            transforms=self._transforms,
            seeds=self._seeds(batch),
            positions=verify.positions,
        )
        if self._tp_group.world_size > 1:
            target_tokens = self._tp_group.broadcast(target_tokens.contiguous(), src=0)
        return target_tokens

    def _fill_result(
        self,
        batch: ScheduleBatch,
        result: GenerationBatchResult,
        target_tokens: torch.Tensor,  # [B, W] int64
        accept_lens: torch.Tensor,  # [B] int64
        on_publish: Publish | None,
    ) -> None:
        width = target_tokens.shape[1]
        flat = target_tokens.reshape(-1)
        if batch.return_logprob:
            compute_spec_logprobs(batch, result.logits_output, flat, chain_stride=width)
        new_seq_lens = batch.seq_lens + accept_lens
        if on_publish is not None:
            on_publish(new_seq_lens)
        last = (accept_lens - 1).to(torch.int64)[:, None]
        result.next_token_ids = flat.to(torch.int32)
        result.accept_lens = accept_lens.to(torch.int32)
        result.new_seq_lens = new_seq_lens
        result.next_draft_input = SSDDraftInput(
            bonus_tokens=target_tokens.gather(1, last).squeeze(1)
        )
        result.speculative_num_draft_tokens = self._num_steps + 1
        result.speculative_output_stride = width

    def _commit(
        self,
        batch: ScheduleBatch,
        drafts: Drafts,
        target_tokens: torch.Tensor,
        num_correct: torch.Tensor,
        times: RoundClock,
    ) -> None:
        """Tell the drafter how the round ended; one copy from the device brings all of it."""
        has_history = self._transforms.applies_to(batch.reqs)
        if self._client is None and not has_history:
            return
        outcome = [num_correct[:, None], drafts.num_drafts[:, None], target_tokens]
        rows: list[list[int]] = torch.cat(outcome, dim=1).tolist()  # [B, 2 + W]
        times.note_outcome()
        correct = [row[0] for row in rows]
        new_tokens = [tokens[: k + 1] for k, _, *tokens in rows]
        if has_history:
            self._transforms.extend(batch.reqs, new_tokens)
        if self._client is None:
            return
        rids = [req.rid for req in batch.reqs]
        self._client.note_correct_drafts(rids, correct)
        self._client.commit(rids=rids, new_tokens=new_tokens, num_verified=[row[1] for row in rows])

    def _seeds(self, batch: ScheduleBatch) -> torch.Tensor | None:
        """Noise seed per row [B] int64; None when every row is greedy, so nothing is drawn."""
        if batch.sampling_info.is_all_greedy:
            return None
        seeds = [self._seed(req) for req in batch.reqs]
        return torch.tensor(seeds, dtype=torch.int64, device=self._device)

    def _seed(self, req: Req) -> int:
        seed = req.sampling_params.sampling_seed
        if seed is not None:
            return seed
        return request_seed(base_seed=self._target_worker.random_seed, rid=req.rid)
