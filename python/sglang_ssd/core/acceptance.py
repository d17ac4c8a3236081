"""Which drafts of a chain are right: those that equal the target's own tokens, up to the first that
does not. With shared noise this one rule serves greedy and sampled rows alike."""

from __future__ import annotations

import torch


def accept_chain(
    draft_tokens: torch.Tensor,  # [B, K] int64
    target_tokens: torch.Tensor,  # [B, K + 1] int64, the target's token after bonus, d1 .. dK
    num_drafts: torch.Tensor,  # [B] int64, what lies behind is padding
) -> tuple[torch.Tensor, torch.Tensor]:
    """num_correct_drafts [B] int64, and accept_lens [B] int64 = num_correct_drafts + 1.

    Row b accepts target_tokens[b, :accept_lens[b]]; the last of them is the new bonus token.
    """
    num_steps = draft_tokens.shape[1]
    places = torch.arange(num_steps, device=draft_tokens.device)
    correct = (draft_tokens == target_tokens[:, :num_steps]) & (places < num_drafts[:, None])
    num_correct_drafts = correct.cumprod(dim=1).sum(dim=1)
    return num_correct_drafts, num_correct_drafts + 1
