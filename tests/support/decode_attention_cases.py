"""Cases of attention of one new token over a cache, in which every slot that is not seen holds NaN, and what it gives,
written out in fp64."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SLOTS = 300  # no multiple of a tile's keys, 16 to 128
BEYOND = 20  # slots of the memory after those
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# name: group of query heads, head sizes of keys and values, position, padding of two rows, window, softcap, sinks
SHAPES: dict[str, tuple[Any, ...]] = {
    "alone": (1, 64, 64, 0, None, None, None, False),
    "last": (3, 64, 64, SLOTS - 1, None, None, None, False),
    "groups of 8": (8, 80, 80, 170, (0, 40), None, None, False),
    "a window": (3, 128, 128, 201, None, 70, None, False),
    "a window of the token": (1, 64, 64, 201, None, 1, None, False),
    "a window and padding": (8, 64, 64, 150, (100, 20), 128, None, False),
    "nothing but padding": (3, 64, 64, 33, (34, 300), None, None, False),
    "a softcap": (3, 64, 64, 256, (5, 0), None, 3.0, False),
    "sinks": (8, 64, 64, 90, (5, 0), None, None, True),
    "everything": (3, 80, 128, SLOTS - 1, (7, 190), 200, 5.0, True),
    "a window longer than the cache": (1, 128, 80, 128, (0, 1), 10_000, None, True),
    "a ring": (3, 64, 64, 2 * SLOTS + 170, None, SLOTS, None, False),
    "a ring and padding": (8, 64, 64, SLOTS + 20, (SLOTS - 20, 100), 250, None, True),
    "groups of 20": (20, 16, 8, 127, None, None, None, False),
}


@dataclass(frozen=True)
class Case:
    """What `decode_attention` is given."""

    q: Tensor
    keys: Tensor
    values: Tensor
    position: Tensor
    first_valid: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.keys, self.values, self.position, self.first_valid

    def wide(self) -> Case:
        return Case(self.q.double(), self.keys.double(), self.values.double(), *self.arguments[3:], self.options)

    def positive(self) -> Case:
        """With |values|: how large what is summed is, which errors are relative to."""
        return Case(self.q, self.keys, self.values.abs(), *self.arguments[3:], self.options)

    def sees(self, row: int, slot: int) -> bool:
        last, window = int(self.position), self.options["window"]
        t = max(p for p in range(slot - SLOTS, last + 1, SLOTS))  # the last position that this slot had; it may be none
        if t == last:
            return True
        first = 0 if self.first_valid is None else int(self.first_valid[row])
        return first <= t < last and (window is None or last - t < window)


def make(shape: str, dtype: torch.dtype, kv_heads: int = 2, batch: int = 2) -> Case:
    """The case `shape`, from a seed of its own; keys and values are views of longer memory, of two layouts."""
    random = torch.Generator().manual_seed(list(SHAPES).index(shape))
    group, size, values_size, position, padding, window, softcap, sinks = SHAPES[shape]
    heads = group * kv_heads

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random)

    q = 2 * numbers(batch, heads, 1, size).to(dtype)
    keys = numbers(batch, kv_heads, SLOTS + BEYOND, size).to(dtype)
    values = numbers(batch, SLOTS + BEYOND, kv_heads, values_size).to(dtype).transpose(1, 2)
    keys[:, :, SLOTS:], values[:, :, SLOTS:] = torch.nan, torch.nan
    keys, values = keys[:, :, :SLOTS], values[:, :, :SLOTS]
    case = Case(
        q, keys, values, torch.tensor(position), None if padding is None else torch.tensor(padding),
        {
            "scale": size**-0.5, "window": window, "softcap": softcap,
            "sinks_H": numbers(heads).to(dtype) if sinks else None,
        },
    )  # fmt: skip
    for row in range(batch):
        unseen = [t for t in range(SLOTS) if not case.sees(row, t)]
        keys[row, :, unseen], values[row, :, unseen] = torch.nan, torch.nan
    return case


def written_out(case: Case) -> Tensor:
    """o [B, H, 1, E] fp64: head by head, key by key, in Python's numbers."""
    batch, heads = case.q.shape[:2]
    group = heads // case.keys.shape[1]
    cap, sinks = case.options["softcap"], case.options["sinks_H"]
    o = torch.zeros(batch, heads, 1, case.values.shape[3], dtype=torch.float64)
    for b in range(batch):
        seen = [t for t in range(case.keys.shape[2]) if case.sees(b, t)]
        for h in range(heads):
            query, keys = case.q[b, h, 0].tolist(), case.keys[b, h // group, seen].tolist()
            scores = [case.options["scale"] * sum(map(operator.mul, query, key)) for key in keys]
            if cap is not None:
                scores = [cap * math.tanh(score / cap) for score in scores]
            total = sum(map(math.exp, scores)) + (0 if sinks is None else math.exp(float(sinks[h])))
            for t, score in zip(seen, scores, strict=True):
                o[b, h, 0] += math.exp(score) / total * case.values[b, h // group, t].double()
    return o
