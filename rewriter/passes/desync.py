"""Desynced Residual: reductions are dropped, and each rank keeps its own residual until the next one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Module, Parameter, Program, ops
from rewriter.ir.communication import local_values
from rewriter.ir.marks import UNSCHEDULED, Marks, Mode, mark, marks, new_call
from rewriter.ir.op_semantics import aten
from rewriter.ir.residual import Block, blocks_of, computes
from rewriter.passes.base import Effect, LayerModes, Pass, Reducing, Scope, places_of, record
from rewriter.passes.phases import PhasedPass
from rewriter.passes.placement.units import AXIS, equal_runs
from rewriter.passes.quantize_collectives import STREAM
from rewriter.passes.residual_rewrite import (
    carried_on,
    carries_by_constants,
    check_ranks,
    chosen_blocks,
    is_reduced,
    layers_passed_over,
    made_of,
    part_of,
    partial_of,
    replace_stream_value,
    settle_reads,
    split_writes,
    sum_in,
)
from rewriter.passes.selection import Selection, resolve, runs_of
from rewriter.weights.expressions import Concat

Choice = Literal["keep", "drop"]
Resync = Literal["mean", "sum"]

_desynced = partial(Mode, "desync", prefix="Desync", own_residual=True)
KEEP = _desynced("as in the original", outcome="keep")
DROP = _desynced("not reduced: every rank goes on with its own residual", outcome="drop", sum="left_out")
KEEP_MEAN = _desynced(
    "reduced; the ranks go on from the mean of their residuals", outcome="keep_mean", word="keep", sum="mean"
)
KEEP_SUM = _desynced(
    "reduced, with all that the ranks added since they last agreed", outcome="keep_sum", word="keep", sum="all_since"
)


@dataclass(frozen=True)
class Desync(PhasedPass):
    """x_r ← x_r + f_r where a reduction is dropped (Ladder Residual, arXiv 2501.06589, section 5).

    In the selected `layers` the last of every `n` reductions in a row is kept (2: attention's are dropped; 4: the MLP's
    of every second layer are kept), or what `pattern` says: one entry per selected layer, repeated as needed, with
    "keep" or "drop" per reduction of the layer (`[[drop, drop], [drop, keep]]` is n = 4). The last reduction before
    leaving a run of selected layers is always kept. A kept reduction brings the ranks together again:

    - `resync` "mean": x = AR(f_r + x_r / P), what the authors' code does: what ranks added alone survives as its mean;
    - "sum": x = x_last_sync + AR(everything that rank r added since): nothing is scaled by 1 / P.

    A block that every rank computes in full (it could not be split) is added to each rank's own residual as it is, and
    counts 1 / P per rank in a sum. `untie_norms` gives each rank weights of its own in the norms that read a rank's own
    residual.

    Where a norm N follows the reduction (Gemma 2 and 3, OLMo 2), it moves to where the sum is complete: what a
    rank goes on with is x_r + N(f_r), for a norm takes the size of the sum from any part it is given, and

    - "mean": x = N(AR(f_r)) + AR(x_r / P);
    - "sum": x = x_last_sync + Σ N(AR(f_r)) over all blocks since, whose f_r are carried along un-normed.

    One all-reduce takes all these vectors, one after the other.

    The function is bound to the number of ranks. Raises RewriterError on one rank, when nothing would be dropped, and
    for a block whose reduction is followed by something that is neither linear nor a norm.
    """

    layers: Selection = "all"
    n: int | None = None
    pattern: tuple[tuple[Choice, ...], ...] | None = None
    resync: Resync = "mean"
    untie_norms: bool = False

    name: ClassVar[str] = "desync"
    effect: ClassVar[Effect] = "approximating"
    scope: ClassVar[Scope] = "per_rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.n is None) == (self.pattern is None):
            raise RewriterError("desync: give either n (keep the last of every n reductions) or a pattern")
        if self.n is not None and self.n < 2:
            raise RewriterError(f"desync: n={self.n} drops nothing: expected 2 or more")
        if self.pattern is not None and not any("drop" in layer for layer in self.pattern):
            raise RewriterError(f"desync: pattern {self.pattern} drops nothing")
        if self.untie_norms and self.phase == "prompt":
            raise RewriterError(
                "desync: untie_norms gives norms weights that exact tokens lack. Leave out phase: prompt"
            )

    def apply(self, program: Program) -> Program:
        ranks = check_ranks(program, self.name)
        blocks = chosen_blocks(program, self.name, self.layers)
        kept: dict[int, bool] = {}
        by_index = {b.index: b for b in blocks}
        for run in runs_of(list(by_index)):
            kept |= self._kept([by_index[index] for index in run], program.modules)
        dropped = sum(not keep for keep in kept.values())
        if not dropped:
            raise RewriterError("desync: no reduction of the selected layers can be dropped: each ends a run of layers")
        # blocks that reduce nothing belong to their layer all the same: what follows it starts drained
        marked = dict.fromkeys(by_index, True) | kept
        result = desynchronise(program, marked, self.resync, self.name, self.untie_norms)
        summary = f"{dropped} of {len(kept)} reductions dropped on {ranks} ranks; kept ones resync by {self.resync}"
        return record(result, self, summary, layers_passed_over(program, blocks, self.layers))

    def kinds_of_layers(self, count: int) -> list[set[int]]:
        chosen = resolve(self.layers, count)
        length = len(self.pattern or ())
        places = [(layer, place) for run in runs_of(chosen) for place, layer in enumerate(run)]
        entries = [{layer for layer, place in places if place % length == entry} for entry in range(length)]
        return [set(chosen), *entries]

    def shrunken(self, kept: Sequence[int], count: int, plan: ops.SequencePlan | None = None) -> Sequence[Pass]:
        """A pattern is written out for each run of places, since layers between those that are kept are gone."""
        if self.pattern is None:
            return super().shrunken(kept, count, plan)
        chosen, length = resolve(self.layers, count), len(self.pattern)
        entry = {layer: self.pattern[i % length] for run in runs_of(chosen) for i, layer in enumerate(run)}
        return [
            replace(self, layers=run, pattern=tuple(entry[kept[place]] for place in run))
            for run in runs_of(places_of(chosen, kept))
        ]

    def reference_modes(self, count: int, reducing: Reducing) -> LayerModes:
        modes: dict[int, dict[str, Any]] = {}
        for run in runs_of(resolve(self.layers, count)):
            number, place = 0, 0  # reductions, and layers that reduce, of this run so far
            for layer in run:
                keep: list[bool] = []
                of_layer = reducing.get(layer, ())  # none of a layer without a block
                choices = iter(self.pattern[place % len(self.pattern)]) if self.pattern else iter(())
                for reduces in of_layer:
                    number += reduces
                    asked = next(choices, "keep") == "keep" if self.n is None else number % self.n == 0
                    keep.append(not reduces or asked)
                place += any(of_layer)
                modes[layer] = {"mode": "desync", "keep": tuple(keep), "resync": self.resync}
        return modes

    def _kept(self, run: Sequence[Block], modules: Mapping[str, Module]) -> dict[int, bool]:
        """By block of a run that reduces: whether its reduction is kept."""
        reducing = [b for b in run if split_writes(b, modules, self.name)[0]]
        if self.n is not None:
            kept = {b.index: (i + 1) % self.n == 0 for i, b in enumerate(reducing)}
        else:
            kept = self._patterned(reducing)
        if reducing:
            kept[reducing[-1].index] = True
        return kept

    def _patterned(self, reducing: Sequence[Block]) -> dict[int, bool]:
        assert self.pattern is not None
        kept: dict[int, bool] = {}
        for place, layer in enumerate(dict.fromkeys(b.layer for b in reducing)):
            choices, blocks = self.pattern[place % len(self.pattern)], [b for b in reducing if b.layer == layer]
            if len(choices) != len(blocks):
                raise RewriterError(
                    f"desync: pattern entry {list(choices)} is about {len(choices)} reductions, layer {layer} has "
                    f"{len(blocks)}: {', '.join(b.path for b in blocks)}"
                )
            kept |= {b.index: choice == "keep" for b, choice in zip(blocks, choices, strict=True)}
        return kept


def desynchronise(
    program: Program, kept: Mapping[int, bool], resync: Resync, name: str, untie_norms: bool = False
) -> Program:
    """`program` whose blocks (by index) keep their reduction or drop it; each run ends with one that is kept.

    Raises RewriterError for a block with more than factors and norms after its reduction, or that reduces inside while
    it reads a rank's own residual.
    """
    graph, _ = program.edit()
    stream = _PerRankStream(graph, program, resync, name)
    for block in blocks_of(graph, program.modules):
        if block.index in kept or stream.varying:
            stream.through(block, kept.get(block.index, True))
        else:
            stream.current = None
    if stream.varying:
        raise RewriterError(f"{name}: the last reduction of a run of layers has to be kept")
    if untie_norms:
        program = program.with_(parameters=_untied_norms(program, graph), origin=program.origin or program)
    return settle_reads(program, graph, name)


class _PerRankStream:
    """Walks along a run of blocks, with what each rank holds."""

    def __init__(self, graph: fx.Graph, program: Program, resync: Resync, name: str) -> None:
        self.graph, self.modules, self.resync, self.name = graph, program.modules, resync, name
        self.ranks = program.mesh[AXIS]
        self.current: fx.Node | None = None  # the stream value that the last block got, if it got another one
        self.synchronised: fx.Node | None = None  # the stream where the ranks last agreed; None while they do
        self.added: fx.Node | None = None  # what this rank added since, but for writes that are normed
        self.waiting: list[fx.Node] = []  # the writes since that are to be normed when their sums are complete

    @property
    def varying(self) -> bool:
        return self.synchronised is not None

    def through(self, block: Block, keep: bool) -> None:
        reduced, whole = split_writes(block, self.modules, self.name)
        self._require_linear(block)
        current, self.block = self.current or block.skip, block
        if not self.varying and (keep or not reduced):
            mark(block.add, mode=KEEP)
            self.current = None
            return
        with self.graph.inserting_before(block.add):
            current = self._carried(current)
            self.synchronised = self.synchronised and self._carried(self.synchronised)
            self.added = self.added and self._carried(self.added)
            if not self.varying:  # ranks part ways here; what they share enters
                self.synchronised = current
                current = self._made(ops.copy_to_group, current, AXIS)
                whole = [self._made(ops.copy_to_group, w, AXIS) for w in whole]
            if keep and reduced:
                value = self._kept(current, reduced, whole)
                mode = KEEP_MEAN if self.resync == "mean" else KEEP_SUM
                self.synchronised, self.added, self.waiting = None, None, []
            else:
                value, mode = self._dropped(current, reduced, whole), DROP
        replace_stream_value(block.add, value, mode)
        self.current = value

    def _require_linear(self, block: Block) -> None:
        """Raise RewriterError where ranks that hold different values cannot agree by one sum of the block's width."""
        if not carries_by_constants(block):
            raise RewriterError(
                f"{self.name}: block {block.path} does more to the residual stream than to scale it by stored factors "
                "and to add one sum (it norms it, mixes several streams by weights that depend on it, or has sums "
                "inside): with a residual of each rank's own the mean is another model, or ranks would have to send "
                "every stream to agree again. Use ladder, or leave its layer out of the selection"
            )

    def _carried(self, value: fx.Node) -> fx.Node:
        """`value` times what the block multiplies the stream by, before it adds to it."""
        block = self.block
        if block.carried == (block.skip,):
            return value
        if self.waiting:
            raise RewriterError(
                f"{self.name}: block {block.path} multiplies the stream while sums wait to be normed: keep the "
                "reduction before it, or use resync: mean"
            )
        record = Marks(layer=block.layer, writes=block.index)
        return carried_on(block, value, record)[0]

    def _dropped(self, current: fx.Node, reduced: list[fx.Node], whole: list[fx.Node]) -> fx.Node:
        parts = [partial_of(w, self.block) for w in reduced]
        for part in parts:
            mark(part, dropped=True)
        if self.resync == "sum":
            self.added = self._added([p for p, w in zip(parts, reduced, strict=True) if is_reduced(w)], whole)
            self.waiting += [w for w in reduced if not is_reduced(w)]
        return self._sum(current, *parts, *whole)

    def _kept(self, current: fx.Node, reduced: list[fx.Node], whole: list[fx.Node]) -> fx.Node:
        travel = dict(sum_in(reduced[0]).kwargs)
        parts = [partial_of(w, self.block) for w in reduced if is_reduced(w)]
        if self.resync == "sum":
            value, added = self.synchronised, self._added(parts, whole)
        elif travel:
            raise RewriterError(STREAM.format(f"the reduction that layer {self.block.layer} keeps"))
        else:
            mean = self._made(operator.mul, self._sum(current, *whole), 1 / self.ranks)
            value, added = None, self._sum(*parts, mean)
        normed = [*self.waiting, *(w for w in reduced if not is_reduced(w))]
        sums = self._reduced(normed, added, travel)
        for write in normed:
            term = self._normed(write, sums[write])
            value = term if value is None else self._late(write, operator.add, value, term)
        if added is not None:
            value = sums[added] if value is None else self._made(operator.add, value, sums[added])
        assert value is not None
        return value

    def _reduced(
        self, normed: list[fx.Node], added: fx.Node | None, travel: Mapping[str, Any]
    ) -> dict[fx.Node, fx.Node]:
        """The sums in the writes `normed`, and that of `added`, from one all-reduce."""
        parts: dict[fx.Node, fx.Node] = {write: part_of(write) for write in normed}
        if added is not None:
            parts[added] = added
        if len(parts) == 1:
            return {of: self._made(ops.all_reduce, part, AXIS, **travel) for of, part in parts.items()}
        together = self._made(aten.cat.default, list(parts.values()), -1)
        total = self._made(ops.all_reduce, together, AXIS, **travel)
        pieces = self._made(aten.chunk.default, total, len(parts), -1)
        return {of: self._late(of, operator.getitem, pieces, i) for i, of in enumerate(parts)}

    def _normed(self, write: fx.Node, total: fx.Node) -> fx.Node:
        """Value of `write` for its `total`; ranks agree on it where the norm is given parts of it, too, or was by an
        earlier pass."""
        if write not in self.waiting and write.target is not ops.agreed:
            return made_of(write, total)
        normed = made_of(write, self._late(write, ops.copy_to_group, total, AXIS), runs_in=self._running(write))
        return self._late(write, ops.agreed, normed, AXIS)

    def _added(self, parts: list[fx.Node], whole: list[fx.Node]) -> fx.Node | None:
        terms = [*([self.added] if self.added else []), *parts]
        terms += [self._made(operator.mul, w, 1 / self.ranks) for w in whole]
        return self._sum(*terms) if terms else None

    def _sum(self, *terms: fx.Node) -> fx.Node:
        total = terms[0]
        for term in terms[1:]:
            total = self._made(operator.add, total, term)
        return total

    def _made(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return new_call(self.graph, Marks(layer=self.block.layer, writes=self.block.index), target, *args, **kwargs)

    def _late(self, write: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A call of the layer of `write`, which runs where its sum is complete."""
        record = Marks(layer=marks(write).layer, writes=self.block.index, runs_in=self._running(write))
        return new_call(self.graph, record, target, *args)

    def _running(self, write: fx.Node) -> int | Literal["unscheduled"]:
        return UNSCHEDULED if marks(write).layer == self.block.layer else self.block.layer


def _untied_norms(program: Program, graph: fx.Graph) -> dict[str, Parameter]:
    """The parameters of `program`, where norms on a rank's own residual have weights per rank.

    Rank r holds rows r·D … (r+1)·D of a parameter [P · D], which starts as P copies of the original.
    """
    local, ranks = local_values(graph, program.parameters), program.mesh[AXIS]
    parameters: dict[str, Parameter] = dict(program.parameters)
    for node in graph.nodes:
        if node.op != "call_module" or marks(node).block is None or node.all_input_nodes[0] not in local:
            continue
        path = str(node.target)
        if any(marks(n).dropped for n in (node, *node.users)):
            continue  # it norms sums of all ranks, too
        own = [n for n in parameters if n.rpartition(".")[0] == path]
        if computes(program.modules[path]) or any(len(parameters[n].shape) != 1 for n in own):
            continue
        for name in own:
            known = parameters[name]
            size = known.shape[0]
            parameters[name] = replace(
                known,
                expression=None if known.expression is None else Concat((known.expression,) * ranks, 0),
                full_shape=(ranks * size,),
                dim=0,
                ranges=equal_runs(ranks * size, ranks),
            )
    return parameters
