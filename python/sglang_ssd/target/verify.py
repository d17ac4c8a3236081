"""The verify of one round: what goes into the target's forward and what its logits mean.

A round verifies a chain [bonus, d1 .. d_{W-1}] per row, W = 1 + the most drafts of any row. The
target's own token at every position is chosen from the fully processed logits, then drafts are
accepted while they equal it (shared noise above temperature 0), so the output never depends on the
drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_ssd.core.sampling_filter import filter_logprobs
from sglang_ssd.core.shared_noise import coupled_sample
from sglang_ssd.target.row_transforms import RowTransforms

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class SSDDraftInput(SpecInput):
    """What one round hands the next: the pending bonus token per row; drafts come by wire."""

    def __init__(self, *, bonus_tokens: torch.Tensor) -> None:
        # A plugin cannot add a type; what SGLang asks of this one is is_draft_input() alone.
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.bonus_tokens = bonus_tokens  # [B] int64
        self.future_indices: torch.Tensor | None = None  # [B] rows of the FutureMap (overlap)
        # Read by FutureMap's relay for every draft input; a chain over the wire has none of them.
        self.topk_p = None
        self.topk_index = None
        self.hidden_states = None

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        """Keep the rows new_indices, in that order."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: SSDDraftInput) -> None:
        """Append the rows of other."""
        if self.future_indices is not None:
            assert other.future_indices is not None, "both batches come from an overlapped forward"
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])


class SSDVerifyInput(SpecInput):
    """The chains under verification."""

    def __init__(
        self,
        *,
        verify_tokens: torch.Tensor,  # [B, W] int64: bonus, then drafts; padded with the bonus
        positions: torch.Tensor,  # [B * W] int64
        capture_hidden_mode: CaptureHiddenMode,
    ) -> None:
        # As above for is_verify_input(); FlashInfer reads fields of EAGLE's own off EAGLE_VERIFY.
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.verify_tokens = verify_tokens
        self.positions = positions
        self.capture_hidden_mode = capture_hidden_mode
        self.draft_token_num = verify_tokens.shape[1]
        self.num_tokens_per_req = verify_tokens.shape[1]
        self.num_tokens_for_logprob_per_req = verify_tokens.shape[1]


class CoupledSampler(Sampler):
    """SGLang's sampler, drawing with shared noise: it chooses the token after a prefill.

    The worker sets `seeds` before each prefill forward; everything around the draw (bias, grammar,
    logprobs) stays SGLang's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seeds: torch.Tensor | None = None  # [B] int64, of the prefill batch under way

    def _sample_from_probs(
        self,
        probs: torch.Tensor,  # [B, V] float
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,  # [B], of each row's last context token
        simple_sampling_case: bool,
    ) -> tuple[torch.Tensor, None]:
        if self.seeds is None:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        assert len(self.seeds) == len(probs), "seeds are those of the batch that is sampled"
        logprobs = _filter(torch.log(probs), sampling_info, requests=slice(None))
        return coupled_sample(logprobs, seeds=self.seeds, positions=positions).to(torch.int32), None


def build_verify_tokens(
    bonus_tokens: torch.Tensor,  # [B] int64
    draft_tokens: torch.Tensor,  # [B, K] int64
    num_drafts: torch.Tensor,  # [B] int64
    width: int,
) -> torch.Tensor:
    """Chains [B, width] int64; places behind a row's last draft repeat its bonus token."""
    chains = torch.cat([bonus_tokens[:, None], draft_tokens[:, : width - 1]], dim=1)
    places = torch.arange(width, device=chains.device)[None, :]
    return torch.where(places <= num_drafts[:, None], chains, bonus_tokens[:, None])


def choose_target_tokens(
    logits: torch.Tensor,  # [B * W, V] float, processed in place
    *,
    batch: ScheduleBatch,
    verify_tokens: torch.Tensor,  # [B, W] int64
    num_drafts: torch.Tensor,  # [B] int64
    transforms: RowTransforms,
    seeds: torch.Tensor | None,  # [B] int64, None when every row is greedy
    positions: torch.Tensor,  # [B * W] int64
) -> torch.Tensor:
    """The token the target itself chooses after every verified position: [B, W] int64.

    What it would draw behind a row's last draft is never looked at, and is not drawn.
    """
    batch_size, width = verify_tokens.shape
    process_logits(
        logits,
        batch=batch,
        verify_tokens=verify_tokens,
        num_drafts=num_drafts,
        transforms=transforms,
    )
    best = logits.argmax(dim=-1)
    if seeds is None:
        return best.view(batch_size, width)
    info = batch.sampling_info
    places = torch.arange(width, device=logits.device)[None, :]
    # A greedy row beside sampled ones must get what it gets alone, near-ties included.
    is_drawn = (info.top_ks != 1)[:, None] & (places <= num_drafts[:, None])
    rows = is_drawn.flatten().nonzero()[:, 0]
    requests = rows // width
    drawn = logits if len(rows) == len(logits) else logits[rows]
    logprobs = torch.log_softmax(drawn.float() / info.temperatures[requests], dim=-1)
    logprobs = _filter(logprobs, info, requests=requests)
    best[rows] = coupled_sample(logprobs, seeds=seeds[requests], positions=positions[rows])
    return best.view(batch_size, width)


def process_logits(
    logits: torch.Tensor,  # [B * W, V] float, changed in place
    *,
    batch: ScheduleBatch,
    verify_tokens: torch.Tensor,  # [B, W] int64
    num_drafts: torch.Tensor,  # [B] int64
    transforms: RowTransforms,
) -> None:
    """Everything SGLang does to logits before it chooses, in its order, at every verified row."""
    batch_size, width = verify_tokens.shape
    info = batch.sampling_info
    rows = logits.view(batch_size, width, -1)
    drafts: list[list[int]] | None = None
    if transforms.applies_to(batch.reqs):
        drafts = list_drafts(verify_tokens, num_drafts)
        transforms.penalise(rows, batch.reqs, drafts)
    if batch.has_grammar:
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=grammar_tree(verify_tokens, num_drafts),
            sampling_info=info,
            device=logits.device,
            barrier=None,
        )
        if mask is not None:
            mask.apply(logits)
    if info.logit_bias is not None:
        rows.add_(info.logit_bias[:, None, :])
    if drafts is not None and info.has_custom_logit_processor:
        transforms.apply_processors(rows, info, batch.reqs, drafts)
    sanitize_nan_logits(logits, "SSD verify: target logits")


def list_drafts(
    verify_tokens: torch.Tensor,  # [B, W] int64
    num_drafts: torch.Tensor,  # [B] int64
) -> list[list[int]]:
    """The drafts of each row, on the host."""
    chains: list[list[int]] = verify_tokens.tolist()
    return [chain[1 : 1 + num] for chain, num in zip(chains, num_drafts.tolist(), strict=True)]


def grammar_tree(
    verify_tokens: torch.Tensor,  # [B, W] int64
    num_drafts: torch.Tensor,  # [B] int64
) -> GrammarTree:
    """Chains that end with a row's last draft: no grammar is advanced over padding."""
    next_places = torch.arange(1, verify_tokens.shape[1] + 1, device=verify_tokens.device)
    next_token = torch.where(next_places <= num_drafts[:, None], next_places, -1)
    no_sibling = torch.full(verify_tokens.shape, -1, dtype=torch.int64)
    return GrammarTree.from_device(next_token, no_sibling, verify_tokens)


def _filter(
    logprobs: torch.Tensor,  # [R, V] float
    info: SamplingBatchInfo,
    *,
    requests: torch.Tensor | slice,  # [R] int64, of which request of the batch each row is
) -> torch.Tensor:
    return filter_logprobs(
        logprobs,
        top_ks=info.top_ks[requests],
        top_ps=info.top_ps[requests],
        min_ps=info.min_ps[requests],
    )
