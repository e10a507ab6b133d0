"""Fabric: nodes of devices, the links that join them, and how long collectives on it take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any, TypeAlias

from rewriter.common.errors import RewriterError, did_you_mean
from rewriter.fabric.alpha_beta import PLAIN, AlphaBeta, Protocol
from rewriter.fabric.calls import Call, Delay, DelayModel, Kind, received_bytes
from rewriter.fabric.links import Channel, Device, Link
from rewriter.fabric.measured_delays import BEST, FUSED, Best, FusedDelays, FusedSum, MeasuredDelays
from rewriter.fabric.overlap import NONE, OverlapCosts
from rewriter.fabric.tables import Table, shipped_table

# NCCL starts another block once each of its 512 threads has 8 bytes per rank of the group (src/include/comm.h,
# NCCL_LL_THREAD_THRESHOLD); kernels like vLLM's once each of 512 has 16 bytes to load (csrc/custom_all_reduce.cuh).
_NCCL_BLOCK, _CUSTOM_BLOCK = 8 * 512, 16 * 512
_MODELS = "rewriter.delay_models"  # the group of entry points of other packages' delay models
NO_CODE = (
    " A fabric's file names no code, since importing it would run it. Register the class as an entry point of the "
    f"group {_MODELS}, or hand it over in Python: dataclasses.replace(fabric, model=Class)."
)
MakeModel: TypeAlias = Callable[..., DelayModel]
"""Makes a delay model of (fabric, library, graphed)."""


@dataclass(frozen=True)
class TableChoice:
    """A shipped table by name."""

    system: str
    library: str
    version: str


@dataclass(frozen=True)
class Fabric:
    """Nodes of `node` ranks each, their devices and links.

    `modelled`: its durations come from formulas, no measurement of it is known. `model`: "measured" (`tables`, shipped
    or its own), "alpha-beta", or a model of someone else's: the name of an entry point in the group
    `rewriter.delay_models`, or from Python the class itself. `protocols` are those of the α-β model.
    `blocks`: CUDA blocks that a library's collective holds at most, by library; empty for devices that are no GPUs.
    `overlap`: what overlap costs. `fused`: the all-reduce that servers have for a sum that is added to a residual and
    normed. `link`: what joins its GPUs ("nvlink", "pcie", "roce", "tcp"; empty: not said). `sources`: where each figure
    is from, by its place in the file.
    """

    name: str
    device: Device
    node: int
    inside: Link
    between: Link | None = None
    summary: str = ""
    modelled: bool = False
    model: str | MakeModel = "alpha-beta"
    protocols: tuple[Protocol, ...] = (PLAIN,)
    tables: tuple[TableChoice | Table, ...] = ()
    blocks: Mapping[str, int] = field(default_factory=dict, hash=False)
    overlap: OverlapCosts = NONE
    fused: FusedSum | None = None
    link: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def channel(self, ranks: int, stride: int = 1, world: int | None = None) -> Channel:
        """The channel of groups of `ranks` at distance `stride` in a job of `world` ranks, which fills node by node.

        Of groups that are spread unequally it is the worst. Raises RewriterError for groups on several nodes where no
        link joins them.
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

    @property
    def narrowest(self) -> float:
        """Bytes per second of the link that limits a group of all its ranks: between nodes, where there are several."""
        return min(link.bandwidth for link in (self.inside, self.between) if link is not None)

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries whose collectives were measured on it."""
        return tuple(dict.fromkeys(table.library for table in self.tables))

    @property
    def backends(self) -> tuple[str, ...]:
        """Libraries that `delay_model` takes; the first is the default. "best" is the fastest of them for a call,
        and "fused" that with sums that norm, where there are such."""
        several = (BEST,) if len(self.libraries) + (self.fused is not None) > 1 and self.model == "measured" else ()
        return (*several, *self.libraries, *((FUSED,) if self.fused else ()))

    @property
    def formula(self) -> AlphaBeta:
        """The α-β model of its links, which all fabrics have."""
        return AlphaBeta(self.inside, self.between, self.node, self.protocols)

    def delay_model(self, library: str | Sequence[str] | None = None, graphed: bool = False) -> DelayModel:
        """The model of delays by `library`, one of `backends` (None: the first; several: the fastest of them), eager or
        replayed from a CUDA graph.

        Raises RewriterError for a library that was not measured here, or a model that cannot be loaded.
        """
        if library is not None and not isinstance(library, str):
            return Best({one: self.delay_model(one, graphed) for one in library}, self._most_bytes)
        name = library or (self.backends[0] if self.backends else "nccl")
        if name == BEST and self.backends[:1] == (BEST,):
            measured = {table.library for table in self._measured(graphed)}
            names = {one: self.fused.library if one == FUSED and self.fused else one for one in self.backends[1:]}
            fitting = [one for one, name in names.items() if name in measured]
            return Best({one: self.delay_model(one, graphed) for one in fitting}, self._most_bytes)
        if name == FUSED and self.fused is not None:
            return FusedDelays(self.fused, self.delay_model(self.fused.library, graphed))
        if self.model == "measured":
            model: DelayModel = MeasuredDelays(self._tables(name, graphed), self.formula)
        elif self.model == "alpha-beta":
            model = self.formula
        else:
            model = find_model(self.model)(self, name, graphed)
        if not self.blocks:
            return model
        own = {kind for table in self.chosen_tables() if table.library == name for kind, _ in table.curves}
        return _Holding(model, name, frozenset(own), self.blocks)

    def chosen_tables(self) -> tuple[Table, ...]:
        """All tables that it may answer from."""
        both = [(_table(table, False), _table(table, True)) for table in self.tables]
        return tuple({table.key: table for pair in both for table in pair if table is not None}.values())

    @property
    def _most_bytes(self) -> dict[str, int]:
        own = [table for table in self.tables if isinstance(table, Table)]
        return {table.library: table.most_bytes for table in own if table.most_bytes is not None}

    def _measured(self, graphed: bool) -> list[Table]:
        """Its tables of one way of launching; some libraries were measured in graphs only."""
        return [one for table in self.tables if (one := _table(table, graphed)) is not None]

    def figures(self) -> dict[str, Any]:
        """Its name, device, node and links as plain values."""
        parts: dict[str, Any] = {"device": self.device, "inside": self.inside, "between": self.between}
        return {"name": self.name, "node": self.node} | {k: asdict(part) if part else None for k, part in parts.items()}

    def _tables(self, library: str, graphed: bool) -> tuple[Table, ...]:
        """The library's tables first, then those that it falls back to: only NCCL's and gloo's have all collectives."""
        if library not in self.libraries:
            raise RewriterError(
                f"fabric {self.name}: {library!r} was not measured on it; {', '.join(self.backends) or 'nothing'} was."
            )
        fitting = [table for table in self._measured(graphed) if table.library in (library, "nccl", "gloo")]
        if all(table.library != library for table in fitting):
            how = "in CUDA graphs" if graphed else "outside of CUDA graphs"
            raise RewriterError(f"fabric {self.name}: {library} was not measured {how}. Take another library")
        return tuple(sorted(fitting, key=lambda table: table.library != library))


def _table(table: TableChoice | Table, graphed: bool) -> Table | None:
    if isinstance(table, Table):
        return table
    return shipped_table(table.system, table.library, table.version, graphed)


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


def find_model(model: str | MakeModel) -> MakeModel:
    """The maker of a delay model of (fabric, library, graphed): `model` itself where it is no name, else what an
    installed package registers under that name in the group `rewriter.delay_models`.

    A name comes from a file, and files come from elsewhere: nothing else is imported for one. Raises RewriterError for
    a name that no package registers, and for what cannot be imported or makes no delay model.
    """
    name, maker = str(model), model
    if isinstance(model, str):
        known = {point.name: point for point in entry_points(group=_MODELS)}
        if model not in known:
            raise RewriterError(
                f"delay model {name!r:.60}: neither built in, nor an entry point of {_MODELS}. "
                f"{did_you_mean(name, ('measured', 'alpha-beta', *known))}{NO_CODE if ':' in name else ''}"
            )
        try:
            maker = known[model].load()
        except (ImportError, ValueError, AttributeError) as error:
            raise RewriterError(
                f"delay model {name!r:.60}: its entry point cannot be imported: {error}. Install its package again."
            ) from None

    def make(*arguments: object) -> DelayModel:
        made = maker(*arguments) if callable(maker) else None
        if not isinstance(made, DelayModel):
            raise RewriterError(f"delay model {name!r:.60}: it is no class with a method delay(call), as models are.")
        return made

    return make
