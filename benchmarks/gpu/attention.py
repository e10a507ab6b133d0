"""Section decode-attention of `run.py`: attention of one token by every kernel of torch, in a CUDA graph.

What a rank of a 70B model on 8 ranks computes in each layer of a decode step: 8 query heads of 128, one key/value head.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.report import Row, Scale, read_rate
from rewriter.kernels.decode_attention import decode_attention

HEADS, SIZE = 8, 128
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
FORMS = ("rows", "groups")
OWN = "rewriter"  # the kernel of a captured step, which reads from memory how many keys there are
CACHES = 1 << 28  # bytes of all caches, read in turns: a model's weights would have driven each from the L2 cache
LIMIT = 1e-2  # of the error, as a share of the norm: a few roundings to bf16
REFUSED = ("No available kernel", "No viable backend", "Invalid backend")


def attending(scale: Scale) -> None:
    rate = read_rate(scale)
    table = scale.table(
        f"Attention of one token, q [1, {HEADS}, 1, {SIZE}], one key/value head, bf16, in a CUDA graph; reading moves "
        f"{rate / 1e9:.0f} GB/s",
        ("keys, heads, kernel", "µs", "of reading", "error", "result"),
    )
    ways = [*itertools.product((False, True), FORMS, BACKENDS), (True, "groups", OWN)]
    for keys, (masked, form, backend) in itertools.product(scale.pick((1024, 4096, 16384), (40,)), ways):
        row = functools.partial(attention_row, scale, rate, keys, masked, form, backend)
        table.attempt(f"{keys}{', masked' * masked}, {form}, {backend}", row)


def attention_row(scale: Scale, rate: float, keys: int, masked: bool, form: str, backend: str) -> Row:
    """`masked`: a captured step knows on the device only how many keys there are, so it always has a mask."""
    torch.manual_seed(keys)
    caches = max(2, scale.pick(CACHES, 1) // (2 * keys * SIZE * 2))
    k, v = (torch.randn(caches, 1, 1, keys, SIZE, device=scale.device).bfloat16() for _ in range(2))
    q = torch.randn(1, HEADS, 1, SIZE, device=scale.device).bfloat16()
    seen = keys - keys // 8 if masked else keys
    mask = (torch.arange(keys, device=scale.device) < seen)[None, None, None] if masked else None
    attend = one_token(form)
    results: list[Tensor] = []
    last = torch.tensor(seen - 1, device=scale.device)

    def run() -> None:
        if backend == OWN:
            results[:] = [decode_attention(q, k[i], v[i], last, None, scale=SIZE**-0.5) for i in range(caches)]
            return
        with sdpa_kernel([BACKENDS[backend]]):
            results[:] = [attend(q, k[i], v[i], mask) for i in range(caches)]

    try:
        run()
    except RuntimeError as error:
        if not any(text in str(error) for text in REFUSED):
            raise
        return ("–", "–", "refused"), ""
    replay = scale.graph(run)
    seconds = scale.seconds(replay) / caches
    wide = [x.double() for x in (q, k[-1, :, :, :seen], v[-1, :, :, :seen])]
    exact = (wide[0] @ wide[1].transpose(-1, -2) * SIZE**-0.5).softmax(-1) @ wide[2]
    error = float((results[-1].double().view_as(exact) - exact).norm() / exact.norm())
    share = (k[0].nbytes + v[0].nbytes) / seconds / rate
    return (f"{seconds * 1e6:.1f}", f"{share:.0%}", f"{error:.1e}"), "" if error <= LIMIT else f"above {LIMIT}"


def one_token(form: str) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """rows: the heads are rows of one attention, as the runtime has it. groups: as torch has grouped queries."""

    def rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q.view(1, 1, HEADS, SIZE), k, v, attn_mask=mask)

    def groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return rows if form == "rows" else groups
