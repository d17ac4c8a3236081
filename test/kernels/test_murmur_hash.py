"""Our hash equals the Triton kernel of SGLang's seeded sampler, bit for bit (interpreter)."""

import os
import subprocess
import sys

import pytest
import torch

from sglang_ssd_kernels.reference import murmur_hash32_all

pytest.importorskip("triton", reason="needs triton")
pytest.importorskip("sglang", reason="needs sglang")

NUM_COLUMNS = 1500  # more than one block of the kernel

# The interpreter is chosen when triton is imported, so the kernel runs in a process of its own.
RUN_KERNEL = """
import sys
import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
seeds, positions, num_columns, path = torch.load(sys.argv[1])
hashes = torch.empty((len(seeds), num_columns), dtype=torch.uint32)
murmur_hash32_kernel[(len(seeds), -(-num_columns // 1024))](
    seeds.to(torch.uint64), positions, torch.arange(num_columns), hashes, len(seeds), num_columns,
    BLOCK_SIZE=1024,
)
torch.save(hashes.to(torch.int64), path)
"""


@pytest.mark.sglang
def test_hash_equals_the_triton_kernel(tmp_path):
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (24,), generator=generator)
    seeds[:6] = torch.tensor([0, 1, -1, 42, 2**63 - 1, -(2**63)])
    positions = torch.randint(0, 2**31 - 1, (24,), generator=generator)
    positions[:2] = torch.tensor([0, 2**31 - 1])
    torch.save((seeds, positions, NUM_COLUMNS, str(tmp_path / "out.pt")), tmp_path / "in.pt")
    subprocess.run(
        [sys.executable, "-c", RUN_KERNEL, str(tmp_path / "in.pt")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
        timeout=300,
    )
    expected = torch.load(tmp_path / "out.pt")
    hashes = murmur_hash32_all(seeds, positions, NUM_COLUMNS)
    assert torch.equal(hashes.long() & 0xFFFFFFFF, expected)
