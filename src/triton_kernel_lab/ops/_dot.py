"""A matrix product whose sum in fp32 stays within 1e-5 of float64 over thousands of terms."""

from __future__ import annotations

from triton_kernel_lab.ops._triton import INTERPRET, tl, triton

__all__ = ["dot_add"]

_COMPILED = tl.constexpr(not INTERPRET)


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b for tiles a [M, K] and b [K, N].

    In fp32 a tile's product is summed by itself and then added: the error of
    one long sum grows with the square root of its terms, that of sums of sums
    with the root of the longest. 16-bit inputs bring a larger error of their own.
    """
    if a.dtype == tl.float32:
        part = tl.dot(a, b, input_precision=PRECISION)
        if _COMPILED:
            # An opaque copy: the compiler would make one long sum of the two additions again.
            part = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [part], dtype=tl.float32, is_pure=True, pack=1)
        acc += part
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc
