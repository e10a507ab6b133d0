"""An oracle of quantized collectives: it quantizes and sums slice by slice in one process, in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rewriter.kernels import dequantize, parse_format, quantize

AXES = ("node", "local")


def place(group, shape):
    """A group of all ranks, or their mesh, or nobody else."""
    if shape == "alone":
        return None
    return group if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=AXES[-len(shape) :])


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `rank` holds: heavy-tailed, and different on each."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, scale = (torch.randn(*shape, generator=generator) for _ in range(2))
    return (x * (0.2 * scale).exp() + 0.01 * rank).to(dtype)


@dataclass(frozen=True)
class Oracle:
    """Y nodes × X ranks; formats inside a node and between nodes. All in fp64 but for what is quantized."""

    nodes: int
    local: int
    inside: str
    between: str

    @property
    def ranks(self) -> int:
        return self.nodes * self.local

    @property
    def last(self) -> str:
        return self.between if self.nodes > 1 else self.inside

    def reduced(self, slice_of: list[Tensor], owner: int) -> Tensor:
        """The sum for `owner` of what each rank holds of its slice."""
        if self.ranks == 1:
            return slice_of[0].double()
        node, place = divmod(owner, self.local)
        sums = []
        for y in range(self.nodes):
            parts = [slice_of[y * self.local + x] for x in range(self.local)]
            sums.append(sum(p.double() if x == place else sent(p, self.inside) for x, p in enumerate(parts)))
        between = [s if y == node else sent(s.float(), self.between) for y, s in enumerate(sums)]
        return torch.stack(between).sum(0)

    def all_reduce(self, xs: list[Tensor]) -> Tensor:
        if self.ranks == 1:
            return xs[0].double()
        n, block = xs[0].numel(), max(parse_format(f).block for f in (self.inside, self.between))
        size = -(-n // (self.ranks * block)) * block
        padded = [torch.cat([x.flatten(), x.new_zeros(self.ranks * size - n)]).view(self.ranks, size) for x in xs]
        total = [self.reduced([p[r] for p in padded], r).float() for r in range(self.ranks)]
        return torch.cat([sent(t, self.last) for t in total])[:n].view(xs[0].shape)

    def all_gather(self, xs: list[Tensor]) -> Tensor:
        return torch.stack([x.double() if self.ranks == 1 else sent(x, self.last) for x in xs])

    def bytes(self, n: int, reduces: bool, gathers: bool) -> dict[str, int]:
        """{axis: bytes that a rank sends, and receives} for slices of n elements."""
        inside, between = (parse_format(f).payload_bytes(n) for f in (self.inside, self.between))
        if self.nodes == 1:
            between = inside
        found = {
            "local": (self.local - 1) * self.nodes * (reduces * inside + gathers * between),
            "node": (self.nodes - 1) * (reduces + gathers) * between,
        }
        return {axis: count for axis, count in found.items() if count}


def sent(x: Tensor, format: str) -> Tensor:
    """What arrives of x."""
    return dequantize(quantize(x, format), format, x.shape, torch.float32).double()


def differing(found: Tensor, expected: Tensor) -> float:
    """Part of the elements that are not the expected ones, rounded to their dtype."""
    if not expected.numel():
        return 0.0
    limit = (torch.finfo(found.dtype).eps if found.dtype != torch.float32 else 1e-5) * expected.abs().max()
    return ((found.double() - expected).abs() > limit).double().mean().item()


# A sum that lies between two levels may be rounded to the other one where fp32 adds in another order.
TIES = 0.003


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()
