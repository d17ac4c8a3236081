"""The noise on a GPU is the noise on CPU, and hashes as SGLang's Triton kernel does there."""

from __future__ import annotations

import pytest
import torch

from sglang_ssd.core.shared_noise import gumbel_noise
from sglang_ssd_kernels.reference import murmur_hash32_all

NUM_COLUMNS = 151936  # Qwen2's vocabulary
ROWS = 12


@pytest.fixture
def keys() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=generator)
    return seeds, torch.randint(0, 2**31 - 1, (ROWS,), generator=generator)


def test_hash_equals_the_triton_kernel(keys: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Red when the compiled kernel hashes otherwise than its interpreter, which CPU tests run."""
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel

    seeds, positions = (key.cuda() for key in keys)
    hashes = torch.empty((ROWS, NUM_COLUMNS), dtype=torch.uint32, device="cuda")
    columns = torch.arange(NUM_COLUMNS, device="cuda")
    murmur_hash32_kernel[(ROWS, -(-NUM_COLUMNS // 1024))](
        seeds.to(torch.uint64), positions, columns, hashes, ROWS, NUM_COLUMNS, BLOCK_SIZE=1024
    )
    ours = murmur_hash32_all(seeds, positions, NUM_COLUMNS)
    assert torch.equal(ours.long() & 0xFFFFFFFF, hashes.to(torch.int64))


def test_noise_is_that_of_the_cpu(keys: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Red when a drafter on another kind of device than its target draws by other noise."""
    seeds, positions = keys
    tokens = torch.arange(NUM_COLUMNS).expand(ROWS, -1)
    on_cpu = gumbel_noise(seeds, positions, tokens)
    on_gpu = gumbel_noise(seeds.cuda(), positions.cuda(), tokens.cuda()).cpu()
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-5)
    assert torch.equal(on_gpu.argmax(dim=1), on_cpu.argmax(dim=1))
