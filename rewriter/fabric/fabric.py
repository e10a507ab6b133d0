"""One fabric: nodes of devices, the links that join them, and how long collectives on it take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.fabric.alpha_beta import Algorithm, AlphaBeta
from rewriter.fabric.calls import Call, Kind
from rewriter.fabric.composed import Composed
from rewriter.fabric.delays import Delay, DelayModel
from rewriter.fabric.links import Channel, Device, Link
from rewriter.fabric.measured_delays import Measured
from rewriter.fabric.plugins import find_model
from rewriter.fabric.protocols import PLAIN, Protocol
from rewriter.fabric.rank_groups import received_bytes
from rewriter.fabric.shipped_tables import Table, find

# NCCL starts another block once each of its 512 threads has 8 bytes per rank of the group (src/include/comm.h,
# NCCL_LL_THREAD_THRESHOLD); kernels like vLLM's once each of 512 has 16 bytes to load (csrc/custom_all_reduce.cuh).
_NCCL_BLOCK, _CUSTOM_BLOCK = 8 * 512, 16 * 512


@dataclass(frozen=True)
class TableChoice:
    """A shipped table by name: see `rewriter.fabric.shipped_tables.find`."""

    system: str
    library: str
    version: str


@dataclass(frozen=True)
class Fabric:
    """Nodes of `node` ranks each, their devices and links.

    `modelled`: its durations come from formulas, no measurement of it is known. `model`: "measured" (`tables`, shipped
    or its own), "alpha-beta", or a model of someone else's: an entry point in the group `rewriter.delay_models`, or
    `module:Class`. `algorithm` and `protocols` are those of the α-β model. `blocks`: CUDA blocks that a library's
    collective holds at most, by library; empty for devices that are no GPUs. `sources`: where each figure is from, by
    its place in the file.
    """

    name: str
    device: Device
    node: int
    inside: Link
    between: Link | None = None
    summary: str = ""
    modelled: bool = False
    model: str = "alpha-beta"
    algorithm: Algorithm = "auto"
    protocols: tuple[Protocol, ...] = (PLAIN,)
    tables: tuple[TableChoice | Table, ...] = ()
    blocks: Mapping[str, int] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def channel(self, ranks: int, stride: int = 1, world: int | None = None) -> Channel:
        """The channel of groups of `ranks` at distance `stride` in a job of `world` ranks, which fills node by node.

        Of groups that lie unequally on nodes it is the worst. Raises RewriterError for groups on several nodes where
        no link joins them.
        """
        if world is not None and world <= self.node:
            together = ranks
        elif self.node % stride:
            together = 1
        else:
            together = math.gcd(ranks, self.node // stride)
        if self.between is None and together < ranks:
            raise RewriterError(
                f"fabric {self.name}: one node of {self.node} ranks, with no link to others; a group of {ranks} "
                "does not fit. Take a fabric with a `between` link."
            )
        return Channel(ranks, together, self.inside, self.between or self.inside)

    @classmethod
    def uniform(cls, link: Link, device: Device) -> Fabric:
        """One link per rank, the same to all others."""
        return cls("uniform", device, 1, link, link)

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries whose collectives were measured on it; the first is the default."""
        names = [table.library if isinstance(table, TableChoice) else table.key.library for table in self.tables]
        return tuple(dict.fromkeys(names))

    @property
    def formula(self) -> AlphaBeta:
        """The α-β model of its links, which all fabrics have."""
        return AlphaBeta(self.inside, self.between, self.node, self.algorithm, self.protocols)

    def delay_model(self, library: str | None = None, graphed: bool = False) -> DelayModel:
        """How long collectives take, by `library` ("nccl", "vllm", …; None: the first measured), eager or replayed from
        a CUDA graph.

        Raises RewriterError for a library that was not measured here, or a model that cannot be loaded.
        """
        name = library or (self.libraries[0] if self.libraries else "nccl")
        if self.model == "measured":
            measured = Measured(self._tables(name, graphed), self.formula)
            model: DelayModel = measured
            if self.between is not None and self.node > 1:
                model = Composed(measured, AlphaBeta(self.between, self.between), self.formula)
        elif self.model == "alpha-beta":
            model = self.formula
        else:
            model = find_model(self.model)(self, name, graphed)
        if not self.blocks:
            return model
        own = {kind for table in self.chosen_tables() if table.key.library == name for kind, _ in table.curves}
        return _Holding(model, name, frozenset(own), self.blocks)

    def chosen_tables(self) -> tuple[Table, ...]:
        """All tables that it may answer from."""
        found: list[Table] = []
        for table in self.tables:
            if isinstance(table, Table):
                found.append(table)
                continue
            for graphed in (False, True):
                try:
                    one = find(table.system, table.library, version=table.version, graphed=graphed)
                except RewriterError:  # a library that was measured one way only
                    continue
                if one not in found:
                    found.append(one)
        return tuple(found)

    def figures(self) -> dict[str, Any]:
        """Its name, device, node and links as plain values."""
        between = asdict(self.between) if self.between else None
        device = asdict(self.device)
        return {
            "name": self.name,
            "device": device,
            "node": self.node,
            "inside": asdict(self.inside),
            "between": between,
        }

    def _tables(self, library: str, graphed: bool) -> tuple[Table, ...]:
        """The library's tables first, then those of the others that it falls back to: only NCCL's and gloo's have all
        collectives."""
        if library not in self.libraries:
            raise RewriterError(
                f"fabric {self.name}: {library!r} was not measured on it; {', '.join(self.libraries) or 'nothing'} was."
            )
        own: list[Table] = []
        rest: list[Table] = []
        for table in self.tables:
            name = table.library if isinstance(table, TableChoice) else table.key.library
            if name != library and name not in ("nccl", "gloo"):
                continue
            if isinstance(table, TableChoice):
                table = find(table.system, table.library, version=table.version, graphed=graphed)
            (own if name == library else rest).append(table)
        return (*own, *rest)


@dataclass(frozen=True)
class _Holding:
    """`model`, with the CUDA blocks and the memory traffic of the library that runs a collective: `blocks` by library,
    `own` the collectives that `library` has itself, NCCL running the others."""

    model: DelayModel
    library: str
    own: frozenset[Kind]
    blocks: Mapping[str, int]

    def delay(self, call: Call) -> Delay:
        delay = self.model.delay(call)
        library = self.library if call.kind in self.own else "nccl"
        if call.size < 2 or library not in self.blocks:
            return delay
        needed = call.nbytes // (_NCCL_BLOCK * call.size if library == "nccl" else _CUSTOM_BLOCK)
        # what a rank receives it writes, and what it sends it reads
        traffic = round(2 * received_bytes(call))
        return replace(delay, blocks=max(1, min(self.blocks[library], needed)), memory_bytes=traffic)
