"""Kernels as they were measured, and those of the sizes between.

A table holds durations on a grid: products by (columns, depth, rows), attention by (size of a head, query heads per
head of keys, streams = sequences · heads of keys, tokens), experts by shape and tokens, glue by rows and columns. What
is interpolated, linearly in the logarithms of the sizes, is the ratio to a reference

    floor + max(FLOP / (FLOP/s promised), bytes / (bytes/s promised))

with the table's shortest kernel as floor (of experts, their shortest layer). Beyond the grid the ratio stays what it is
at the edge, so that a kernel is as efficient there; on another device than the measured one, with its own rates in the
reference, it is so too.

Five things about the measurements are put right (`benchmarks/predict/kernel_tables.py` says where they are from):

- Kernels ran in a CUDA graph of few, again and again: the gap between two replays is taken off.
- Products took turns with six weights, a decode attention had one cache. Where these fit in the L2 cache together, a
  kernel takes no less than the floor and its bytes at the rate of kernels whose operands do not fit. So do experts.
- A product of more rows takes no less: where measurements fall with rows, their geometric mean counts.
- Experts that would be read faster than memory gives have no gates (two matrices, not three), and are left out.
- Attention of a decode step wrote the new token's key and value, too: so does what is answered here.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.common.errors import RewriterError, did_you_mean
from rewriter.fabric.links import KERNELS, kernel_systems

_TURNS = {"products": 6, "glue": 5}  # kernels to a graph, where it was more than one
_BYTES = {"bfloat16": 2, "float8": 1, "float4": 4.5 / 8}  # NVFP4 with its scales
_ALIKE = {"float16": "bfloat16", "float8_e4m3fn": "float8"}
Array = NDArray[np.float64]
Reference = Callable[..., Any]  # of places on the axes, seconds


@dataclass(frozen=True)
class Promised:
    """Promises of a device: FLOP per second by dtype, bytes per second of its memory."""

    flops: Mapping[str, float]
    bandwidth: float


class Grid:
    """Durations in seconds on a grid of sizes; NaN where nothing was measured. `reference` takes one value per axis."""

    def __init__(self, axes: Sequence[Sequence[float] | Array], seconds: Array, reference: Reference) -> None:
        self.axes = [np.log(np.asarray(axis, dtype=float)) for axis in axes]
        places = np.meshgrid(*(np.asarray(axis, dtype=float) for axis in axes), indexing="ij")
        self.ratios = np.log(seconds / reference(*places))
        self.filled = _filled(self.ratios)

    def ratio(self, *place: float) -> float:
        """The duration over its reference at a place, by linear interpolation between logarithms."""
        corners = self.filled
        for axis, value in zip(self.axes, place, strict=True):  # each step takes the first axis away
            if len(axis) == 1:
                corners = corners[0]
                continue
            at = min(max(float(np.log(max(value, 1e-9))), float(axis[0])), float(axis[-1]))
            i = min(int(np.searchsorted(axis, at, side="right")) - 1, len(axis) - 2)
            share = (at - axis[i]) / (axis[i + 1] - axis[i])
            corners = corners[i] * (1 - share) + corners[i + 1] * share
        return float(np.exp(corners))

    def held_out(self, axis: int) -> Array:
        """Error of each measurement between two others along an axis: |predicted by these two / measured - 1|."""
        if len(self.axes[axis]) < 3:
            return np.empty(0)
        x, v = self.axes[axis], np.moveaxis(self.ratios, axis, 0)
        share = ((x[1:-1] - x[:-2]) / (x[2:] - x[:-2])).reshape(-1, *[1] * (v.ndim - 1))
        errors = np.abs(np.exp(v[:-2] * (1 - share) + v[2:] * share - v[1:-1]) - 1).ravel()
        return errors[~np.isnan(errors)]


@dataclass(frozen=True)
class KernelTable:
    """The measured kernels of one system. `file` is what `benchmarks/predict/kernel_tables.py` writes.

    Its methods give seconds, or None for what was not measured. `on`: the device that is asked about; None: the
    measured one. Dtypes by torch's names.
    """

    file: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.file['device']}, {self.file['library']} {self.file['version']}"

    @cached_property
    def own(self) -> Promised:
        return Promised(self.file["flops"], self.file["bandwidth"])

    @cached_property
    def floor(self) -> float:
        """Seconds of the shortest product."""
        return float(np.nanmin(self._seconds("products", self.file["products"]["bfloat16"])))

    def product(
        self, rows: int, columns: int, depth: int, dtype: str, on: Promised | None = None, bits: float | None = None
    ) -> float | None:
        """Seconds of [rows, depth] · [depth, columns], its weights read from memory.

        `bits`: of each weight, where they are made `dtype` as they are read: the longer of a product that reads as many
        bytes, and of the arithmetic of this one.
        """
        known = _ALIKE.get(dtype, dtype)
        grid, on = self.products.get(known), on or self.own
        if grid is None or known not in on.flops:
            return None
        whole = grid.ratio(columns, depth, rows) * self._product_reference(known, on, columns, depth, rows)
        if bits is None:
            return float(whole)
        read = columns * bits / (8 * _BYTES[known])
        reading = grid.ratio(read, depth, rows) * self._product_reference(known, on, read, depth, rows)
        reference = self._product_reference(known, on, columns, depth, rows) - self.floor
        bound = 2.0 * rows * columns * depth / on.flops[known] / reference
        return float(max(reading, whole * bound))

    def attention(
        self,
        queries: int,
        keys: int,
        head_dim: int,
        group: int,
        streams: int,
        dtype: str,
        on: Promised | None = None,
        pairs: float | None = None,
    ) -> float | None:
        """Seconds of `queries` new tokens of each sequence, causal, over `keys`: one over a cache, or a prompt over
        itself.

        `pairs`: of a query and a key that are seen, per head and sequence, where they are not queries² / 2.
        """
        known, on = _ALIKE.get(dtype, dtype), on or self.own
        phase = "decode_attention" if queries == 1 else "prefill_attention"
        grid = self._attention.get((phase, known))
        if grid is None or known not in on.flops:
            return None
        tokens = keys if queries == 1 else queries
        place = head_dim, group, streams, tokens
        return float(grid.ratio(*place) * self._attention_reference(phase, known, on, *place, pairs))

    def experts(
        self, tokens: int, width: int, hidden: int, chosen: int, count: int, dtype: str, on: Promised | None = None,
        bits: float | None = None,
    ) -> float | None:  # fmt: skip
        """Seconds of a layer of gated experts: `chosen` of `count` per token, `hidden` wide on a rank, with routing.

        `bits`: as of `product`; these are as efficient as experts of `dtype` of the same sizes."""
        known, on = _ALIKE.get(dtype, dtype), on or self.own
        if known not in self._experts or known not in on.flops:
            return None
        grids = self._experts[known]
        asked = np.log([width, hidden, chosen, count])
        shape = min(grids, key=lambda s: float(np.abs(np.log(s) - asked).sum()))
        share = 1.0 if bits is None else bits / (8 * _BYTES[known])
        reference = self._experts_reference((width, hidden, chosen, count), known, on, tokens, share)
        return float(grids[shape].ratio(tokens) * reference)

    def glue(self, nbytes: float, rows: int, columns: int, on: Promised | None = None) -> float | None:
        """Seconds of a kernel that reads and writes `nbytes` once. `columns`: values of each of `rows` rows that are
        reduced first; 0 where it works on each value alone."""
        on = on or self.own
        reference = self.floor + nbytes / on.bandwidth
        if columns:
            return self._reduction.ratio(rows, columns) * reference
        return self._pointwise.ratio(max(nbytes, 1.0)) * reference

    def errors(self) -> dict[str, Array]:
        """Held-out errors by what was measured, along the axes that sizes vary in."""
        grids: dict[str, list[tuple[Grid, int]]] = {}
        for dtype, grid in self.products.items():
            few_rows = self._product_grid(dtype, 64)
            grids[f"products {dtype}, up to 64 rows"] = [(few_rows, axis) for axis in range(3)]
            grids[f"products {dtype}"] = [(grid, axis) for axis in range(3)]
        for (phase, dtype), grid in self._attention.items():
            grids[f"{phase.replace('_', ' ')} {dtype}"] = [(grid, axis) for axis in (2, 3)]
        for dtype, by_shape in self._experts.items():
            grids[f"experts {dtype}"] = [(grid, 0) for grid in by_shape.values()]
        if self.file["glue"]:
            grids["glue"] = [(self._pointwise, 0), (self._reduction, 1)]
        return {what: np.concatenate([grid.held_out(axis) for grid, axis in some]) for what, some in grids.items()}

    # --- grids ---

    @cached_property
    def products(self) -> dict[str, Grid]:
        return {dtype: self._product_grid(dtype) for dtype in self.file["products"]}

    def _product_grid(self, dtype: str, most_rows: float = math.inf) -> Grid:
        cells = self.file["products"][dtype]
        columns, depth, rows = (np.asarray(cells[axis], dtype=float) for axis in ("columns", "depth", "rows"))
        seconds = self._seconds("products", cells)
        weights = columns[:, None, None] * depth[None, :, None] * _BYTES[dtype]
        warm = _TURNS["products"] * weights < self.file["l2_bytes"]
        cold = (weights > 4 * self.file["l2_bytes"]) & (rows <= 16)
        rate = float(np.nanmedian(np.where(cold, weights / seconds, np.nan)))
        floor = float(np.nanmin(seconds))
        seconds = np.where(warm, np.maximum(seconds, floor + weights / rate), seconds)
        seconds = np.apply_along_axis(_rising, -1, seconds)
        kept = rows <= most_rows
        return Grid((columns, depth, rows[kept]), seconds[..., kept], partial(self._product_reference, dtype, self.own))

    def _product_reference(self, dtype: str, on: Promised, columns: Any, depth: Any, rows: Any) -> Any:
        nbytes = _BYTES[dtype] * depth * (columns + rows) + 2.0 * rows * columns
        return self.floor + np.maximum(2.0 * rows * columns * depth / on.flops[dtype], nbytes / on.bandwidth)

    @cached_property
    def _attention(self) -> dict[tuple[str, str], Grid]:
        grids = {}
        for phase in ("prefill_attention", "decode_attention"):
            for dtype, cells in self.file[phase].items():
                axes = [cells[axis] for axis in ("head_dim", "group", "streams", "tokens")]
                seconds = self._seconds(phase, cells)
                if phase == "decode_attention":
                    seconds = self._from_memory(seconds, *(np.asarray(axis, dtype=float) for axis in axes))
                grids[phase, dtype] = Grid(axes, seconds, partial(self._attention_reference, phase, dtype, self.own))
        return grids

    def _from_memory(self, seconds: Array, head_dim: Array, group: Array, streams: Array, tokens: Array) -> Array:
        """Decode attention whose cache was in the L2 cache, as if it came from memory."""
        d, _, s, t = np.meshgrid(head_dim, group, streams, tokens, indexing="ij")
        nbytes = 4.0 * d * s * t
        rate = np.where(nbytes > 4 * self.file["l2_bytes"], nbytes / seconds, np.nan)
        best = float(np.nanquantile(rate, 0.9)) if not np.isnan(rate).all() else self.own.bandwidth
        shortest = np.fmin.reduce(seconds, axis=3, keepdims=True)
        cached: Array = nbytes < self.file["l2_bytes"]
        return np.where(cached, np.maximum(seconds, shortest + nbytes / best), seconds)

    def _attention_reference(
        self, phase: str, dtype: str, on: Promised, head_dim: Any, group: Any, streams: Any, tokens: Any,
        pairs: float | None = None,
    ) -> Any:  # fmt: skip
        cache = 2.0 * _BYTES[dtype] * head_dim * streams * tokens
        if phase == "decode_attention":
            return self.floor + cache / on.bandwidth
        seen = tokens * (tokens + 1) / 2 if pairs is None else pairs
        arithmetic = 4.0 * seen * streams * group * head_dim / on.flops[dtype]
        return self.floor + np.maximum(arithmetic, cache * (1 + group) / on.bandwidth)

    @cached_property
    def _experts(self) -> dict[str, dict[tuple[int, ...], Grid]]:
        """By dtype, a grid for each shape."""
        grids: dict[str, dict[tuple[int, ...], Grid]] = {}
        for dtype, cells in self.file["experts"].items():
            grids[dtype] = {}
            tokens = np.asarray(cells["tokens"], dtype=float)
            rows = self._seconds("experts", cells)
            read = np.array([self._experts_bytes(tuple(shape), dtype, tokens) for shape in cells["shapes"]])
            few = np.where((read > self.file["l2_bytes"]) & (tokens <= 8), read / rows, np.nan)
            # without gates experts have two matrices, and would be read faster than memory gives
            gated = ~(
                np.nan_to_num([np.nanmedian(row) if (~np.isnan(row)).any() else 0 for row in few]) > self.own.bandwidth
            )
            rate = float(np.nanmedian(few[gated]))
            warm = (read < 2 * self.file["l2_bytes"]) | (tokens == 1)
            rows = np.where(warm, np.maximum(rows, self.floor + read / rate), rows)
            rows[~gated] = np.nan
            for shape, row in zip(map(tuple, cells["shapes"]), rows, strict=True):
                known = ~np.isnan(row)
                if known.any():
                    reference = partial(self._experts_reference, shape, dtype, self.own)
                    grids[dtype][shape] = Grid((tokens[known],), row[known], reference)
        return grids

    def _experts_floor(self, dtype: str) -> float:
        """Seconds of the shortest layer of experts: its routing, and the kernels' own."""
        return float(np.nanmin(self._seconds("experts", self.file["experts"][dtype])))

    def _experts_bytes(self, shape: tuple[int, ...], dtype: str, tokens: Any) -> Any:
        """Bytes of the experts that some of `tokens` choose."""
        width, hidden, chosen, count = shape
        active = count * (1 - (1 - min(1.0, chosen / count)) ** tokens)
        return 3.0 * active * width * hidden * _BYTES[dtype]

    def _experts_reference(
        self, shape: tuple[int, ...], dtype: str, on: Promised, tokens: Any, share: float = 1.0
    ) -> Any:
        width, hidden, chosen, _ = shape
        nbytes = self._experts_bytes(shape, dtype, tokens) * share
        return self._experts_floor(dtype) + np.maximum(
            6.0 * tokens * chosen * width * hidden / on.flops[dtype], nbytes / on.bandwidth
        )

    @cached_property
    def _reduction(self) -> Grid:
        glue = self._glue
        cells = glue.file["glue"]["reduction"]
        return Grid(
            [cells["rows"], cells["columns"]],
            self._seconds("glue", cells),
            lambda rows, columns: glue.floor + 3.0 * rows * columns / glue.own.bandwidth,
        )

    @cached_property
    def _pointwise(self) -> Grid:
        """By bytes. Of shapes with as many values the fastest quarter counts: a compiler is free to
        cut them otherwise."""
        glue = self._glue
        cells = glue.file["glue"]["pointwise"]
        rows, columns = np.meshgrid(*(np.asarray(cells[a], dtype=float) for a in ("rows", "columns")), indexing="ij")
        seconds, sizes = self._seconds("glue", cells), 3.0 * rows * columns
        ratios = seconds / (glue.floor + sizes / glue.own.bandwidth)
        edges = 2.0 ** np.arange(np.floor(np.log2(sizes.min())), np.ceil(np.log2(sizes.max())) + 1)
        fastest = {
            float(np.sqrt(low * high)): float(np.nanquantile(ratio, 0.25))
            for low, high in pairwise(edges)
            if not np.isnan(ratio := np.where((sizes >= low) & (sizes < high), ratios, np.nan)).all()
        }
        return Grid((list(fastest),), np.array(list(fastest.values())), np.ones_like)

    @property
    def _glue(self) -> KernelTable:
        """A system without conversions to float8 has the H100's, relative to what either promises."""
        return self if self.file["glue"] else kernel_table("h100_sxm")

    def _seconds(self, what: str, cells: Mapping[str, Any]) -> Array:
        """The durations of one grid without the gap between replays."""
        axes = [values for name, values in cells.items() if name != "us"]
        us = np.array([np.nan if value is None else value for value in cells["us"]], dtype=float)
        gap = self.file["replay_us"] / _TURNS.get(what, 1)
        least = us[~np.isnan(us)].min() / 4  # never nothing
        seconds: Array = np.maximum(us - gap, least).reshape([len(axis) for axis in axes]) * 1e-6
        return seconds


@cache
def kernel_table(system: str) -> KernelTable:
    """A shipped table by its system's name. Raises RewriterError for an unknown one."""
    if system not in kernel_systems():
        raise RewriterError(
            f"kernels of {system!r:.60}: {did_you_mean(system, kernel_systems(), what='shipped')} Name one of them"
        )
    return KernelTable(json.loads(gzip.decompress((KERNELS / f"kernels-{system}.json.gz").read_bytes())))


def _rising(seconds: Array) -> Array:
    """The values nearest to these that never fall, by least squares of logarithms: neighbours that fall become their
    mean (pool adjacent violators). A product of more rows takes no less, but its measurement may."""
    known = ~np.isnan(seconds)
    pools: list[tuple[float, int]] = []  # (sum of logarithms, how many)
    for value in np.log(seconds[known]):
        pools.append((float(value), 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [(a + b, m + n)]
    rising = seconds.copy()
    rising[known] = np.exp([total / count for total, count in pools for _ in range(count)])
    return rising


def _filled(values: Array) -> Array:
    """`values`, what is missing being the nearest that is known along an axis, the last axis first."""
    filled = values.copy()
    for axis in reversed(range(filled.ndim)):
        v = np.moveaxis(filled, axis, 0)
        for order in (range(1, len(v)), range(len(v) - 2, -1, -1)):
            for i in order:
                missing = np.isnan(v[i])
                v[i, ...][missing] = v[i - order.step, ...][missing]
    return np.nan_to_num(filled)
