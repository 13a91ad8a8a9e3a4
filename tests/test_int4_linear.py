"""4-bit linear layers: the layout bit by bit, closed forms, groups, padding, layouts, launches; on the GPU if any."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import operator_checks as checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import DEVICE, DTYPES, INTERPRETED, assert_right, assert_same_bits, randn, strided

from triton_kernel_lab import routing
from triton_kernel_lab.lab import check
from triton_kernel_lab.ops import _int4_pack, _launch, _split
from triton_kernel_lab.ops.int4_linear import int4_linear, int4_linear_reference, pack_int4, unpack_int4

op = importlib.import_module("triton_kernel_lab.ops.int4_linear")
STREAM = {"kernel": "stream", "m_tiles": 2, "n_tiles": 1, "k_warps": 2, "n_warps": 1, "unroll": 2, "programs": 1}
TILE = {"kernel": "tile", "block_m": 64, "block_n": 32, "num_warps": 4, "stages": 3, "programs": 1}
# The interpreter computes with NumPy, which warns where a GPU is silent.
overflowing = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)


@pytest.fixture(autouse=True)
def served_by_triton() -> Iterator[None]:
    """No test here is answered by the PyTorch form unless it says so."""
    _launch.forget_plans()
    with routing.strict():
        yield
    _launch.forget_plans()


def layer(n: int, k: int, group: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return pack_int4(randn(n, k, dtype=dtype, seed=seed), group)


def oracle(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """The formula in float64, column by column from the words of the layout's description."""
    rows, k = scales.shape[0], x.shape[-1]
    y = torch.zeros(*x.shape[:-1], rows, dtype=torch.float64, device=x.device)
    values = packed.view(torch.uint8).cpu().long()
    for column in range(k):
        tile, run, word = column // 128, column % 128 // 32, column % 32
        low_first = values[:, tile, :, 2 * word] + 256 * values[:, tile, :, 2 * word + 1]
        integers = (low_first.flatten()[:rows] // 16**run % 16 - 8).double().to(x.device)
        y += x[..., column : column + 1].double() * (integers * scales[:, column // group].double())
    return y


def exact(shape: tuple[int, int], integers: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """Weights that are these integers: packed, with scales of one."""
    packed = _int4_pack.store_integers(integers.to(DEVICE))
    return packed, torch.ones(shape[0], -(-shape[1] // group), dtype=dtype, device=DEVICE)


def assert_close(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Twice what a product rounded once may be off: where weights are rounded too, as eager PyTorch rounds them."""
    unit = 1e-6 if y.dtype == torch.float32 else torch.finfo(y.dtype).eps
    assert check.verdict(check.measure(y, expected), check.Limit(2 * unit, unit)) == []


# The layout.


@pytest.mark.parametrize("config", [STREAM, TILE], ids=["stream", "tile"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_f37_each_pair_of_nibbles_is_recovered_exactly(
    dtype: torch.dtype, storage: torch.dtype, config: dict[str, Any]
) -> None:
    """One-hot rows of x give back each weight of bytes that hold all 256 pairs, signed or unsigned storage."""
    packed = (torch.arange(1024) % 256).to(torch.uint8).view(1, 1, 16, 64).to(DEVICE)
    expected = torch.empty(16, 128, dtype=dtype)
    for row in range(16):
        for place in range(64):
            byte = (64 * row + place) % 256
            column = place // 2 + 64 * (place % 2)
            expected[row, column], expected[row, column + 32] = byte % 16 - 8, byte // 16 - 8
    with _launch.forced(config):
        y = int4_linear(
            torch.eye(128, dtype=dtype, device=DEVICE),
            packed.view(storage),
            torch.ones(16, 1, dtype=dtype, device=DEVICE),
            128,
        )
    assert torch.equal(y.t(), expected.to(DEVICE))


def test_f37_the_worked_byte_of_the_documentation() -> None:
    """0x8F at place 6 of a row is 7 in column 3 and 0 in column 35, as the head of the layout says."""
    w = torch.zeros(1, 128, device=DEVICE)
    w[0, 3], w[0, 4] = 7.0, -8.0
    packed, scales = pack_int4(w, 128)
    assert (scales.item(), packed[0, 0, 0, 6].item(), packed[0, 0, 0, 8].item()) == (1.0, 0x8F, 0x80)
    assert "0x8F at place 6" in (_int4_pack.__doc__ or "")
    assert set(packed.flatten().tolist()) == {0x88, 0x8F, 0x80}


def test_f37_nibbles_in_the_other_order_are_noticed() -> None:
    """A packer that swaps the nibbles of each byte does not pass for this one."""
    packed, scales = layer(33, 256, 128, torch.float16)
    x = randn(3, 256, dtype=torch.float16)
    y = int4_linear(x, packed >> 4 | packed << 4, scales, 128)
    assert check.verdict(check.measure(y, oracle(x, packed, scales, 128)), check.Limit(0.1, 0.1)) != []


@pytest.mark.parametrize("shape", [(1, 2), (16, 128), (33, 130), (17, 300), (40, 100)])
def test_integers_survive_storage(shape: tuple[int, int]) -> None:
    """What is stored is loaded again, and what fills the last tiles is zero."""
    integers = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8).to(DEVICE)
    packed = _int4_pack.store_integers(integers)
    down, across = packed.shape[:2]
    whole = _int4_pack.load_integers(packed, 16 * down, 128 * across)
    assert torch.equal(_int4_pack.load_integers(packed, *shape), integers)
    assert whole.abs().sum() == integers.abs().sum()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_weight_is_off_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    """Quantising clips nothing: each weight comes back within half its scale, whichever sign is the larger."""
    w = torch.cat((randn(20, 300, dtype=dtype), -randn(20, 300, dtype=dtype).abs(), randn(20, 300, dtype=dtype).abs()))
    packed, scales = pack_int4(w, 64)
    back = unpack_int4(packed, scales, 64, 300)
    steps = scales.float().repeat_interleave(64, 1)[:, :300]
    # The scale is rounded to the dtype, and so is the product.
    assert ((back.float() - w.float()).abs() <= steps * (0.5 + 16 * torch.finfo(dtype).eps)).all()
    again, same = pack_int4(back, 64)
    assert torch.equal(again, packed) or not torch.equal(same, scales)


def test_a_group_of_zeros_stays_zero_and_a_nan_shows() -> None:
    """No group divides by its own zero scale; a NaN among the weights makes its outputs NaN and no others."""
    w = randn(18, 256)
    w[3, 128:] = 0.0
    w[5, 7] = math.nan
    packed, scales = pack_int4(w, 128)
    assert (scales[3, 1].item(), unpack_int4(packed, scales, 128, 256)[3, 128:].abs().max().item()) == (0.0, 0.0)
    y = int4_linear(randn(2, 256), packed, scales, 128)
    assert y.isnan().any(0).nonzero().flatten().tolist() == [5]


def test_packing_uses_the_whole_range() -> None:
    """A group whose extremes are -8 and 7 steps has each of the sixteen integers."""
    w = torch.arange(-8, 8, device=DEVICE).float().mul(0.25).expand(3, 16)
    packed, scales = pack_int4(w, 16)
    assert torch.equal(scales, torch.full((3, 1), 0.25, device=DEVICE))
    assert torch.equal(unpack_int4(packed, scales, 16, 16), w)


# Closed forms.


def test_f42_a_long_sum_of_ones_is_exact_each_time() -> None:
    """16384 ones are summed in fp32 and rounded once, also where programs share a sum, and again on a second call."""
    packed, scales = exact((16, 16384), torch.ones(16, 16384, dtype=torch.int8), 128, torch.float16)
    x = torch.ones(1, 16384, dtype=torch.float16, device=DEVICE)
    with _launch.forced(STREAM | {"programs": 4, "k_warps": 4, "unroll": 4}):
        for _ in range(2):
            assert torch.equal(int4_linear(x, packed, scales, 128), torch.full((1, 16), 16384.0).to(x))


@pytest.mark.parametrize("rows", [1, 17])
def test_the_layer_is_linear_in_x_and_in_its_scales(rows: int) -> None:
    """Twice x, or twice the scales, gives exactly twice y, and -x its negative."""
    packed, scales = layer(33, 256, 64, torch.float16)
    x = randn(rows, 256, dtype=torch.float16)
    y = int4_linear(x, packed, scales, 64)
    assert_same_bits(int4_linear(x * 2, packed, scales, 64), y * 2)
    assert_same_bits(int4_linear(x, packed, scales * 2, 64), y * 2)
    assert torch.equal(int4_linear(-x, packed, scales, 64), -y)


@overflowing
@pytest.mark.parametrize("rows", [1, 20])
def test_what_is_not_finite_comes_out_where_pytorch_has_it(rows: int) -> None:
    """Infinity keeps its sign through a weight, meets a zero weight as NaN, and NaN spreads over its row alone."""
    packed, scales = layer(40, 256, 128, torch.float32)
    x = randn(rows, 256)
    x[0, 3] = math.inf
    x[rows // 2, 200] = math.nan if rows > 1 else -math.inf
    y, expected = int4_linear(x, packed, scales, 128), int4_linear_reference(x, packed, scales, 128)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())
    assert torch.equal(y[y.isinf()], expected[y.isinf()])


# Groups.


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize(("k", "group"), [(430, 32), (100, 64), (96, 128), (100, 96), (34, 2), (386, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_f39_each_group_has_its_own_scale_and_the_last_may_be_short(
    dtype: torch.dtype, k: int, group: int, rows: int
) -> None:
    """ceil(K / group) scales count, though the last is ten times the others and its group is short."""
    packed, scales = layer(20, k, group, dtype)
    assert scales.shape == (20, -(-k // group))
    scales = scales.clone()
    scales[:, -1] *= 10
    x = randn(rows, k, dtype=dtype)
    limit = check.Limit(2.0**-9, 2.0**-10) if dtype != torch.float32 else check.Limit(2e-6, 2e-6)
    if dtype == torch.bfloat16:
        limit = check.Limit(2.0**-6, 2.0**-7)
    assert (
        check.verdict(check.measure(int4_linear(x, packed, scales, group), oracle(x, packed, scales, group)), limit)
        == []
    )


@pytest.mark.parametrize("group", [0, -1, -128, 7, 129])
def test_f39_a_group_size_that_does_not_fit_names_itself_and_k(group: int) -> None:
    """Sizes that are zero, negative or odd are one ValueError with K and the size, wherever they come in."""
    packed, scales = layer(16, 128, 128, torch.float16)
    x = randn(1, 128, dtype=torch.float16)
    expected = f"group_size: expected a positive even number of the K = 128 columns, got {group}."
    for call in (
        lambda: int4_linear(x, packed, scales, group),
        lambda: unpack_int4(packed, scales, group, 128),
        lambda: pack_int4(randn(16, 128), group),
    ):
        with pytest.raises(ValueError, match="group_size") as caught:
            call()
        assert str(caught.value).endswith(expected)


@pytest.mark.parametrize("k", [1, 7, 15, 127, 4095])
def test_f40_an_odd_k_is_named(k: int) -> None:
    """No last half byte is dropped: an odd number of columns is refused with the group size."""
    with pytest.raises(
        ValueError, match=rf"^pack_int4: K: expected an even number of columns for groups of 32, got {k}.$"
    ):
        pack_int4(torch.zeros(3, k), 32)
    packed, scales = layer(3, k + 1, 32, torch.float32)
    with pytest.raises(ValueError, match=rf"^int4_linear: K: expected an even number .* got {k}.$"):
        int4_linear(torch.zeros(1, k, device=DEVICE), packed, scales, 32)


def test_f38_there_are_no_zero_points() -> None:
    """Passing one, by place or by name, is a TypeError of the signature."""
    packed, scales = layer(16, 128, 128, torch.float16)
    x: Any = randn(1, 128, dtype=torch.float16)
    call: Any = int4_linear
    with pytest.raises(TypeError):
        call(x, packed, scales, 128, torch.zeros_like(scales))
    with pytest.raises(TypeError):
        call(x, packed, scales, 128, zeros=torch.zeros_like(scales))


# Shapes.


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 3, 2), (2, 17, 130), (1, 40, 1030), (7, 33, 258), (16, 50, 258), (17, 33, 130), (64, 17, 258), (100, 9, 130)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_f23_f40_any_shape_and_nothing_beside_it(dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    """Whatever M, N and K: right, though NaN lies beside x and the scales and sevens fill the last tiles."""
    packed, scales = layer(n, k, 128, dtype)
    integers = _int4_pack.load_integers(packed, n, k)
    down, across = packed.shape[:2]
    whole = torch.full((16 * down, 128 * across), 7, dtype=torch.int8, device=DEVICE)
    whole[:n, :k] = integers
    wide_x = torch.full((rows + 2, k + 6), math.nan, dtype=dtype, device=DEVICE)
    x = wide_x[1:-1, 3:-3].copy_(randn(rows, k, dtype=dtype))
    wide_scales = torch.full((scales.shape[1] + 2, n + 6), math.nan, dtype=dtype, device=DEVICE)
    inner = wide_scales[1:-1, 3:-3].t().copy_(scales)
    y = int4_linear(x, _int4_pack.store_integers(whole), inner, 128)
    assert_right(y, x.double() @ (integers.double() * scales.double().repeat_interleave(128, 1)[:, :k]).t(), dtype)
    # A row of x counts for its own row of y alone.
    if rows == 17:
        alone = int4_linear(x[3:4], packed, scales, 128)
        assert_right(alone, y[3:4].double(), dtype)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("shape", "n"), [((0, 128), 16), ((2, 0, 256), 7), ((3, 128), 0), ((2, 0), 5)])
def test_f04_an_empty_dimension_gives_zeros_or_nothing(shape: tuple[int, ...], n: int, warm: bool) -> None:
    """No rows or no outputs give an empty tensor, K = 0 gives zeros, and nothing is launched, first call or not."""
    if warm:
        int4_linear(randn(1, 128), *layer(16, 128, 128, torch.float32), 128)
    bound = len(_launch.launches())
    packed, scales = pack_int4(torch.zeros(n, shape[-1], dtype=torch.float16, device=DEVICE), 128)
    x = torch.ones(shape, dtype=torch.float16, device=DEVICE)
    y = int4_linear(x, packed, scales, 128)
    assert (y.shape, y.dtype, y.device) == ((*shape[:-1], n), x.dtype, x.device)
    assert torch.equal(y, torch.zeros_like(y))
    assert len(_launch.launches()) == bound


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_shape_group_and_strides_agree_with_float64(data: st.DataObject) -> None:
    """Whatever the rank, sizes, group, dtype and strides of x and the scales: the formula, as on contiguous copies."""
    leading = data.draw(st.lists(st.integers(1, 5), max_size=2))
    n, k = data.draw(st.integers(1, 40)), 2 * data.draw(st.integers(1, 140))
    group = data.draw(st.sampled_from([32, 64, 128, 160, 6]))
    dtype = data.draw(st.sampled_from(DTYPES))
    packed, drawn = layer(n, k, group, dtype)
    strides = [data.draw(st.sampled_from([0, 1, 3, 70, 300])) for _ in leading]
    x = strided([*leading, k], [*strides, data.draw(st.sampled_from([1, 1, 2]))], dtype, data.draw(st.integers(0, 9)))
    scales = drawn if data.draw(st.booleans()) else drawn.repeat(1, 2).contiguous()[:, : drawn.shape[1]]
    scales = scales if data.draw(st.booleans()) else scales.float()
    y = int4_linear(x, packed, scales, group)
    assert_close(y, oracle(x, packed, scales, group))
    assert_same_bits(y, int4_linear(x.contiguous(), packed, scales.contiguous(), group))


# Addressing and layouts.

F01 = """
import operator_checks as checks, torch
from triton_kernel_lab import routing
from triton_kernel_lab.ops.int4_linear import int4_linear, pack_int4
x = checks.far_apart(64)
if x is None:
    print("no memory")
else:
    packed, scales = pack_int4(checks.randn(16, 64, dtype=torch.float16), 64)
    with routing.strict():
        assert torch.equal(int4_linear(x, packed, scales, 64), int4_linear(x.contiguous(), packed, scales, 64))
    print("same")
"""


def test_f01_offsets_beyond_two_to_the_31() -> None:
    """Rows of x that begin more than 2^31 elements apart are read where they are."""
    done = checks.run_python(F01)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no memory":
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    assert done.stdout.strip() == "same"


@pytest.mark.parametrize("rows", [3, 40])
def test_f01_scales_whose_groups_lie_beyond_two_to_the_31(rows: int) -> None:
    """Strides of the scales that 32 bits do not hold, times a group's number, reach the right scale."""
    packed, scales = layer(16, 300, 64, torch.float16)
    stride = 2**29
    try:
        buffer = torch.empty(4 * stride + 16, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    far = buffer.as_strided((16, 5), (1, stride)).copy_(scales)
    x = randn(rows, 300, dtype=torch.float16)
    assert_same_bits(int4_linear(x, packed, far, 64), int4_linear(x, packed, scales, 64))


LAYOUTS = {
    "every_second_column": lambda dtype: randn(64, 512, dtype=dtype)[:, ::2],
    "columns_first": lambda dtype: randn(256, 64, dtype=dtype).t(),
    "part_of_packed": lambda dtype: randn(4, 5, 1024, dtype=dtype).split([512, 256, 256], -1)[1],
    "rows_swapped": lambda dtype: randn(4, 5, 256, dtype=dtype).transpose(0, 1),
    "expanded": lambda dtype: randn(1, 256, dtype=dtype).expand(6, 256),
    "one_row": lambda dtype: randn(256, dtype=dtype),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_f07_x_of_any_layout(layout: str) -> None:
    """Any strides of x give the bits of a contiguous copy."""
    packed, scales = layer(33, 256, 128, torch.float16)
    x = LAYOUTS[layout](torch.float16)
    y = int4_linear(x, packed, scales, 128)
    assert_same_bits(y, int4_linear(x.contiguous(), packed, scales, 128))
    assert_right(y, oracle(x, packed, scales, 128), x.dtype)


@pytest.mark.parametrize(("layout", "copied"), [("rows_swapped", []), ("columns_first", [(64, 256)])])
def test_f07_no_more_is_copied_than_must_be(
    layout: str, copied: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that two strides describe are read in place, and the weights are never copied for the sake of x."""
    packed, scales = layer(16, 256, 128, torch.float16)
    x = LAYOUTS[layout](torch.float16)
    copies = checks.copies(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "clone", None)
    int4_linear(x, packed, scales, 128)
    assert copies == copied


def test_f07_weights_and_scales_of_any_layout() -> None:
    """Tiles that lie apart, and scales row by row or in a corner of more, give the same bits."""
    packed, scales = layer(33, 300, 64, torch.float16)
    x = randn(2, 300, dtype=torch.float16)
    y = int4_linear(x, packed, scales, 64)
    apart = packed.repeat(1, 1, 1, 2)[..., :64]
    assert not apart.is_contiguous()
    assert_same_bits(int4_linear(x, apart, scales, 64), y)
    assert_same_bits(int4_linear(x, packed, scales.contiguous(), 64), y)
    assert_same_bits(int4_linear(x, packed, scales.repeat(2, 2)[:33, :5], 64), y)


@pytest.mark.parametrize("rows", [2, 40])
def test_f10_misaligned_tensors_after_aligned_ones(rows: int) -> None:
    """Weights at odd addresses, scales and x off by an element, then aligned again: the same bits each time."""
    packed, scales = layer(17, 256, 64, torch.float16)
    x = randn(rows, 256, dtype=torch.float16)

    def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
        buffer = torch.empty(tensor.numel() + by, dtype=tensor.dtype, device=DEVICE)
        return buffer[by:].view(tensor.shape).copy_(tensor)

    expected = int4_linear(x, packed, scales, 64)
    plans = len(op._plans)
    for by_packed, by_scales, by_x in ((2, 0, 0), (0, 1, 0), (0, 0, 1), (3, 1, 1), (0, 0, 0)):
        y = int4_linear(
            shifted(x, by_x), shifted(packed, by_packed), shifted(scales.t().contiguous(), by_scales).t(), 64
        )
        assert_same_bits(y, expected)
    assert len(op._plans) > plans + 3


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[Any, ...]]] = {
    "dtype of x": lambda x, packed, scales: (x.float(), packed, scales, 128),
    "shape of x": lambda x, packed, scales: (x[:3], packed, scales, 128),
    "strides of x": lambda x, packed, scales: (x.repeat(1, 2)[:, :128], packed, scales, 128),
    "dtype of packed": lambda x, packed, scales: (x, packed.view(torch.int8), scales, 128),
    "dense packed": lambda x, packed, scales: (x, packed.repeat(1, 1, 1, 2)[..., :64], scales, 128),
    "shape of the scales": lambda x, packed, scales: (x, packed, scales[:31], 128),
    "dtype of the scales": lambda x, packed, scales: (x, packed, scales.half(), 128),
    "strides of the scales": lambda x, packed, scales: (x, packed, scales.repeat(1, 2)[:, :1], 128),
    "group size": lambda x, packed, scales: (x, packed, scales, 256),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_serves_its_own_signature_alone(change: str) -> None:
    """Each property on which a launch depends has plans of its own, and a repeated call makes none."""
    x, (packed, scales) = randn(4, 128, dtype=torch.float16), layer(32, 128, 128, torch.float32)
    for _ in range(2):
        int4_linear(x, packed, scales, 128)
        assert len(op._plans) == 1
    changed = CHANGES[change](x, packed, scales)
    assert_close(int4_linear(*changed), oracle(*changed))
    assert len(op._plans) > 1


def test_what_does_not_fit_is_refused_after_what_did() -> None:
    """A plan of the same sizes on another device, or of as many tiles in other places, lets nothing pass."""
    x, (packed, scales) = randn(4, 256), layer(32, 256, 128, torch.float32)
    int4_linear(x, packed, scales, 128)
    for x_, packed_, scales_ in (
        (x.to("meta"), packed, scales),
        (x, packed.to("meta"), scales),
        (x, packed, scales.to("meta")),
        (x, packed.view(4, 1, 16, 64), scales),
    ):
        with pytest.raises(ValueError, match="expected"):
            int4_linear(x_, packed_, scales_, 128)


# Where programs share a sum.


class Streams:
    """What sharing memory asks of CUDA, with no GPU: the current device and stream, and whether it captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.stream, self.capturing = 0, 7, False
        active = SimpleNamespace(get_current_stream=lambda device: self.stream)
        monkeypatch.setattr(
            op, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=active)))
        )
        monkeypatch.setattr(op, "INTERPRET", False)
        monkeypatch.setattr(op, "_streams", {})
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def addresses(self, numbers: int = 100, programs: int = 3) -> tuple[int, int]:
        """Where a launch finds its parts and its counters."""
        self.last = op._workspace(torch.device("cpu", 0), numbers, programs)()
        parts, counters = self.last
        assert (parts.dtype, counters.dtype) == (torch.float32, torch.int32)
        assert parts.numel() >= numbers
        assert counters.numel() >= programs
        assert not counters.any()
        return parts.data_ptr(), counters.data_ptr()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_launches_of_one_stream_share_memory_and_those_of_two_do_not(streams: Streams) -> None:
    """Each stream keeps parts and counters of its own, for whatever shape comes next."""
    first = streams.addresses()
    streams.stream = 8
    second = streams.addresses()
    assert not set(first) & set(second)
    assert streams.addresses(50, 4) == second
    streams.stream = 7
    assert streams.addresses() == first


def kept() -> set[int]:
    """Addresses of all memory that is kept from launch to launch."""
    return {tensor.data_ptr() for pair in op._streams.values() for tensor in pair}


@pytest.mark.parametrize("reason", ["captured", "another device", "poisoned", "large", "many"])
def test_a_launch_has_memory_of_its_own_where_sharing_is_wrong(reason: str, streams: Streams) -> None:
    """Under capture, off the current device, where NaN is to show and beyond the bound, nothing is kept or shared."""
    streams.addresses()
    streams.capturing = reason == "captured"
    streams.device = int(reason == "another device")
    numbers, programs = op._PARTS + int(reason == "large"), op._COUNTERS + int(reason == "many")
    with check.poisoned() if reason == "poisoned" else contextlib.nullcontext():
        given = streams.addresses(100 if reason == "poisoned" else numbers, programs)
    assert not set(given) & kept()
    assert reason != "poisoned" or streams.last[0].isnan().all()


def test_what_streams_keep_is_bounded(streams: Streams) -> None:
    """A stream keeps its largest parts alone, up to 8 MiB, and no more than 32 streams keep any."""
    counters = streams.addresses(100)[1]
    assert streams.addresses(200)[1] == counters
    assert streams.addresses(150)[1] == counters
    ((parts, _),) = op._streams.values()
    assert parts.numel() == 200
    streams.addresses(op._PARTS)
    ((parts, _),) = op._streams.values()
    assert parts.numel() * parts.element_size() == 8 << 20
    for streams.stream in range(100):
        streams.addresses()
        assert len(op._streams) <= 32


# Gradients.


@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True), (False, False)])
def test_f49_f50_exactly_the_gradients_asked_for(asked: tuple[bool, bool]) -> None:
    """The graph is never cut: x and the scales get the gradients of the formula, if they ask; weights never do."""
    packed, scales = layer(20, 100, 64, torch.float32)
    x = randn(3, 100)
    leaves = [tensor.clone().requires_grad_(wants) for tensor, wants in zip((x, scales), asked, strict=True)]
    with routing.strict(False):
        y = int4_linear(leaves[0], packed, leaves[1], 64)
    assert y.requires_grad == any(asked)
    if not any(asked):
        return
    y.square().sum().backward()
    wide = [tensor.double().requires_grad_() for tensor in (x, scales)]
    oracle(wide[0], packed, wide[1], 64).square().sum().backward()
    for leaf, other, wants in zip(leaves, wide, asked, strict=True):
        assert (leaf.grad is not None) == wants
        assert leaf.grad is None or torch.allclose(leaf.grad.double(), other.grad, rtol=1e-4, atol=1e-3)


def test_f49_without_gradients_triton_serves() -> None:
    """Under no_grad, tensors that require gradients take the kernel: strict mode raises nothing."""
    packed, scales = layer(16, 128, 128, torch.float32)
    with torch.no_grad():
        y = int4_linear(randn(1, 128).requires_grad_(), packed, scales.requires_grad_(), 128)
    assert not y.requires_grad


def test_fp64_is_computed_in_fp64_by_pytorch() -> None:
    """A dtype that the kernel does not take goes to the reference, in its own precision."""
    packed, scales = layer(16, 130, 64, torch.float32)
    x = randn(2, 130).double()
    with pytest.raises(routing.FallbackError):
        int4_linear(x, packed, scales.double(), 64)
    with routing.strict(False), pytest.warns(routing.FallbackWarning, match="float64"):
        y = int4_linear(x, packed, scales.double(), 64)
    assert (y - oracle(x, packed, scales, 64)).abs().max() < 1e-12


# The compiler, fake and meta tensors.


def test_f56_compiles_into_one_graph() -> None:
    """torch.compile meets no graph break, and the result is the eager call's."""
    torch._dynamo.reset()
    packed, scales = layer(20, 100, 64, torch.float32)
    compiled = torch.compile(lambda x: int4_linear(x, packed, scales, 64) * 2, fullgraph=True, backend="eager")
    for rows in (1, 3):
        x = randn(rows, 100)
        assert torch.equal(compiled(x), int4_linear(x, packed, scales, 64) * 2)


def test_f56_a_batch_of_any_size_recompiles_no_more_than_expected() -> None:
    """One row, two and none make a graph each at most, and every other number takes that of two."""
    packed, scales = layer(20, 100, 64, torch.float32)
    batches = ((randn(rows, 100),) for rows in (1, 2, 0, 5, 7, 1, 0))
    assert checks.graphs_compiled(lambda x: int4_linear(x, packed, scales, 64), batches) <= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f56_meta_tensors_give_shape_dtype_and_strides(dtype: torch.dtype) -> None:
    """On the meta device packing and multiplying only describe what would come."""
    packed, scales = pack_int4(torch.empty(33, 130, dtype=dtype, device="meta"), 64)
    y = int4_linear(torch.empty(6, 4, 130, dtype=dtype, device="meta"), packed, scales, 64)
    assert (packed.shape, scales.shape, scales.dtype) == ((3, 2, 16, 64), (33, 3), dtype)
    assert (y.shape, y.dtype, y.stride(), y.is_meta) == ((6, 4, 33), dtype, (132, 33, 1), True)


def test_f56_torch_library_finds_the_op_sound() -> None:
    """torch.library's own check of schema, fake kernel and dispatch passes."""
    packed, scales = layer(20, 100, 64, torch.float32)
    torch.library.opcheck(op._int4_linear_op, (randn(3, 200)[:, ::2], packed, scales, 64))


# Launch configurations.

STREAMS = [
    {
        "kernel": "stream",
        "m_tiles": m_tiles,
        "n_tiles": n_tiles,
        "n_warps": n_warps,
        "k_warps": k_warps,
        "unroll": unroll,
        "programs": programs,
    }
    for m_tiles, n_tiles, n_warps, k_warps, unroll, programs in (
        (1, 1, 1, 4, 3, 1),
        (1, 2, 2, 2, 2, 1),
        (2, 1, 1, 1, 4, 1),
        (4, 2, 4, 1, 1, 1),
        (1, 1, 1, 2, 2, 40),
        (2, 2, 2, 4, 1, 12),
    )
]
DENSE = {"kernel": "dense", "block_n": 32, "num_warps": 4}
TILES = [TILE, TILE | {"block_n": 64, "programs": 8}, TILE | {"block_m": 128, "block_n": 16}]


# Filling memory is part of PyTorch's deterministic mode, which warns of cuBLAS.
@pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled:UserWarning")
@pytest.mark.parametrize(
    ("config", "group"),
    [
        *((config, 128) for config in (*STREAMS, *TILES, DENSE)),
        *((STREAMS[5], group) for group in (32, 48)),
        *((TILES[1], group) for group in (64, 48)),
        (DENSE, 48),
    ],
)
def test_f60_every_configuration_is_right_alone(config: dict[str, Any], group: int) -> None:
    """However the work is cut, with a rest, and with programs sharing a sum: the answer, in NaN-filled memory."""
    packed, scales = layer(20, 650, group, torch.float16)
    x = randn(9, 650, dtype=torch.float16)
    expected = x.double() @ unpack_int4(packed, scales.double(), group, 650).t()
    with _launch.forced(config), check.poisoned():
        y = int4_linear(x, packed, scales, group)
        assert_close(y, expected)
        assert_same_bits(int4_linear(x, packed, scales, group), y)


@pytest.mark.parametrize(("tiles", "programs", "stride", "aim"), [(224, 4, 8, 128), (12, 96, 4, 128), (7, 1, 4, 128)])
def test_shares_of_a_sum_are_whole_strides_and_cover_it(tiles: int, programs: int, stride: int, aim: int) -> None:
    """No program that shares a sum is left without tiles, and together they have all."""
    share, splits = op._split_of(programs, tiles, stride, aim)
    assert share * (splits - 1) < tiles <= share * splits
    assert splits == 1 or share % stride == 0


# Errors.


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"x": torch.zeros(())}, ValueError, "x: expected at least one dimension, got a scalar."),
        ({"x": torch.zeros(2, 128).int()}, TypeError, "x: expected a floating-point tensor, got torch.int32."),
        ({"packed": torch.zeros(1, 1, 16, 64).int()}, TypeError, "packed: expected uint8 or int8, got torch.int32."),
        (
            {"packed": torch.zeros(1, 2, 16, 64).byte()},
            ValueError,
            "packed: expected (1, 1, 16, 64) for N = 16 and K = 128, got (1, 2, 16, 64).",
        ),
        (
            {"scales": torch.zeros(16, 2)},
            ValueError,
            "scales: expected [N, 1] for K = 128 in groups of 128, got (16, 2).",
        ),
        (
            {"scales": torch.zeros(16, 1).half()},
            TypeError,
            "scales: expected the dtype of x, torch.float32, or torch.float32, got torch.float16.",
        ),
        ({"scales": torch.zeros(16, 1).int()}, TypeError, "scales: expected a floating-point tensor, got torch.int32."),
        ({"x": torch.zeros(2, 128, device="meta")}, ValueError, "packed: expected the device of x, meta, got cpu."),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    change: dict[str, torch.Tensor], kind: type[Exception], sentence: str
) -> None:
    """One sentence names the argument, what was expected and what came."""
    packed, scales = pack_int4(torch.zeros(16, 128), 128)
    given = {"x": torch.zeros(2, 128), "packed": packed, "scales": scales} | change
    with pytest.raises(kind) as caught:
        int4_linear(**given, group_size=128)
    assert str(caught.value) == f"int4_linear: {sentence}"


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "n", "k"),
    [
        *((torch.bfloat16, n, k) for n, k in ((1536, 1536), (48, 28672), (1000, 1000))),
        *((dtype, 1000, 1000) for dtype in (torch.float16, torch.float32)),
    ],
)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 100, 300])
def test_tracked_launches_are_right_on_a_gpu(rows: int, dtype: torch.dtype, n: int, k: int) -> None:
    """What the launch table chooses for this GPU gives the answer, bf16 included, the same bits 20 times (F22)."""
    for group in (128, 64):
        packed, scales = layer(n, k, group, dtype)
        x = randn(rows, k, dtype=dtype)
        wide = unpack_int4(packed, scales.double(), group, k)
        expected = x.double() @ wide.t()
        eager = check.measure(torch.nn.functional.linear(x, wide.to(dtype)), expected)
        y = int4_linear(x, packed, scales, group)
        assert check.verdict(check.measure(y, expected), check.limit(dtype, eager)) == []
        assert all(torch.equal(int4_linear(x, packed, scales, group), y) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [48, 1536])
def test_f62_a_captured_graph_follows_its_inputs(n: int) -> None:
    """Captured after one call and replayed on changed inputs, with and without a shared sum."""
    packed, scales = layer(n, 4096, 128, torch.float16)
    x = randn(2, 4096, dtype=torch.float16)
    int4_linear(x, packed, scales, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = int4_linear(x, packed, scales, 128)
    x.copy_(randn(2, 4096, dtype=torch.float16, seed=1))
    for _ in range(2):
        graph.replay()
        assert_same_bits(y, int4_linear(x, packed, scales, 128))


SHARED = STREAM | {"k_warps": 4, "n_tiles": 1, "programs": 128}


@pytest.mark.gpu
def test_two_streams_at_once_never_share_parts() -> None:
    """Launches that overlap on two streams, each of which adds parts of programs, give each stream its own answers."""
    packed, scales = layer(256, 16384, 128, torch.float16)
    xs = [randn(4, 16384, dtype=torch.float16, seed=seed) for seed in range(2)]
    with _launch.forced(SHARED):
        expected = [int4_linear(x, packed, scales, 128) for x in xs]
        streams = [torch.cuda.Stream() for _ in xs]
        torch.cuda.synchronize()
        found: list[list[torch.Tensor]] = [[], []]
        for _ in range(200):
            for stream, x, ys in zip(streams, xs, found, strict=True):
                with torch.cuda.stream(stream):
                    ys.append(int4_linear(x, packed, scales, 128))
        torch.cuda.synchronize()
    assert len({op._streams[x.get_device(), stream.cuda_stream][0].data_ptr() for stream in streams}) == 2
    for y, ys in zip(expected, found, strict=True):
        assert all(torch.equal(each, y) for each in ys)


@pytest.mark.gpu
def test_f62_a_graph_runs_beside_calls_of_the_stream_that_captured_it() -> None:
    """Replays that overlap with calls on the stream of the capture have parts and counters of their own."""
    packed, scales = layer(256, 16384, 128, torch.float16)
    xs = [randn(4, 16384, dtype=torch.float16, seed=seed) for seed in range(2)]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with _launch.forced(SHARED):
        expected = [int4_linear(x, packed, scales, 128) for x in xs]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            int4_linear(xs[0], packed, scales, 128)
        with torch.cuda.graph(graph, stream=side):
            y = int4_linear(xs[0], packed, scales, 128)
        torch.cuda.synchronize()
        beside = []
        for _ in range(200):
            graph.replay()
            with torch.cuda.stream(side):
                beside.append(int4_linear(xs[1], packed, scales, 128))
        torch.cuda.synchronize()
    assert_same_bits(y, expected[0])
    assert all(torch.equal(each, expected[1]) for each in beside)


def test_bf16_is_left_to_the_gpu() -> None:
    """What these tests say of 16 bits is fp16 alone where the interpreter runs, whose bf16 is not a GPU's (F64)."""
    assert (torch.bfloat16 in DTYPES) != INTERPRETED


# PyTorch begins its trees of graphs with an empty one, and says so.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.gpu
def test_what_a_stream_keeps_outlives_the_graphs_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory first kept while torch.compile warms up its CUDA graphs is not theirs, and answers stay right."""
    monkeypatch.setattr(op, "_streams", {})
    monkeypatch.setattr(_split, "_streams", {})
    packed, scales = layer(256, 16384, 128, torch.float16)
    compiled = torch.compile(lambda x: int4_linear(x, packed, scales, 128) + 1, mode="reduce-overhead", fullgraph=True)
    with _launch.forced(SHARED):
        for seed in range(5):
            x = randn(4, 16384, dtype=torch.float16, seed=seed)
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(x), int4_linear(x, packed, scales, 128) + 1)
