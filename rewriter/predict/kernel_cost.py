"""Kernels of a module call, fused or as they stand: their arithmetic and the bytes that they move."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rewriter.predict.workload import StoredWeights

Work = Literal["product", "attention", "experts", "glue"]


@dataclass(frozen=True)
class Kernel:
    """One kernel of one rank.

    `work`: "product" (a matrix product, on tensor cores), "attention" (a fused attention kernel), "experts" (a layer of
    experts, grouped), "glue" (everything else, which memory bounds). `flops`: of products, attention and experts; glue
    is not counted. `nbytes`: read and written. `weight_bytes`: the part of `nbytes` that reads parameters.

    The sizes say how many SMs it can fill, and what measurement stands for it:

    | work      | batches           | rows       | columns        | depth          | groups                    |
    |-----------|-------------------|------------|----------------|----------------|---------------------------|
    | product   | equal products    | rows       | columns        | summed over    |                           |
    | attention | sequences · heads | new tokens | keys           | size of a head | sequences · heads of keys |
    | experts   | experts           | tokens     | width of one   | model's width  | chosen by a token         |
    | glue      |                   | rows       | reduced values |                |                           |

    `groups` is 0 where no measurement may stand for it. `parts`: what it is without a measurement of the whole, one
    kernel after another. `stored`: the format of the weights that it reads, of which `nbytes` are; None: its dtype.
    """

    name: str
    work: Work
    nbytes: float
    flops: float = 0.0
    weight_bytes: int = 0
    batches: int = 1
    rows: int = 1
    columns: int = 1
    depth: int = 1
    groups: int = 0
    parts: tuple[Kernel, ...] = ()
    stored: StoredWeights | None = None


@dataclass(frozen=True)
class ModuleExchange:
    """A collective inside a module: the sum of a norm's statistics, or a message of attention over sharded tokens.

    `kind` and `nbytes` as in `fabric.Call`; `axis` is that of the mesh; `ranks` those of the group, relative to the
    first rank. `overlaps` is the number of following items of the module that run while it is on its way.
    """

    kind: Literal["all_reduce", "all_gather", "all_to_all", "send"]
    axis: str
    nbytes: int
    ranks: tuple[int, ...]
    name: str
    overlaps: int = 0


Item = Kernel | ModuleExchange


def axis_group(mesh: Mapping[str, int], axis: str) -> tuple[int, ...]:
    """The first rank's group along an axis, by number in the mesh; tensor-parallel ranks are neighbours."""
    size, stride = mesh.get(axis, 1), mesh.get("tp", 1) if axis == "sp" else 1
    return tuple(range(0, size * stride, stride))


@dataclass
class CostedOperation:
    """An operator before fusion: bytes read and written by storage, and its kernel if it is no glue.

    Several items where it is more than a kernel (attention with its cache, experts, attention over several ranks).
    `reduced`: (rows, values of a row that are made one); no values where it works on each alone.
    """

    name: str
    reads: Mapping[Hashable, int]
    writes: Mapping[Hashable, int]
    items: Sequence[Item] = ()
    weights: frozenset[Hashable] = field(default_factory=frozenset)
    reduced: tuple[int, int] = (1, 0)

    def kernel(self) -> Kernel:
        nbytes, (rows, columns) = sum(self.reads.values()) + sum(self.writes.values()), self.reduced
        return Kernel(
            self.name, "glue", nbytes, weight_bytes=_weight_bytes(self.reads, self.weights), rows=rows, columns=columns
        )


def as_launched(operations: Sequence[CostedOperation]) -> list[Item]:
    """Every operator as its own kernels: a module that runs eagerly."""
    return [item for op in operations for item in (op.items or (op.kernel(),))]


def fused(operations: Sequence[CostedOperation], results: frozenset[Hashable]) -> list[Item]:
    """Glue that stands together becomes one kernel, as a compiler does it: a value that only a group reads stays in
    registers.

    A group is connected, and no path between two of its operators leads through another kind of kernel. `results` are
    the storages that outlive the module.
    """
    depth: dict[Hashable, int] = {}  # of kernels that are no glue, on the longest path to a storage
    group_of: dict[Hashable, int] = {}
    groups: list[list[CostedOperation]] = []
    levels: list[int] = []
    order: list[int | CostedOperation] = []
    readers: dict[Hashable, set[int]] = {}  # ids of operations

    for op in operations:
        level = max((depth.get(s, 0) for s in op.reads), default=0)
        for storage in op.reads:
            readers.setdefault(storage, set()).add(id(op))
        if op.items:  # it is no glue
            order.append(op)
            depth.update(dict.fromkeys(op.writes, level + 1))
            continue
        joined = sorted({group_of[s] for s in op.reads if s in group_of and levels[group_of[s]] == level})
        if not joined:
            joined = [len(groups)]
            order.append(len(groups))
            groups.append([])
            levels.append(level)
        group, *others = joined
        for other in others:
            groups[group] += groups[other]
            groups[other] = []
            group_of |= dict.fromkeys([s for s, found_in in group_of.items() if found_in == other], group)
        groups[group].append(op)
        for storage in op.writes:
            depth[storage], group_of[storage] = level, group
    items: list[Item] = []
    for entry in order:
        if isinstance(entry, CostedOperation):
            items += entry.items
        elif groups[entry]:
            items.append(_together(groups[entry], readers, results))
    return items


def _together(
    group: Sequence[CostedOperation], readers: Mapping[Hashable, set[int]], results: frozenset[Hashable]
) -> Kernel:
    inside = {id(op) for op in group}
    made = {s: size for op in group for s, size in op.writes.items()}
    read: dict[Hashable, int] = {}
    for op in group:
        for storage, size in op.reads.items():
            if storage not in made:
                read[storage] = max(read.get(storage, 0), size)
    kept = sum(size for s, size in made.items() if s in results or readers.get(s, set()) - inside)
    weights = frozenset(s for op in group for s in op.weights)
    names = list(dict.fromkeys(op.name for op in group))
    rows, columns = max((op.reduced for op in group), key=lambda r: r[1])
    return Kernel(
        "+".join(names[:4]) + ("…" if len(names) > 4 else ""),
        "glue",
        sum(read.values()) + kept,
        weight_bytes=_weight_bytes(read, weights),
        rows=rows,
        columns=columns,
    )


def measured_as(
    name: str, work: Work, parts: Sequence[Kernel], stored: StoredWeights | None = None, **sizes: int
) -> Kernel:
    """Kernels that were measured as one; without such a measurement they are what they are."""
    return Kernel(
        name,
        work,
        sum(part.nbytes for part in parts),
        sum(part.flops for part in parts),
        sum(part.weight_bytes for part in parts),
        parts=tuple(parts),
        stored=stored,
        **sizes,
    )


def _weight_bytes(reads: Mapping[Hashable, int], weights: frozenset[Hashable]) -> int:
    return sum(size for s, size in reads.items() if s in weights)
