"""Ranks that share sequences are given the same ones, or say so: rows of several batches would mix without an error."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.runtime.exchange import gather_start

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64: neighbouring places get weights that look random
_PIECE = 1 << 22  # elements at a time: places take 8 bytes each


@torch.no_grad()
def check_agreement(group: ProcessGroup | None, device: torch.device, **inputs: Tensor | None) -> None:
    """Raises RewriterError on every rank of `group` unless all were given equal `inputs`, naming the first that differ.

    Ranks compare shapes and a sum of all values with weights by place: a few numbers, which the host reads. Left out
    while torch.compile traces.
    """
    if group is None or torch.compiler.is_compiling():
        return
    own = torch.stack([_digest(x, device) for x in inputs.values()])
    every = torch.stack([part for (part,) in gather_start([own], group, "agreement").wait()]).cpu()
    same = (every == every[0]).all(-1)  # [ranks, inputs]
    if bool(same.all()):
        return
    index = int((~same).any(0).nonzero()[0])
    other = int((~same[:, index]).nonzero()[0])
    what = " and ".join(_described(every[rank, index].tolist()) for rank in (0, other))
    raise RewriterError(
        f"{list(inputs)[index]} differ between ranks 0 and {other} of {group.size()} that share sequences: {what}. "
        "Pass the same full rows on all of them: give rows to the replicas of the mesh's dimension dp, not to all "
        "processes"
    )


def _digest(x: Tensor | None, device: torch.device) -> Tensor:
    """int64 [4]: dimensions (−1 without a tensor), the first and the second of them, the sum of weighted values."""
    if x is None:
        return torch.tensor([-1, 0, 0, 0], device=device)
    sizes = [x.dim(), *x.shape[:2], *[1] * max(0, 2 - x.dim())]
    return torch.cat([torch.tensor(sizes, device=device), checksum(x).to(device)[None]])


def checksum(x: Tensor) -> Tensor:
    """Of the bits of x, with weights by place: an int64 without dimensions."""
    bits = x.reshape(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].long()
        places = torch.arange(start + 1, start + 1 + len(piece), device=x.device) * _FACTOR
        total += (piece * (places ^ (places >> 29))).sum()
    return total


def _described(digest: list[int]) -> str:
    dimensions, *sizes, total = digest
    return "None" if dimensions < 0 else f"shape {sizes[:dimensions]} with check sum {total & 0xFFFFFFFF:08x}"
