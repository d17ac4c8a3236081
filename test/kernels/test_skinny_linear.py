"""skinny_linear against float64, and what its callers rely on beyond the numbers."""

import sys

import pytest
import torch

pytest.importorskip("numba", reason="needs numba, which sglang brings")

from sglang_ssd_kernels import host_jit
from sglang_ssd_kernels import skinny_linear as skinny
from sglang_ssd_kernels.skinny_linear import (
    CHUNK,
    MAX_GROUP,
    PASS_GROUPS,
    TILE,
    host_linear,
    pays_off,
    skinny_linear,
    skinny_linear_reference,
    use_skinny_linear,
)

DTYPES = (torch.float32, torch.bfloat16)
# Whole tiles and chunks, then a rest of each, less than one of each, and several blocks of K.
SHAPES = [
    (2 * TILE, 4 * CHUNK),
    (TILE + 5, 3 * CHUNK + 7),
    (3, 5),
    (1, CHUNK),
    (TILE + 1, 1),
    (11, 4500),
]
ROW_COUNTS = [1, 2, 3, 4, 5, 6, 7, 13, 24, MAX_GROUP * PASS_GROUPS, 40]


def operands(num_rows, num_out, num_in, x_dtype, weight_dtype, *, with_bias):
    generator = torch.Generator().manual_seed(num_rows * 7919 + num_out * 31 + num_in)
    x = torch.randn(num_rows, num_in, generator=generator).to(x_dtype)
    weight = torch.randn(num_out, num_in, generator=generator).to(weight_dtype)
    bias = torch.randn(num_out, generator=generator).to(weight_dtype) if with_bias else None
    return x, weight, bias


def assert_close_to_float64(out, x, weight, bias):
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.double().abs().T
    magnitude += 0 if bias is None else bias.double().abs()
    # A float32 sum of K products in 8 lanes: at most K/8 + 4 roundings of a partial sum each.
    num_roundings = x.shape[1] / 8 + 8
    bound = magnitude * num_roundings * 2**-24
    if out.dtype == torch.bfloat16:
        bound = bound + exact.abs() * 2**-8
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_equals_float64_within_float32_accumulation(
    num_out, num_in, x_dtype, weight_dtype, with_bias
):
    for num_rows in ROW_COUNTS:
        x, weight, bias = operands(
            num_rows, num_out, num_in, x_dtype, weight_dtype, with_bias=with_bias
        )
        out = skinny_linear(x, weight, bias)
        assert out.dtype == x_dtype
        assert_close_to_float64(out, x, weight, bias)
        assert_close_to_float64(skinny_linear_reference(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(weight_dtype):
    """Verify and decode of one token give the same bits: no tie falls differently."""
    x, weight, bias = operands(40, TILE + 5, 4500 + 7, torch.float32, weight_dtype, with_bias=True)
    alone = torch.cat([skinny_linear(x[row : row + 1], weight, bias) for row in range(40)])
    for num_rows in ROW_COUNTS:
        out = skinny_linear(x[40 - num_rows :], weight, bias)
        assert torch.equal(out, alone[40 - num_rows :]), f"{num_rows} rows"


def test_threads_do_not_change_the_result():
    x, weight, bias = operands(5, 20 * TILE + 3, 500, torch.float32, torch.bfloat16, with_bias=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = skinny_linear(x, weight, bias)
        torch.set_num_threads(2)
        for _ in range(20):
            assert torch.equal(skinny_linear(x, weight, bias), single)
    finally:
        torch.set_num_threads(before)
    assert host_jit._gomp_parallel is not None or sys.platform != "linux"


def test_strided_operands():
    """A slice of a wider projection, and a weight that is part of a fused one."""
    wide = torch.randn(5, 300)
    weight = torch.randn(70, 200).to(torch.bfloat16)
    x, part = wide[:, 50:150], weight[:, 20:120]
    expected = skinny_linear(x.contiguous(), part.contiguous())
    assert torch.equal(skinny_linear(x, part), expected)
    columns = x.T.contiguous().T
    assert columns.stride(1) != 1
    assert torch.equal(skinny_linear(columns, part), expected)
    bias = torch.randn(140)[::2]
    assert torch.equal(skinny_linear(x, part, bias), skinny_linear(x, part, bias.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_go_another_way_to_the_same_result(dtype, monkeypatch):
    """The switch from few rows to many is one of speed."""
    monkeypatch.setitem(skinny.MAX_SKINNY_ROWS, dtype, 7)
    monkeypatch.setattr(skinny, "WIDENED_COLUMNS", 40)
    for num_rows, is_skinny in ((7, True), (8, False)):
        x, weight, bias = operands(num_rows, TILE + 5, 100, dtype, dtype, with_bias=True)
        out = host_linear(x, weight, bias)
        assert out.dtype == dtype
        assert_close_to_float64(out, x, weight, bias)
        assert use_skinny_linear(num_rows, weight) == is_skinny
        assert torch.equal(out, skinny_linear(x, weight, bias)) or not is_skinny


def test_which_weights_pay_off():
    assert pays_off(torch.ones(4, 3))
    assert not pays_off(torch.ones(4, 3).half())
    assert not pays_off(torch.ones(4, 3).T)
    assert not pays_off(torch.ones(4))
    short = torch.ones(4, 3).to(torch.bfloat16)
    assert pays_off(short) != torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_no_rows():
    assert skinny_linear(torch.randn(0, 64), torch.randn(50, 64)).shape == (0, 50)


def test_what_is_not_finite_stays_in_its_row():
    """Weights beyond a tile or a chunk are never read into a result, not even times zero."""
    x, weight, _ = operands(2, TILE + 5, 3 * CHUNK + 7, *DTYPES, with_bias=False)
    weight[3] = float("nan")
    x[1, 0] = float("inf")
    out = skinny_linear(x.to(torch.bfloat16), weight)
    assert out[:, 3].isnan().all()
    others = torch.arange(weight.shape[0]) != 3
    assert out[0, others].isfinite().all()
    assert out[1, others].isinf().all()


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.ones(2, 3), torch.ones(4, 5), None, "invalid shape of x: expected .* got"),
        (torch.ones(3), torch.ones(4, 3), None, "invalid shape of x"),
        (
            torch.ones(2, 3),
            torch.ones(4, 3),
            torch.ones(3),
            r"invalid shape of bias: expected \[4\]",
        ),
        (torch.ones(2, 3).half(), torch.ones(4, 3), None, "invalid type of x"),
        (torch.ones(2, 3), torch.ones(4, 3).int(), None, "invalid type of weight"),
        (torch.ones(2, 3), torch.ones(3, 4).T, None, "invalid strides of weight"),
    ],
)
def test_refuses(x, weight, bias, message):
    with pytest.raises(ValueError, match=message):
        skinny_linear(x, weight, bias)
