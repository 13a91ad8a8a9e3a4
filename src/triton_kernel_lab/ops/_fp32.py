"""fp32 arithmetic that the compiler must leave as it is written, for results within 1e-5 of float64."""

from __future__ import annotations

from triton_kernel_lab.ops._triton import INTERPRET, tl, triton

__all__ = ["dot_add", "rounded"]

_COMPILED = tl.constexpr(not INTERPRET)


@triton.jit
def rounded(x):
    """fp32 x as a value of its own, behind a copy that the compiler does not see through.

    Otherwise it joins a product and a later difference, or a sum of sums, into
    multiply-adds that round once where the program rounds twice. In a - x y
    with a equal to the rounded x y that leaves the rounding error instead of zero.
    """
    if _COMPILED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b for tiles a [M, K] and b [K, N].

    In fp32 a tile's product is summed by itself and then added: the error of
    one long sum grows with the square root of its terms, that of sums of sums
    with the root of the longest. 16-bit inputs bring a larger error of their own.
    """
    if a.dtype == tl.float32:
        acc += rounded(tl.dot(a, b, input_precision=PRECISION))
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc
