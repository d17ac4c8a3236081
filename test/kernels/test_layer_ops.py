"""Norm, rotary embedding and gated activation against their references and float64."""

import pytest
import torch

pytest.importorskip("numba", reason="needs numba, which sglang brings")

from sglang_ssd_kernels.rms_norm import rms_norm, rms_norm_reference
from sglang_ssd_kernels.rotary import apply_rotary_, apply_rotary_reference_
from sglang_ssd_kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

DTYPES = (torch.float32, torch.bfloat16)
EPSILON = {torch.float32: 2**-24, torch.bfloat16: 2**-8}
# One row, several, and enough for more than one thread; a width of no whole vector.
ROWS_AND_WIDTHS = [(1, 576), (5, 33), (3, 1), (90, 1536)]


@pytest.fixture(autouse=True, params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def randn(*shape, dtype, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def assert_close(out, exact, *, num_roundings):
    """Within a few float32 roundings, and one to the output's type."""
    bound = exact.abs() * (num_roundings * 2**-24 + EPSILON[out.dtype]) + 1e-30
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), ROWS_AND_WIDTHS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(rows, width, dtype, with_residual):
    x, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    residual = randn(rows, width, dtype=dtype, seed=2) if with_residual else None
    out, new_residual = rms_norm(x, weight, 1e-5, residual)
    _, expected_residual = rms_norm_reference(x, weight, 1e-5, residual)
    total = x.float() if residual is None else x.float() + residual.float()
    total = total.double()
    scale = (total.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    # Squares are summed in lanes: a few hundred roundings at most, halved by the root.
    assert_close(out, total * scale * weight.double(), num_roundings=width / 16 + 8)
    if with_residual:
        assert torch.equal(new_residual, expected_residual)
    else:
        assert new_residual is None
    alone = torch.cat([rms_norm(x[i : i + 1], weight, 1e-5)[0] for i in range(rows)])
    if not with_residual:
        assert torch.equal(out, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), ROWS_AND_WIDTHS)
def test_silu_and_mul(rows, width, dtype):
    x = randn(rows, 2 * width, dtype=dtype, scale=20.0)
    gate, up = x.double().chunk(2, dim=-1)
    exact = gate / (1 + (-gate).exp()) * up
    assert_close(silu_and_mul(x), exact, num_roundings=8)
    assert_close(silu_and_mul_reference(x), exact, num_roundings=8)


def test_silu_at_the_ends_of_float32():
    gate = torch.tensor([[-1e30, -200.0, -87.5, -87.0, 0.0, 87.0, 88.0, 200.0, 1e30, float("nan")]])
    out = silu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert out[0, 9].isnan()
    assert (out[0, 1:5].abs() < 1e-35).all()
    assert torch.equal(out[0, 5:9], gate[0, 5:9])


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 64), (6, 2)])
def test_rotary_turns_heads_in_place(head_dim, rotary_dim, dtype, cache_dtype):
    """The slices of a fused projection: what lies between and behind them stays as it is."""
    qkv = randn(70, 7 * head_dim, dtype=dtype)
    cos_sin = randn(50, rotary_dim, dtype=cache_dtype, seed=1)
    positions = torch.randint(0, 50, (70,), generator=torch.Generator().manual_seed(2))
    positions[0], positions[1] = 0, 49
    expected = qkv.clone()
    sizes = [4 * head_dim, 2 * head_dim, head_dim]
    apply_rotary_reference_(positions, *expected.split(sizes, dim=1)[:2], cos_sin, head_dim)
    apply_rotary_(positions, *qkv.split(sizes, dim=1)[:2], cos_sin, head_dim)
    assert not torch.equal(qkv, randn(70, 7 * head_dim, dtype=dtype))
    torch.testing.assert_close(qkv, expected, rtol=2 * EPSILON[dtype], atol=4 * EPSILON[dtype])


def test_rotary_refuses_a_position_without_angles():
    query, key = torch.ones(3, 8), torch.ones(3, 4)
    for position in (-1, 10):
        positions = torch.tensor([0, position, 9])
        with pytest.raises(ValueError, match=rf"expected 0\.\.9, got {position}"):
            apply_rotary_(positions, query, key, torch.ones(10, 4), 4)


def elsewhere(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: rms_norm(elsewhere(2, 3), torch.ones(3), 1e-5), "x"),
        (lambda: rms_norm(torch.ones(2, 3), elsewhere(3), 1e-5), "weight"),
        (lambda: rms_norm(torch.ones(2, 3), torch.ones(3), 1e-5, elsewhere(2, 3)), "residual"),
        (lambda: silu_and_mul(elsewhere(2, 4)), "x"),
        (lambda: turn(query=elsewhere(1, 8)), "query"),
        (lambda: turn(key=elsewhere(1, 8)), "key"),
        (lambda: turn(cos_sin=elsewhere(4, 4)), "cos_sin"),
        (lambda: turn(positions=elsewhere(1, dtype=torch.int64)), "positions"),
    ],
)
def test_refuses_memory_of_another_device(call, name):
    """Red when the address of such a tensor would reach native code."""
    with pytest.raises(ValueError, match=rf"invalid .*{name}: .* on meta"):
        call()


def turn(**replaced):
    operands = {
        "positions": torch.zeros(1, dtype=torch.int64),
        "query": torch.ones(1, 8),
        "key": torch.ones(1, 8),
        "cos_sin": torch.ones(4, 4),
    }
    apply_rotary_(*{**operands, **replaced}.values(), 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.ones(2, 3), torch.ones(4), 1e-5), "invalid shape of weight"),
        (
            lambda: rms_norm(torch.ones(2, 3), torch.ones(3), 1e-5, torch.ones(3)),
            "invalid shape of residual",
        ),
        (lambda: rms_norm(torch.ones(2, 3).half(), torch.ones(3), 1e-5), "invalid type of x"),
        (lambda: silu_and_mul(torch.ones(2, 3)), "invalid shape of x"),
        (
            lambda: apply_rotary_(
                torch.zeros(2, dtype=torch.int64),
                torch.ones(3, 8),
                torch.ones(2, 8),
                torch.ones(4, 4),
                4,
            ),
            "invalid shape of query",
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
