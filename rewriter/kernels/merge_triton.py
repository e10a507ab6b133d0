"""The kernel of `rewriter.kernels.merge`: reads every part once, from where it arrived, and writes o once, in the dtype
in which it is used next.

Limited by memory: c parts of n rows cost n · (c · (E · e + 4) + E · e' + 4) bytes, e and e' bytes of the dtypes in and
out. PyTorch's operators, each of which reads and writes fp32, move several times that.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from rewriter.kernels.devices import current_device

BLOCK = 2048  # elements of o per program: 16 for each of 128 threads
WARPS = 4


@triton.jit
def merge_kernel(
    o_parts,  # tuple of pointers [B, H, S, E], the last dimension contiguous
    lse_parts,  # tuple of pointers [B, H, S]
    o_strides,  # tuple of (batch, head, token) of each part, one after the other
    lse_strides,
    out,  # [B, H, S, E], contiguous
    lse_out,  # [B, H, S], contiguous
    heads,
    tokens,
    rows,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # 64 bits: a million tokens of 32 heads of 128 are more elements than 32 bits count
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    b, h, s = row // (heads * tokens), row // tokens % heads, row % tokens
    e = tl.arange(0, WIDTH)
    cells = real[:, None] & (e < E)[None, :]

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for p in tl.static_range(PARTS):
        at = b * lse_strides[3 * p] + h * lse_strides[3 * p + 1] + s * lse_strides[3 * p + 2]
        top = tl.maximum(top, tl.load(lse_parts[p] + at, mask=real, other=float("-inf")).to(tl.float32))
    # a row that saw nothing: weigh with exp(-inf - 0) = 0, as exp(-inf - -inf) is NaN
    shift = tl.where(top == float("-inf"), 0.0, top)

    total = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, WIDTH), tl.float32)
    for p in tl.static_range(PARTS):
        at = b * lse_strides[3 * p] + h * lse_strides[3 * p + 1] + s * lse_strides[3 * p + 2]
        weight = tl.exp(tl.load(lse_parts[p] + at, mask=real, other=float("-inf")).to(tl.float32) - shift)
        at = b * o_strides[3 * p] + h * o_strides[3 * p + 1] + s * o_strides[3 * p + 2]
        part = tl.load(o_parts[p] + at[:, None] + e[None, :], mask=cells, other=0.0).to(tl.float32)
        total += weight
        o += part * weight[:, None]
    total = tl.maximum(total, 1.0)  # the largest part weighs 1; 0 only where nothing saw a key

    o = o / total[:, None]
    tl.store(out + row[:, None] * E + e[None, :], o.to(out.dtype.element_ty), mask=cells)
    tl.store(lse_out + row, top + tl.log(total), mask=real)


def launch(parts: Sequence[tuple[Tensor, Tensor]], out: Tensor, lse: Tensor) -> None:
    """Write the merged parts to out [B, H, S, E] and lse [B, H, S] fp32, both contiguous.

    Parts whose last dimension is not contiguous are copied first; other strides may be any.
    """
    if out.numel() == 0:
        return
    outputs = tuple(o if o.stride(-1) == 1 else o.contiguous() for o, _ in parts)
    sums = tuple(part_lse for _, part_lse in parts)
    _, heads, tokens, size = out.shape
    rows = lse.numel()
    width = triton.next_power_of_2(size)
    per_program = max(1, BLOCK // width)
    with current_device(out):
        merge_kernel[(triton.cdiv(rows, per_program),)](
            outputs,
            sums,
            tuple(stride for o in outputs for stride in o.stride()[:3]),
            tuple(stride for part_lse in sums for stride in part_lse.stride()),
            out,
            lse,
            heads,
            tokens,
            rows,
            E=size,
            PARTS=len(parts),
            ROWS=per_program,
            WIDTH=width,
            num_warps=WARPS,
        )
