"""Functions that residual rewrites share: partials of a write, what each block reads, bodies for values that differ by
rank.

The mode of a block (`rewriter.ir.marks.Mode`) is a mark on the stream value that it writes. `settle_reads` derives
from the marks alone what each block reads, so that passes may come in any order and mix freely.

Bodies for values that differ by rank are made by `rewriter.passes.localised`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import (
    Body,
    Leaf,
    Module,
    Opaque,
    Parameter,
    Program,
    args_of,
    bypass,
    drop_dead_nodes,
    ops,
    put_after,
    reachable,
)
from rewriter.ir.coefficients import coefficients_of
from rewriter.ir.communication import local_values
from rewriter.ir.marks import STANDARD, Marks, Mode, in_stream, mark, marks, new_call, set_marks, stream_index
from rewriter.ir.op_semantics import data_of, function_of, kind_of
from rewriter.ir.residual import Block, blocks_of, computes, is_scaling, read_index, stream_values
from rewriter.ir.stream import weighs, why_no_stream
from rewriter.passes.localised import localise
from rewriter.passes.placement.units import AXIS
from rewriter.passes.selection import ALL, Selection, resolve, spans


def chosen_blocks(program: Program, name: str, layers: Selection) -> tuple[Block, ...]:
    """The blocks of the selected layers, none of them rewired before.

    Of `all` layers, those without a block stay as they are: cross-attention has nothing to attend to in text alone.
    Raises RewriterError when the model has no residual stream, when another selection has a layer without a block, and
    for a block that a pass has rewired already or that reads the stream in more than one place.
    """
    chosen = set(resolve(layers, program.source.num_layers))
    if not chosen:
        raise RewriterError(f"{name}: layers={layers!r} selects no layer of {program.source.num_layers}")
    blocks = blocks_of(program.graph, program.modules)
    if not blocks:
        raise RewriterError(why_no_stream(program) or f"{name}: the model has no residual stream")
    selected = tuple(b for b in blocks if b.layer in chosen)
    if layers != ALL and (lacking := chosen - {b.layer for b in selected}):
        raise RewriterError(
            f"{name}: layer {min(lacking)} has no residual block: it leaves the stream as it is. Select other layers, "
            f"or {ALL}, which passes over it"
        )
    for block in selected:
        if block.mode != STANDARD:
            raise RewriterError(f"{name}: block {block.path} was rewired before ({block.mode})")
        if block.reads != (block.index,):
            raise RewriterError(
                f"{name}: block {block.path} reads the stream values {block.reads}, not {block.index} alone"
            )
    return selected


def layers_passed_over(program: Program, blocks: Collection[Block], layers: Selection) -> tuple[str, ...]:
    """A note on the selected layers that have none of the chosen `blocks`; nothing where each has one."""
    lacking = sorted({*resolve(layers, program.source.num_layers)} - {b.layer for b in blocks})
    return (f"left as they are, without a residual block: layers {spans(lacking)}",) if lacking else ()


def check_ranks(program: Program, name: str) -> int:
    """The number of ranks. Raises RewriterError on one device, or when reductions were scheduled already."""
    ranks = program.mesh.get(AXIS, 1)
    if ranks == 1 or all(r.name != "tensor_parallel" for r in program.history):
        raise RewriterError(
            f"{name} is bound to a number of ranks, here {ranks}: give --tp 2 or more, with tensor_parallel before it "
            "in the recipe"
        )
    if any(r.name == "overlap" for r in program.history):
        raise RewriterError(f"{name}: the reductions are scheduled already. Put overlap after it in the recipe.")
    return ranks


def is_reduced(write: fx.Node) -> bool:
    """True if a write is a sum over ranks, possibly times factors that do not depend on it."""
    if write.target is ops.all_reduce:
        return True
    source = _linear_in(write)
    return source is not None and is_reduced(source)


def _linear_in(node: fx.Node) -> fx.Node | None:
    """The one value in which `node` is linear: the others are numbers, and factors that the block scales by."""
    sources = [n for n in data_of(node) if not is_factor(n)]
    moves = is_scaling(node) or kind_of(node) in ("view", "cast") or node.target in (ops.copy_to_group, ops.agreed)
    scales = function_of(node) == "mul" or (function_of(node) == "div" and args_of(node)[0] in sources)
    return sources[0] if len(sources) == 1 and (moves or scales) else None


def is_factor(node: fx.Node) -> bool:
    """True if a value of a layer's wiring scales what a block carries or writes: a stored tensor, or K and b of it."""
    if node.target is ops.copy_to_group:
        return is_factor(args_of(node)[0])
    return node.op == "get_attr" or marks(node).carry is not None


def ends_in_sum(write: fx.Node, modules: Mapping[str, Module]) -> bool:
    """True if a write is a sum over ranks, times factors or normed."""
    while write.target is not ops.all_reduce:
        source = _linear_in(write)
        if source is None:
            module = modules[str(write.target)] if write.op == "call_module" else None
            norms = module is not None and not isinstance(module, Opaque) and not computes(module)
            if not norms or len(write.all_input_nodes) != 1:
                return False
            source = write.all_input_nodes[0]
        write = source
    return True


def made_of(write: fx.Node, value: fx.Node, enters: bool = False, **other_marks: Any) -> fx.Node:
    """The nodes of a reduced `write` after its sum, applied to `value` instead: products and norms, where the graph
    inserts. With `enters`, `value` differs by rank, and the factors that all ranks share enter as copies."""
    if write.target is ops.all_reduce:
        return value
    source = _linear_in(write) or write.all_input_nodes[0]
    inner = made_of(source, value, enters, **other_marks)
    if write.target in (ops.copy_to_group, ops.agreed):
        return inner
    given = {source: inner}
    record = replace(marks(write).only("layer", "python"), **other_marks)
    for factor in data_of(write):
        if enters and factor not in given and write.op != "call_module":
            given[factor] = new_call(write.graph, record, ops.copy_to_group, factor, AXIS)
    made = write.graph.node_copy(write, lambda n: given.get(n, n))
    set_marks(made, record)
    return made


def partial_of(write: fx.Node, block: Block) -> fx.Node:
    """This rank's own contribution in place of a reduced `write`: the same, made of its own part of the sum.

    A norm gives its result a size of its own, so that of a part stands for all of the write.
    """
    with write.graph.inserting_before(write.next):
        return made_of(write, part_of(write), enters=True, block=block.index)


def part_of(write: fx.Node) -> fx.Node:
    """This rank's own part of the sum in a reduced write."""
    part: fx.Node = args_of(sum_in(write))[0]
    return part


def sum_in(write: fx.Node) -> fx.Node:
    """The all-reduce in a reduced write; its options are its format, none where it is exact."""
    while write.target is not ops.all_reduce:
        write = _linear_in(write) or write.all_input_nodes[0]
    return write


def split_writes(block: Block, modules: Mapping[str, Module], name: str) -> tuple[list[fx.Node], list[fx.Node]]:
    """(writes that are reduced, normed ones among them; writes that every rank computes in full).

    Raises RewriterError for a write that depends on a reduction in another way.
    """
    inside = set(block.branch)
    reduced = [w for w in block.writes if ends_in_sum(w, modules)]
    whole = [w for w in block.writes if w not in reduced]
    for write in whole:
        read = reachable([write], lambda node: (n for n in node.all_input_nodes if n in inside))
        if reduction := next((n for n in read if n.target is ops.all_reduce), None):
            described = write.target if write.op == "call_module" else write.name
            raise RewriterError(
                f"{name}: block {block.path}: its reduction {reduction.name} is followed by {described}, which is "
                "neither linear nor a norm: a rank's partial sum cannot be added in its place. Leave this layer out of "
                "the selection."
            )
    return reduced, whole


def replace_stream_value(old: fx.Node, new: fx.Node, mode: Mode) -> None:
    """Let `new` be the stream value that `old` was; `old` goes, and `new` takes its name."""
    name = old.name
    mark(new, stream=stream_index(old), layer=marks(old).layer, mode=mode)
    bypass(old, new)
    new._rename(name)


def settle_reads(program: Program, graph: fx.Graph, name: str) -> Program:
    """`program` with the edited wiring, where each ladder block reads what the modes around it say.

    Transitions (Ladder Residual, section 4.2 and Alg. 1): a ladder block reads the stream one block earlier. After a
    block of another ladder variant, or a desynced one, it reads everything. An own-partial block reads the same, plus
    what this rank itself contributed in between. A block that ranks do not share has no sum that could be late: the
    block after it reads what it wrote, and misses the last sum before it.
    """
    blocks = blocks_of(graph, program.modules)
    reads = _LateReads(program, graph, blocks, name)
    for block in blocks:
        if block.mode.reads != "newest":
            reads.settle(block)
    drop_dead_nodes(graph)
    bound = {b.index for b in blocks if b.mode.own_residual} | reads.bound
    return _with_own_residuals(program, graph, bound)


class _LateReads:
    """Gives ladder blocks what they read. `bound` are the blocks of which a rank's own part is read."""

    def __init__(self, program: Program, graph: fx.Graph, blocks: Sequence[Block], name: str) -> None:
        self.program, self.graph, self.blocks, self.name = program, graph, blocks, name
        self.stream = stream_values(graph)
        self.bound: set[int] = set()
        self.made: dict[int, fx.Node] = {}  # by block, what it makes of the stream without its sum
        self.replayed: dict[tuple[int, fx.Node], fx.Node] = {}

    def settle(self, block: Block) -> None:
        """Let `block` read late. What every rank computes in full is given what ranks agree on."""
        reads = _reads(block)
        first = reads[0][0]
        own = block.mode.reads == "earlier_and_own" and not block.local
        value = self._late(block.index, block, first, own)
        differs = own and value not in self.stream
        if value in self.stream and not all(in_stream(source) for _, source in reads):
            # an earlier pass made its modules fit for values that differ by rank: gradients are summed before them
            with self.graph.inserting_before(first):
                record = Marks(layer=marks(first).layer, reads=stream_index(value))
                value = new_call(self.graph, record, ops.copy_to_group, value, AXIS)
        self._read(block, value, differs)

    def _late(self, index: int, reader: Block, first: fx.Node, own: bool) -> fx.Node:
        """The value that a block in the place `index` reads late, where one of the mode of `reader` does; with `own`,
        with this rank's own part of what is late. `first` is in the layer of what reads it first: a layer may begin to
        read for a block of the next one (BART's last norm)."""
        before = self.blocks[index - 1] if index else None
        other = before is not None and before.mode.reads != reader.mode.reads
        if before is None or (other and (before.mode.own_residual or before.mode.reads != "newest")):
            return self.stream[index]
        if before.local:
            earlier = self._late(before.index, reader, before.add, own)
            return self.stream[index] if earlier is self.stream[before.index] else self._replay(before, earlier, own)
        if not own:
            return self._without_sum(before)
        value = _with_own_partial(before, reader, marks(first).layer, self.program.modules, self.name)
        self.bound.add(before.index)
        if value is not before.add and split_writes(reader, self.program.modules, self.name)[1]:
            raise RewriterError(
                f"{self.name}: block {reader.path} could not be split, so every rank computes all of it: from its own "
                "partial sum each would get another result. Leave its layer out of the selection."
            )
        return value

    def _without_sum(self, block: Block) -> fx.Node:
        """The stream after a block without its sum: K(X), and what it adds that does not depend on the sum."""
        if block.index not in self.made:
            record = Marks(layer=marks(block.add).layer, carry=block.index)
            with self.graph.inserting_before(block.add):
                constants = [c for c in (_constant(write, record) for write in block.writes) if c is not None]
                total, *others = (*block.carried, *constants)
                for term in others:
                    total = new_call(self.graph, record, operator.add, total, term)
            self.made[block.index] = total
        return self.made[block.index]

    def _replay(self, block: Block, earlier: fx.Node, own: bool) -> fx.Node:
        """The stream after a block that ranks do not share, with `earlier` in place of what it carries on."""
        key = (block.index, earlier)
        if key not in self.replayed:
            record = Marks(layer=marks(block.add).layer, reads=_stands_for(earlier))
            with self.graph.inserting_before(max(block.add, earlier).next):
                total, *others = carried_on(block, earlier, record, own)
                for term in (*others, *block.writes):
                    entering = new_call(self.graph, record, ops.copy_to_group, term, AXIS) if own else term
                    total = new_call(self.graph, record, operator.add, total, entering)
            self.replayed[key] = total
        return self.replayed[key]

    def _read(self, block: Block, value: fx.Node, differs: bool) -> None:
        """Let what `block` computes with weights read `value`, and all else of it the newest value of the stream; of
        that, its coefficients where its mode says so. Where `value` differs by rank, factors that all ranks share meet
        it as copies."""
        inside, modules = set(block.branch), self.program.modules
        work = [n for n in block.branch if n.op == "call_module" and weighs(modules[str(n.target)])]
        mixing = coefficients_of(block) if block.mode.coefficients == "earlier" else ()
        own = {n for n in self.graph.nodes if n in inside or marks(n).carry == block.index} if mixing else inside
        late = set(reachable([*work, *mixing], lambda n: (s for s in data_of(n) if s in own)))
        given = {source: value for _, source in _reads(block) if source is not value}
        for node in [n for n in self.graph.nodes if n in late] if given else ():
            if marks(node).carry is None or node in mixing:
                for source in set(node.all_input_nodes).intersection(given):
                    node.replace_input_with(source, given[source])
                continue
            inputs = {n: given.get(n, n) for n in node.all_input_nodes}
            if _casts_nothing(node, inputs):
                given[node] = inputs[args_of(node)[0]]
                mark(node, block=None)
                continue
            record = marks(node).only("layer", "block")
            with self.graph.inserting_before(node):
                for factor in inputs if differs and node.op != "call_module" else ():
                    if factor not in given:
                        inputs[factor] = new_call(self.graph, record, ops.copy_to_group, factor, AXIS)
            with self.graph.inserting_after(node):
                given[node] = self.graph.node_copy(node, inputs.__getitem__)
            mark(given[node], carry=block.index if mixing else None, block=block.index)
            mark(node, block=None)
        for node in given:
            if node.op == "call_module" and node in inside and block.mode.reads == "earlier_and_own":
                self._agree_on(node)

    def _agree_on(self, node: fx.Node) -> None:
        """Let ranks agree on what a module computes for K and b, that computes with values that differ by rank, too."""
        record = marks(node).only("layer", "carry")
        with self.graph.inserting_before(node):
            for source in node.all_input_nodes:
                if str(source.target) != "ctx":
                    node.replace_input_with(source, new_call(self.graph, record, ops.copy_to_group, source, AXIS))
        elements = [user for user in node.users if user.target is operator.getitem]
        for value in elements or [node]:
            set_marks(put_after(value, ops.agreed, AXIS), record)


def _constant(write: fx.Node, record: Marks) -> fx.Node | None:
    """A write whose sum is zero, where the graph inserts; None for zero.

    Only a stored tensor that is added between the sum and the stream makes it something else.
    """
    sources = [n for n in data_of(write) if not is_factor(n)]
    if write.op == "call_module" or write.target is ops.all_reduce or len(sources) != 1:
        return None
    inner, stored = _constant(sources[0], record), [n for n in data_of(write) if is_factor(n)]
    if inner is None and function_of(write) == "add":
        return stored[0]
    if inner is None:
        return None
    made = write.graph.node_copy(write, lambda n: inner if n is sources[0] else n)
    set_marks(made, record)
    return made


def carried_on(block: Block, value: fx.Node, record: Marks, enters: bool = False) -> list[fx.Node]:
    """K of a block, what it carries on of the stream, applied to `value` instead, where the graph inserts. With
    `enters`, `value` differs by rank, and the factors that all ranks share enter as copies."""
    made: dict[fx.Node, fx.Node] = {block.skip: value}

    def of(node: fx.Node) -> fx.Node:
        if in_stream(node):  # the value that the block skips may be another one by now
            return value
        if node not in made and marks(node).carry == block.index and node.all_input_nodes:
            inputs = {n: of(n) for n in node.all_input_nodes}
            made[node] = node
            if _casts_nothing(node, inputs):
                made[node] = inputs[args_of(node)[0]]
            elif any(new is not old for old, new in inputs.items()):
                for old, new in inputs.items():
                    if enters and new is old and node.op != "call_module":
                        inputs[old] = new_call(node.graph, record, ops.copy_to_group, old, AXIS)
                made[node] = node.graph.node_copy(node, inputs.__getitem__)
                set_marks(made[node], replace(record, python=marks(node).python))
        return made.get(node, node)

    return [of(term) for term in block.carried]


def _casts_nothing(node: fx.Node, inputs: Mapping[fx.Node, fx.Node]) -> bool:
    """True of a cast that, with these inputs, is one to the dtype that its value has: to which that was cast itself."""

    def of_dtype(value: fx.Node) -> fx.Node:
        while value.target is ops.type_as_model:
            value = args_of(value)[1]
        return value

    return node.target is ops.type_as_model and len({of_dtype(value) for value in inputs.values()}) == 1


def carries_by_constants(block: Block) -> bool:
    """True if a block carries the stream on times stored factors and numbers, and scales what it writes by such."""
    own = [n for n in block.add.graph.nodes if marks(n).carry == block.index]
    if any(n.op != "get_attr" and _linear_in(n) is None for n in own) or len(block.carried) > 1:
        return False
    on_way = reachable(block.carried, lambda n: () if n is block.skip else n.all_input_nodes)
    return all(n in on_way or n.op == "get_attr" for n in own)


def _stands_for(value: fx.Node) -> int | None:
    """The number of the stream value that a node is, stands for, or carries on."""
    index = read_index(value)
    return marks(value).carry if index is None else index


def _reads(block: Block) -> list[tuple[fx.Node, fx.Node]]:
    """(node of the block, what it reads of the stream), in order."""
    uses = ((node, source) for node in block.branch for source in data_of(node))
    return [(node, s) for node, s in uses if s not in block.branch and read_index(s, block.index) is not None]


def _with_own_partial(
    before: Block, block: Block, layer: int | None, modules: Mapping[str, Module], name: str
) -> fx.Node:
    """X before block `before`, plus this rank's part of what it writes, in `layer`; the sum itself where ranks hold all
    of it."""
    reduced, whole = split_writes(before, modules, name)
    if not reduced:
        return before.add
    graph = before.add.graph
    parts = [partial_of(w, before) for w in reduced]
    for write in reduced:
        if not is_reduced(write):
            _agree(write, before)
    first, _ = _reads(block)[0]
    made = partial(new_call, graph, Marks(layer=layer, reads=before.index))
    with graph.inserting_before(first):
        value, *others = (made(ops.copy_to_group, term, AXIS) for term in before.carried)
        for part in (*others, *parts):
            value = made(operator.add, value, part)
        for write in whole:
            value = made(operator.add, value, made(ops.copy_to_group, write, AXIS))
    return value


def _agree(write: fx.Node, block: Block) -> None:
    """Let ranks agree on a normed sum: its norm computes with values that differ by rank, too."""
    if write.target is ops.agreed:
        return
    first, total = write, sum_in(write)
    while first.all_input_nodes[0] is not total:
        first = first.all_input_nodes[0]
    record = Marks(layer=block.layer, block=block.index)
    with write.graph.inserting_before(first):
        first.replace_input_with(total, new_call(write.graph, record, ops.copy_to_group, total, AXIS))
    set_marks(put_after(write, ops.agreed, AXIS), record)


def _with_own_residuals(program: Program, graph: fx.Graph, bound: set[int]) -> Program:
    """`program` with bodies fit for values that differ by rank; as it is where none does."""
    origin = program.origin or program
    if not bound:
        return program.with_(graph=graph, origin=origin)
    paths = {str(node.target) for node in graph.nodes if node.op == "call_module" and marks(node).block in bound}
    without_idle_copies(graph, program.parameters)
    modules = localise(graph, share_bias(program.modules, paths), program.parameters)
    return program.with_(graph=graph, modules=modules, origin=origin)


def share_bias(modules: Mapping[str, Module], paths: Collection[str]) -> dict[str, Module]:
    """`modules` where the row-split projections under `paths` add bias / P on every rank, not the bias on one.

    Σ_r f_r is the same, and no rank's own residual is special.
    """
    done: dict[int, Module] = {}

    def shared(module: Module) -> Module:
        if id(module) not in done:
            done[id(module)] = module
            if isinstance(module, Body):
                inner = {name: shared(child) for name, child in module.modules.items()}
                if any(inner[name] is not child for name, child in module.modules.items()):
                    done[id(module)] = replace(module, modules=inner)
            elif isinstance(module, Leaf) and module.kind.startswith("RowParallel") and "bias" in module.parameters:
                done[id(module)] = replace(module, options={**module.options, "bias_share": True})
        return done[id(module)]

    return {path: shared(module) if path in paths else module for path, module in modules.items()}


def without_idle_copies(graph: fx.Graph, parameters: Mapping[str, Parameter]) -> None:
    """Erase each `copy_to_group` of a value that is local already: it would sum gradients of different values."""
    local = local_values(graph, parameters)
    for node in list(graph.nodes):
        if node.target is ops.copy_to_group and node.all_input_nodes[0] in local:
            bypass(node, node.all_input_nodes[0])
