"""Other sizes, so that any number of ranks divides them: the same function by an ordinary model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.common.shrink_sizes import INNER
from rewriter.common.text_settings import nested_settings
from rewriter.ir import Body, Opaque, Program, args_of, called_module, nodes_inside, ops
from rewriter.ir.labels import Unsplittable
from rewriter.ir.marks import marks
from rewriter.ir.ops import SequencePlan
from rewriter.ir.residual import attends, carries_state
from rewriter.ir.resizing import CannotBuild, Sizes, resized
from rewriter.passes.base import Effect, Pass, record, with_paths
from rewriter.passes.fitting.sizes import Blocks, as_written, fitted_sizes
from rewriter.passes.fitting.units import (
    BodyUnits,
    body_units,
    channel_units,
    places,
    require_alike,
    source_units,
)
from rewriter.passes.placement.projections import chains, inputs_layout, inputs_of, is_projection, outputs_layout
from rewriter.passes.placement.units import AXIS
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Dequantized, Expression, Tensor
from rewriter.weights.padding import Index, PaddedTensors, growth
from rewriter.weights.quantized_tensors import quantized_weights

MOST_WASTE = 0.25

Places = dict[str, dict[int, Index]]
"""By parameter and dimension, the place in the source that each element comes from; -1: padding."""


@dataclass(frozen=True)
class FitRanks(Pass):
    """W ← [W; 0]: heads, channels and vocabulary padded until every number of ranks divides them.

    Padding contributes nothing: a padded query head has a zero column in the output projection, a padded channel a zero
    column in the down projection. Where ranks hold parts of a group of query heads, its key/value head is repeated, and
    each query head stays with a copy of its own. Rows that the vocabulary gets are the mean of other rows of the head:
    no larger than the largest, so that no padded token is ever the likeliest. (Users of engines pad widths so by hand:
    vLLM's issue 47759, 17,408 to 17,472.) The result is the same class of model with other sizes in its config, which
    every engine loads.

    Sizes divide by the ranks of the mesh, and by each number in `also`. `waste` is the most that the weights may grow,
    as a share (0.25) or as "25%". `applied` says that the checkpoint has these sizes already.

    Comes first. Raises RewriterError where padding would take part in what is computed (a norm over all heads), where
    the model's config has no setting for a size, where groups of quantized weights would be cut, and above `waste`.
    """

    also: Sequence[int] = ()
    waste: float | str = MOST_WASTE
    applied: bool = False

    name: ClassVar[str] = "fit_ranks"
    effect: ClassVar[Effect] = "exact"
    again: ClassVar[Mapping[str, Any]] = {"applied": True}
    planning: ClassVar[Mapping[str, Any]] = {"waste": math.inf}

    def __post_init__(self) -> None:
        object.__setattr__(self, "also", tuple(self.also))
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in self.also):
            raise RewriterError(f"fit_ranks: also={list(self.also)}; expected numbers of ranks")
        _share(self.waste)

    def for_degrees(self, degrees: Sequence[int]) -> Mapping[str, Any]:
        return {"also": tuple(sorted({*self.also, *degrees}))}

    def shrunken(self, kept: Sequence[int], count: int, plan: SequencePlan | None = None) -> Sequence[Pass]:
        """Without a limit: sizes of the copy are small, and padding many times as large."""
        return [replace(self, waste=math.inf)]

    def apply(self, program: Program) -> Program:
        if program.history or any(p.ranges is not None for p in program.parameters.values()):
            raise RewriterError("fit_ranks: sizes are changed before everything else: put it first")
        ranks = sorted({program.mesh.get(AXIS, 1), *self.also})
        if self.applied:
            return record(program, self, "its sizes fit already", fired=False)
        table = nested_settings(program.source.config) or program.source.config
        settings = _used(program, table, fitted_sizes(table, ranks, _blocks(program)))
        if not settings:
            said = "one rank divides" if ranks == [1] else f"{_listed(ranks)} ranks divide"
            return record(program, self, f"{said} every size", fired=False)
        found = _Padding(program)
        try:
            made = found.resized(as_written(table, program.source.model_type, settings))
        except RewriterError as error:
            fewer = next(n for n in range(max(ranks), 0, -1) if not fitted_sizes(table, (n,)))
            raise RewriterError(f"fit_ranks: {str(error).rstrip('.')}. --tp {fewer} needs no padding") from error
        added = growth_of(program, made)
        allow = f"--set fit_ranks.waste={-(-added * 100 // 5) * 5:.0f}%"
        if added > _share(self.waste):
            raise RewriterError(
                f"fit_ranks: for {_listed(ranks)} ranks the weights would grow by {added:.1%} "
                f"({_sizes(table, settings)}), and at most {_share(self.waste):.0%} are allowed. Take fewer ranks, or "
                f"allow it with {allow}"
            )
        summary, notes = f"{_sizes(table, settings)}; weights {added:+.1%}", found.notes()
        if self.waste == math.inf and added > MOST_WASTE:
            notes = (*notes, f"weights grow by {added:.1%}: a conversion asks for {allow}")
        return record(
            program, self, summary, notes, source=made.source, graph=made.graph, modules=made.modules,
            parameters=made.parameters, ties=made.ties,
        ).with_(origin=made)  # fmt: skip


def _share(waste: float | str) -> float:
    try:
        share = float(waste[:-1]) / 100 if isinstance(waste, str) and waste.endswith("%") else float(waste)
    except ValueError:
        share = -1.0
    if not share >= 0:
        raise RewriterError(f"fit_ranks: waste={waste!r}; expected a share such as 25% or 0.25")
    return share


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + (" and " if len(ranks) > 1 else "") + str(ranks[-1])


def _sizes(table: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {table.get(name, 'unset')} → {value}" for name, value in settings.items())


def _used(program: Program, table: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` without widths that no weight has: a config may have some of modules that the model has not."""
    sizes = {size for spec in program.parameters.values() for size in spec.shape}
    unused = {
        name
        for name in settings.keys() & {*INNER}
        if isinstance(table[name], int) and all(size % table[name] for size in sizes)
    }
    return {name: value for name, value in settings.items() if name not in unused}


def _blocks(program: Program) -> Blocks:
    """Of quantized weights, the elements that one group holds, by kind of module."""
    attention, mixers, channels = {1}, {1}, {1}
    for name, spec in program.parameters.items():
        body = next((program.modules[path] for path in _above(name) if path in program.modules), None)
        kind = attention if body and attends(body) else mixers if body and carries_state(body) else channels
        for node in () if spec.expression is None else spec.expression.nodes():
            if isinstance(node, Dequantized):
                kind |= _groups(node, spec.shape)
    return Blocks(math.lcm(*attention), math.lcm(*mixers), math.lcm(*channels))


def _above(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _groups(weight: Dequantized, shape: Sequence[int]) -> set[int]:
    if weight.scheme == "mxfp4":
        return {32}
    if weight.scheme in ("awq", "gptq"):
        inputs = shape[-1] if weight.scheme == "gptq" else 0  # a linear layer's weight is [outputs, inputs]
        return {32 // weight.numbers[0], weight.numbers[1] if not inputs else inputs // weight.numbers[1]}
    sizes = shape[len(shape) - len(weight.numbers) :]
    return (
        {per for per, size in zip(weight.numbers, sizes, strict=True) if per < size} if weight.scheme == "fp8" else {1}
    )


def growth_of(program: Program, made: Program) -> float:
    """The share by which weights grow: bytes of the checkpoint, or elements where there is none."""
    if program.source.path is None:
        before, after = (sum(math.prod(s.shape) for s in p.parameters.values()) for p in (program, made))
        return after / before - 1
    return growth(Checkpoint.open(program.source.path), made.source.padded)


def _whole(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[Expression, str]:
    """The names of what quantized tensors stand for."""
    quantized = quantized_weights(checkpoint, config)
    tensors = {} if quantized is None else quantized.tensors
    return {tensor: name for name, tensor in tensors.items() if tensor != Tensor(name)}


class _Padding:
    """Places of the weights of `program` in a program of other sizes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.left: dict[str, list[str]] = {}  # by reason, the modules that have no units

    def notes(self) -> tuple[str, ...]:
        return with_paths(self.left, " as it was")

    def resized(self, ways: Iterator[Sizes]) -> Program:
        """The program of other sizes. Raises RewriterError where no way to say them is taken by the model's classes."""
        refused: CannotBuild | None = None
        for sizes in ways:
            self.left.clear()
            try:
                return resized(self.program, sizes, self.stored)
            except CannotBuild as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def stored(self, made: Program) -> PaddedTensors | None:
        """See `rewriter.ir.resizing.Stored`. Raises RewriterError for what cannot be padded, by its name."""
        moved: Places = {}
        for path, units in self._units(made):
            for name, dims in units.items():
                moved.setdefault(made.ties.get(full := f"{path}.{name}", full), {}).update(dims)
        place, padded = self.program.source.path, None
        if place is not None:
            checkpoint = Checkpoint.open(place)
            padded = PaddedTensors(checkpoint, _whole(checkpoint, self.program.source.config))
        for name, spec in made.parameters.items():
            before = self.program.parameters.get(name)
            if before is None:
                raise RewriterError(f"{name} is no parameter of the source")
            dims = {d: i for d, i in moved.get(name, {}).items() if i != tuple(range(before.shape[d]))}
            shape = tuple(len(dims[d]) if d in dims else size for d, size in enumerate(before.shape))
            try:
                if shape != spec.shape and not dims and shape[1:] == spec.shape[1:] and _is_vocabulary(made, name):
                    _add_rows(padded, before.expression, spec.shape[0] - shape[0], _is_head(made, name))
                elif shape != spec.shape:
                    reasons = (reason for reason, paths in self.left.items() for p in paths if name.startswith(f"{p}."))
                    said = f"its shape would be {list(spec.shape)}, and which of it are heads or channels is not known"
                    raise RewriterError(next(reasons, said))
                elif before.expression is not None and padded is not None:
                    padded.pad(before.expression, dims)
            except RewriterError as error:
                raise RewriterError(f"{name}: {error}") from error
        return padded

    def _units(self, made: Program) -> Iterator[tuple[str, dict[str, dict[int, Index]]]]:
        """Every module of a layer that has heads or channels, with the places of its parameters' elements."""
        known: dict[tuple[int, int], dict[str, dict[int, Index]] | str] = {}
        for node in self.program.graph.nodes:
            before = called_module(node, self.program.modules)
            path = str(node.target)
            after = made.modules.get(path)
            if marks(node).layer is None or not isinstance(before, Body):
                continue
            if not isinstance(after, Body):
                reason = f", since {after.reason}" if isinstance(after, Opaque) else ""
                raise RewriterError(f"{path} computes otherwise with these sizes{reason}")
            if not (
                before.modules or before.reads_context or any(n.target is ops.experts for _, n in nodes_inside(before))
            ):
                continue  # norms and other small modules
            key = id(before), id(after)
            if key not in known:
                known[key] = _places_of(before, after, path)
            if isinstance(places_of := known[key], str):
                self.left.setdefault(places_of, []).append(path)
            else:
                yield path, places_of
        for old, new in zip(*(chains(p.graph, p.modules) for p in (self.program, made)), strict=True):
            units = [_chain_units(chain, p) for chain, p in ((old, self.program), (new, made))]
            yield from _split_names(_index(*units))


def _places_of(before: Body, after: Body, path: str) -> dict[str, dict[int, Index]] | str:
    """The places that elements of a body's parameters come from; the reason where it has no heads or channels to pad.

    Raises RewriterError where padding would take part in what it computes.
    """
    try:
        old = body_units(before)
    except Unsplittable as reason:
        return str(reason)
    try:
        return _index(old, body_units(after))
    except Unsplittable as reason:
        raise RewriterError(f"{path} cannot be padded: {reason}") from reason


def _index(old: BodyUnits, new: BodyUnits) -> dict[str, dict[int, Index]]:
    source = source_units(old, new)
    require_alike(old, new, source)
    result: dict[str, dict[int, Index]] = {}
    for name, dims in new.parameters.items():
        for dim, profile in dims.items():
            known = old.parameters.get(name, {}).get(dim)
            if known is None:
                raise Unsplittable(f"{name} has no heads or channels in the source")
            result.setdefault(name, {})[dim] = places(known, profile, source)
    return result


def _chain_units(chain: Any, program: Program) -> BodyUnits:
    count, names = 0, {}
    for node, entry in (*((n, True) for n in chain.entries), (chain.exit, False)):
        leaf = called_module(node, program.modules)
        assert is_projection(leaf)
        names[f"{node.target}.weight"] = outputs_layout(leaf)[1] if entry else inputs_layout(leaf)
        if entry and "bias" in leaf.parameters:
            names[f"{node.target}.bias"] = 0
        count = inputs_of(leaf)
    return channel_units(names, count)


def _split_names(moved: dict[str, dict[int, Index]]) -> Iterator[tuple[str, dict[str, dict[int, Index]]]]:
    for name, dims in moved.items():
        path, _, own = name.rpartition(".")
        yield path, {own: dims}


# --- the vocabulary


def _is_vocabulary(program: Program, name: str) -> bool:
    """True for a parameter of the embedding or the head: one that no layer has."""
    return not name.startswith(f"{program.source.layers}.")


def _is_head(program: Program, name: str) -> bool:
    """True where logits are made with a parameter, alone or tied to the embedding."""
    made = args_of(program.graph.output_node())[0]
    node = made if isinstance(made, fx.Node) else made[0]
    while node.op != "call_module" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    weight = f"{node.target}.weight"
    return name in (program.ties.get(weight, weight), f"{node.target}.bias")


def _add_rows(padded: PaddedTensors | None, expression: Expression | None, count: int, head: bool) -> None:
    """Let there be more tokens, which nobody writes and which are never the likeliest."""
    if padded is None or expression is None:
        return
    if not isinstance(expression, Tensor):
        raise RewriterError(f"the vocabulary is stored as {expression}, which cannot be padded")
    padded.add_rows(expression.name, count, head)
