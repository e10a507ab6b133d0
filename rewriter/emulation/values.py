"""The values of collectives and messages in a world of uniform ranks: every rank holds what this one holds.

They have no meaning, but what follows them stays in range: sums are as large as sums of as many ranks,
quantized payloads can be decoded, counts add up. A scatter's shard from a rank of which nothing is known is zeros; a
broadcast leaves what the rank has. A rank receives what it sends itself: of one size and dtype, oldest first, as known
when it waits, since programs begin receives before the sends that belong to them, or after. What nothing was sent for
is zeros.

Tensors are written through `.data`: c10d's backends do not report them to autograd either.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from rewriter.fabric import Kind

_KEPT = 64  # sends that no receive belonged to
# no arithmetic: what is summed in them is taken as it is
_OPAQUE = (torch.bool, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


def uniform(
    kind: Kind,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    ranks: int,
    rank: int,
    root: int | None,
    reduction: str,
) -> None:
    """Write `outputs` of a collective; see `EmulatedOperation` for what the tensors are."""
    with torch.no_grad():
        if kind == "all_reduce" or (kind == "reduce" and rank == root):
            for x in outputs:
                _reduce(x.data, x.data, ranks, reduction)
        elif kind in ("all_gather", "gather"):
            _repeat(inputs[0].data, outputs, ranks)
        elif kind == "reduce_scatter":
            own = _part(inputs, ranks, rank)
            _reduce(own.reshape(outputs[0].shape), outputs[0].data, ranks, reduction)
        elif kind == "all_to_all":
            _repeat(_part(inputs, ranks, rank), outputs, ranks)
        elif kind == "scatter":
            outputs[0].data.copy_(inputs[rank].data) if inputs else outputs[0].data.zero_()


def _part(tensors: Sequence[Tensor], ranks: int, rank: int) -> Tensor:
    if len(tensors) == ranks:
        return tensors[rank].data
    flat = tensors[0].data.reshape(-1)
    size = flat.numel() // ranks
    return flat[rank * size : (rank + 1) * size]


def _repeat(own: Tensor, outputs: Sequence[Tensor], ranks: int) -> None:
    if len(outputs) == 1 and outputs[0].numel() == ranks * own.numel():
        if own.numel():
            _rows(own.reshape(1, -1), outputs[0].data.view(ranks, -1))
        return
    same = [x.data for x in outputs if x.numel() == own.numel()]
    if same:
        torch._foreach_copy_(same, [own.reshape(x.shape) for x in same])
    for x in outputs:
        if x.numel() != own.numel():
            _tile(own, x.data)


def _rows(own_1N: Tensor, out_PN: Tensor) -> None:
    """Each row = `own`, which may be one of them: FSDP gathers in place."""
    row, rest = divmod(own_1N.data_ptr() - out_PN.data_ptr(), own_1N.nbytes)
    if rest or not 0 <= row < len(out_PN):
        out_PN.copy_(own_1N)
        return
    out_PN[:row].copy_(own_1N)
    out_PN[row + 1 :].copy_(own_1N)


def _tile(own: Tensor, out: Tensor) -> None:
    """`own` again and again: splits that a program chose on its own, of counts that are not uniform."""
    if own.numel() == 0:
        out.zero_()
        return
    times = -(-out.numel() // own.numel())
    out.copy_(own.reshape(-1).repeat(times)[: out.numel()].view(out.shape))


def _reduce(x: Tensor, out: Tensor, ranks: int, reduction: str) -> None:
    """`out` = the reduction of `ranks` times `x`; the two may be the same memory."""
    if x.dtype in _OPAQUE or reduction in ("avg", "min", "max", "band", "bor"):
        _copy(x, out)
    elif reduction in ("sum", "premul_sum", "product"):
        product = reduction == "product"
        torch.pow(x, ranks, out=out) if product else torch.mul(x, ranks, out=out)
        if x.dtype == torch.float16 or (product and x.is_floating_point()):  # the largest value is near
            out.clamp_(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)
    elif ranks % 2:
        _copy(x, out)
    else:  # bxor of an even number of equal values
        out.zero_()


def _copy(x: Tensor, out: Tensor) -> None:
    if x.data_ptr() != out.data_ptr():
        out.copy_(x)


class Mailbox:
    """Tensors that this rank sends, which are alive until their operations end."""

    def __init__(self) -> None:
        self._sent: deque[weakref.ref[Tensor]] = deque(maxlen=_KEPT)

    def send(self, x: Tensor) -> None:
        self._sent.append(weakref.ref(x))

    def write(self, out: Tensor) -> None:
        """Take the oldest tensor of the size and dtype of `out` as its values."""
        for index, held in enumerate(self._sent):
            sent = held()
            if sent is not None and (sent.numel(), sent.dtype) == (out.numel(), out.dtype):
                del self._sent[index]
                out.data.copy_(sent.data.reshape(out.shape))
                return
        out.data.zero_()
