"""Steps of each rank (quantize, send, sum, send on) as schedules: generators that start a message, yield it, and are
resumed once it has arrived.

Y nodes × X local ranks; this is local rank l of node y. Shape suffixes: P = Y · X ranks, R rows, N elements of a slice,
B bytes of a payload.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.kernels import (
    Format,
    dequantize_reduce,
    dequantize_reduce_quantize,
    dequantize_rows,
    parse_formats,
    quantize_rows,
)
from rewriter.kernels.blocks import mix
from rewriter.runtime.collectives.exchange import Transfer
from rewriter.runtime.quantized.topology import Topology

Schedule = Generator[Transfer, None, None]
Parsed = TypeVar("Parsed", Format, tuple[Format, Format])


def known_format(name: str | Format, about: str, parse: Callable[[str | Format], Parsed]) -> Parsed:
    """`parse(name)`, of `parse_format` or `parse_formats`. Raises RewriterError, which begins with `about`, for a name
    that is none."""
    try:
        return parse(name)
    except ValueError as error:
        raise RewriterError(f"{about}: {error}") from None


_DITHERED = 3  # messages of a collective: inside the node, between nodes, and what is gathered


@dataclass(frozen=True)
class StepFormats:
    """The formats inside a node and between nodes."""

    intra: Format
    inter: Format


def step_formats(formats: str | Format, topology: Topology, name: str, *, dithered: bool = False) -> StepFormats:
    """The formats "INSIDE/BETWEEN", or one for both. An axis of one rank does not need its own.

    Raises RewriterError for names that are none, for formats that cannot be `dithered` where they are to be, and for
    two formats where there is one group.
    """
    intra, inter = known_format(formats, name, partial(parse_formats, dithered=dithered))
    if intra != inter and not topology.nodes:
        raise RewriterError(
            f'{name}: "{formats}" is a format inside nodes and one between them, but there is one group of '
            f"{topology.ranks} ranks. Give one format, or a mesh of two dimensions: nodes, then the ranks of a node"
        )
    if topology.inter.ranks == 1:
        inter = intra
    if topology.intra.ranks == 1:
        intra = inter
    return StepFormats(intra, inter)


@dataclass(frozen=True)
class QuantizedCall:
    """One collective: the ranks, the formats, the name, and the seeds of its messages.

    Messages whose errors may be summed have different seeds: a message is dithered with the seed of its step + the
    sender's rank on the axis. None where nothing is dithered. They follow a hash of the collective's `seed`: those of
    another would else be the same.
    """

    topology: Topology
    formats: StepFormats
    name: str = ""
    seed: int | None = None

    @property
    def intra_seed(self) -> int | None:
        return self._seed(0, self.topology.inter.rank * self.topology.intra.ranks)

    @property
    def inter_seed(self) -> int | None:
        return self._seed(1, self.topology.intra.rank * self.topology.inter.ranks)

    @property
    def gather_seed(self) -> int | None:
        """Seed of local rank 0 of node 0; that of local rank l of node y is larger by l · Y + y."""
        return self._seed(2, 0)

    @property
    def own_gather_seed(self) -> int | None:
        intra, inter = self.topology.intra, self.topology.inter
        return plus(self.gather_seed, intra.rank * inter.ranks + inter.rank)

    def _seed(self, message: int, first: int) -> int | None:
        if self.seed is None:
            return None
        return mix((self.seed * _DITHERED + message) & 0xFFFFFFFF) + first


def plus(seed: int | None, rank: int) -> int | None:
    """The seed of the sender with this rank."""
    return None if seed is None else seed + rank


@dataclass(frozen=True)
class Summands:
    """The parts [P, R, N] of a sum: payloads of others, and one's own, which is exact."""

    payload_PRB: Tensor
    format: Format
    seed: int | None
    own: int
    own_RN: Tensor

    def rows(self, some: slice) -> Summands:
        return replace(self, payload_PRB=self.payload_PRB[:, some], own_RN=self.own_RN[some])

    def total(self, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
        """[R, N], summed in fp32."""
        return dequantize_reduce(self.payload_PRB, self.format, dtype=dtype, factor=factor, **self._options())

    def requantized(self, to: Format, to_seed: int | None) -> Tensor:
        """The payload [R, B] of the total."""
        return dequantize_reduce_quantize(self.payload_PRB, self.format, to=to, to_seed=to_seed, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"n": self.own_RN.shape[1], "seed": self.seed, "skip": self.own, "add": self.own_RN}


def but(own: int, ranks: int) -> list[slice]:
    """The others, as runs."""
    return [run for run in (slice(0, own), slice(own + 1, ranks)) if run.start < run.stop]


def reduced(x_PN: Tensor, call: QuantizedCall) -> Generator[Transfer, None, Summands]:
    """Summands of the own slice, after all messages of qgZ (arXiv 2306.10209, section 3.3)."""
    topology, formats = call.topology, call.formats
    inter, own, seed = topology.inter, topology.inter.rank, call.inter_seed
    node = None
    if topology.intra.ranks > 1:
        node = yield from _inside_node(x_PN, call)
        if inter.ranks == 1:
            return node
    own_YN = x_PN.unflatten(0, (inter.ranks, topology.intra.ranks))[:, topology.intra.rank]
    sent_YRB = x_PN.new_empty(inter.ranks, 1, formats.inter.payload_bytes(x_PN.shape[1]), dtype=torch.uint8)
    for some in but(own, inter.ranks):
        if node is None:
            quantize_rows(own_YN[some], formats.inter, seed=plus(seed, own), out=sent_YRB[some, 0])
        else:
            sent_YRB[some, 0] = node.rows(some).requantized(formats.inter, plus(seed, own))
    transfer = inter.all_to_all_start(sent_YRB, call.name)
    own_node = slice(own, own + 1)  # summed while that is on its way
    own_RN = own_YN[own_node] if node is None else node.rows(own_node).total(torch.float32)
    yield transfer
    return Summands(transfer.wait(), formats.inter, seed, own, own_RN)


def _inside_node(x_PN: Tensor, call: QuantizedCall) -> Generator[Transfer, None, Summands]:
    """The parts of the node's sum of the slices [Y, N] that are this local rank's in every node.

    Slices for place l of every node go to local rank l: the order of Eq. 2, made while quantizing.
    """
    intra, inter, format = call.topology.intra, call.topology.inter, call.formats.intra
    size = format.payload_bytes(x_PN.shape[1])
    sent_XYB = x_PN.new_empty(intra.ranks, inter.ranks, size, dtype=torch.uint8)
    for some in but(intra.rank, intra.ranks):
        order = [y * intra.ranks + x for x in range(intra.ranks)[some] for y in range(inter.ranks)]
        seed = plus(call.intra_seed, intra.rank)
        quantize_rows(x_PN, format, order=order, seed=seed, out=sent_XYB[some].flatten(0, 1))
    transfer = intra.all_to_all_start(sent_XYB, call.name)
    yield transfer
    own_YN = x_PN.unflatten(0, (inter.ranks, intra.ranks))[:, intra.rank]
    return Summands(transfer.wait(), format, call.intra_seed, intra.rank, own_YN)


def reduce_scatter(x_PN: Tensor, out_N: Tensor, factor: float, call: QuantizedCall) -> Schedule:
    """`out_N` becomes the own slice of the sum, times `factor`."""
    summands = yield from reduced(x_PN, call)
    out_N.copy_(summands.total(out_N.dtype, factor)[0])


def all_gather(x_N: Tensor, out_PN: Tensor, call: QuantizedCall) -> Schedule:
    """`out_PN` becomes what every rank's payload of `x_N` says, one's own too."""
    payload_RB = quantize_rows(x_N[None], call.formats.inter, seed=call.own_gather_seed)
    yield from gathered(payload_RB, out_PN, call)


def all_reduce(x_PN: Tensor, out_PN: Tensor, call: QuantizedCall) -> Schedule:
    """Every rank's slice of the sum, quantized once more, goes to all."""
    summands = yield from reduced(x_PN, call)
    yield from gathered(summands.requantized(call.formats.inter, call.own_gather_seed), out_PN, call)


def gathered(payload_RB: Tensor, out_PN: Tensor, call: QuantizedCall) -> Schedule:
    """Payloads go between nodes first, and inside the node the same bytes are passed on."""
    intra, inter, format, name = call.topology.intra, call.topology.inter, call.formats.inter, call.name
    all_XYB = payload_RB.new_empty(intra.ranks, inter.ranks, payload_RB.shape[1])
    all_XYB[intra.rank, inter.rank] = payload_RB[0]
    if inter.ranks > 1:
        yield inter.gather_start(all_XYB[intra.rank], name)
    if intra.ranks > 1:
        yield intra.gather_start(all_XYB, name)
    if intra.ranks == 1 or inter.ranks == 1:  # rows are in rank order
        rows_PB, seed = all_XYB.flatten(0, 1), call.gather_seed
        dequantize_rows(rows_PB, format, out_PN.shape[1], out_PN.dtype, seed=seed, out=out_PN)
        return
    out_YXN = out_PN.unflatten(0, (inter.ranks, intra.ranks))
    for x in range(intra.ranks):
        seed = plus(call.gather_seed, x * inter.ranks)
        dequantize_rows(all_XYB[x], format, out_PN.shape[1], out_PN.dtype, seed=seed, out=out_YXN[:, x])
