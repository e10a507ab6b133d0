"""Tensor parallelism: attention split by heads, MLPs and experts by channels, vocabulary by rows."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

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
    called_module,
    copy_graph,
    ops,
    put_after,
    reachable,
)
from rewriter.ir.labels import Unsplittable, reduced_shape, value_of
from rewriter.ir.marks import in_stream, mark, marks, set_marks
from rewriter.ir.op_semantics import aten
from rewriter.ir.residual import attends, carries_state, has_experts
from rewriter.ir.structure import without_dropout
from rewriter.passes.base import Effect, Pass, Scope, record, with_paths
from rewriter.passes.placement.placement import split_body
from rewriter.passes.placement.placement_state import Split, SplitBody, with_constant_inputs
from rewriter.passes.placement.projections import (
    Shard,
    chains,
    column_parallel,
    held,
    inputs_of,
    outputs_of,
    resized,
    row_parallel,
)
from rewriter.passes.placement.units import AXIS, Ranges, equal_runs
from rewriter.passes.sequence.sequence_plans import attentions


@dataclass(frozen=True)
class TensorParallel(Pass):
    """x ← x + AR(attn_r(norm1(x))), x ← x + AR(mlp_r(norm2(x))) (Megatron-LM, arXiv 1909.08053, section 3).

    The axis size is the mesh's "tp"; at 1 the program is returned as it is. Entry projections are split by output
    (heads whole), exit projections by input, so each block ends in one all-reduce; its bias is added by one rank.
    Key/value heads that do not divide are replicated as needed. Embedding and head are split by vocabulary where it
    divides, both or neither when tied; with `vocabulary` false both are whole on every rank, as gpt-fast has them,
    and nothing is gathered. A block that cannot be split is replicated, exactly, and noted with the reason.

    Raises RewriterError when query heads do not divide by the axis size, naming the nearest sizes that do.
    """

    name: ClassVar[str] = "tensor_parallel"
    effect: ClassVar[Effect] = "exact"
    scope: ClassVar[Scope] = "runtime"
    makes_partials: ClassVar[bool] = True
    vocabulary: bool = True

    def apply(self, program: Program) -> Program:
        ranks = program.mesh.get(AXIS, 1)
        if ranks == 1:
            return record(program, self, "one rank: nothing to split", fired=False, graph=without_dropout(program))
        sizes = {reduced_shape(value_of(args_of(node)[0]))[1] for _, node in attentions(program)}
        if heads := min((h for h in sizes if h % ranks), default=None):
            valid = [d for d in range(1, heads + 1) if all(h % d == 0 for h in sizes)]
            below = max(d for d in valid if d < ranks)
            near = ", ".join(map(str, [below, *[d for d in valid if d > ranks][:1]]))
            raise RewriterError(
                f"--tp {ranks}: {heads} query heads do not divide by {ranks}. Nearest: {near}. --recipe fit-tp pads "
                "them"
            )
        program = program.with_(modules=with_constant_inputs(program))
        graph = without_dropout(program)
        sharder = _Sharder(program, graph, ranks)
        sharder.layers()
        sharder.chains()
        if self.vocabulary:
            sharder.vocabulary()
        counts = ", ".join(f"{n} {what}" for what, n in sharder.counts.items())
        summary = f"{ranks} ranks: {counts or 'nothing'} split"
        notes = with_paths(sharder.refused, " replicated")
        return record(
            program, self, summary, notes, graph=graph, modules=sharder.modules, parameters=sharder.parameters
        )


class _Sharder:
    def __init__(self, program: Program, graph: fx.Graph, ranks: int) -> None:
        self.program, self.graph, self.ranks = program, graph, ranks
        self.modules: dict[str, Module] = dict(program.modules)
        self.parameters: dict[str, Parameter] = dict(program.parameters)
        self.counts: Counter[str] = Counter()
        self.held: dict[fx.Node, Split] = {}  # of what layers hand on, the parts that ranks hold
        self.refused: dict[str, list[str]] = {}

    def layers(self) -> None:
        done: dict[int, SplitBody | str] = {}
        for node in list(self.graph.nodes):
            if node.op != "call_module" or marks(node).layer is None:
                continue
            path = str(node.target)
            body = self.modules[path]
            if isinstance(body, Opaque):
                self.refused.setdefault(f"it stays the source's own module, since {body.reason}", []).append(path)
            if not isinstance(body, Body) or not (body.modules or body.reads_context or has_experts(body)):
                continue  # norms and other small modules stay replicated
            if id(body) not in done:
                try:
                    done[id(body)] = split_body(body, self.ranks)
                except Unsplittable as reason:
                    done[id(body)] = str(reason)
            split = done[id(body)]
            self._require_held(node, {} if isinstance(split, str) else split.inputs)
            if isinstance(split, str):
                self.refused.setdefault(split, []).append(path)
                continue
            self.modules[path] = split.body
            for name, shard in split.shards.items():
                self._shard(f"{path}.{name}", shard)
            elements = [user for user in node.users if user.target is operator.getitem]
            for element in elements:
                place = args_of(element)[1]
                mark(element, alike=place > 0 and place not in split.results)
            self.held |= {e: s for e in elements if (s := split.results.get(args_of(e)[1])) is not None}
            for partial in [node] if body.outputs == 1 else [e for e in elements if args_of(e)[1] == 0]:
                total = self._reduce(partial)
                [partial, *elements][-1].append(total)  # the elements stay together
            kind = "attention" if attends(body) else "mixer" if carries_state(body) else "MLP"
            self.counts[f"{kind} blocks"] += 1

    def _require_held(self, node: fx.Node, inputs: Mapping[int, Split]) -> None:
        """Raise RewriterError unless ranks hold what an earlier layer hands on as the module that reads it does."""
        for place, source in enumerate(node.args):
            if isinstance(source, fx.Node) and self.held.get(source) != inputs.get(place):
                raise RewriterError(
                    f"{node.target} reads what {source.all_input_nodes[0].target} hands on, and ranks would hold other "
                    "parts of it in the two. Take another number of ranks"
                )

    def chains(self) -> None:
        """Split the MLPs whose projections are the layer's own children."""
        for chain in chains(self.graph, self.modules):
            path = str(chain.exit.target)
            sizes = {outputs_of(self._leaf(entry)) for entry in chain.entries}
            size = inputs_of(self._leaf(chain.exit))
            if sizes != {size} or size % self.ranks:
                self.refused.setdefault(f"{size} channels do not divide by {self.ranks}", []).append(path)
                continue
            ranges = equal_runs(size, self.ranks)
            for entry in chain.entries:
                entered = self._split_columns(entry, ranges)
                entered.meta.update(entry.meta)
                mark(entered, python=None)
            self._split_leaf(chain.exit, row_parallel(self._leaf(chain.exit), ranges))
            self._reduce(chain.exit)
            self.counts["MLP blocks"] += 1

    def _leaf(self, node: fx.Node) -> Leaf:
        leaf = self.modules[str(node.target)]
        assert isinstance(leaf, Leaf)
        return leaf

    def _split_columns(self, node: fx.Node, ranges: tuple[Ranges, ...]) -> fx.Node:
        """Split a projection by outputs. Returns the `copy_to_group` that it reads now."""
        self._split_leaf(node, column_parallel(self._leaf(node), ranges))
        with self.graph.inserting_before(node):
            entered = self.graph.call_function(ops.copy_to_group, (args_of(node)[0], AXIS))
        node.args = (entered,)
        return entered

    def _split_leaf(self, node: fx.Node, split: tuple[Leaf, dict[str, Shard]]) -> None:
        """Give every rank its part of a projection."""
        path = str(node.target)
        self.modules[path], shards = split
        for name, shard in shards.items():
            self._shard(f"{path}.{name}", shard)

    def vocabulary(self) -> None:
        """Split embedding and head by vocabulary rows, tied ones together.

        Projections between the last layer and the head stay whole: it costs less to compute them than to gather.
        """
        lookups = [n for n in self.graph.nodes if self._is_lookup(n)]
        leaves = {n: called_module(n, self.modules) for n in self.graph.nodes if marks(n).layer is None}
        linear = [n for n, leaf in leaves.items() if isinstance(leaf, Leaf) and leaf.kind == "Linear"]
        heads = [n for n in linear if not any(m in linear for m in reachable(n.users, lambda m: m.users))]
        by_weight: dict[str, list[fx.Node]] = {}
        for node in (*lookups, *heads):
            by_weight.setdefault(self._weight(node), []).append(node)
        vocabularies = {self.program.parameters[self._weight(n)].shape[0] for n in heads}
        for weight, users in by_weight.items():
            rows = self.program.parameters[weight].shape[0]
            if rows not in vocabularies:
                continue  # position tables and the like
            if rows % self.ranks:
                self.refused.setdefault(f"a vocabulary of {rows} does not divide by {self.ranks}", []).extend(
                    str(u.target) for u in users
                )
                continue
            ranges = equal_runs(rows, self.ranks)
            for node in users:
                if node in lookups:
                    self._split_lookup(node, held(ranges))
                else:
                    self._split_columns(node, ranges)
                    self._stand_for(node, put_after(node, ops.all_gather, AXIS, -1))
                    self.counts["heads"] += 1
            self._shard(weight, Shard(0, ranges))

    def _weight(self, node: fx.Node) -> str:
        return self.program.ties.get(f"{node.target}.weight", f"{node.target}.weight")

    def _is_lookup(self, node: fx.Node) -> bool:
        module = called_module(node, self.modules)
        if module is None or marks(node).layer is not None:
            return False
        # positions are ids too, and their table may have as many rows
        sources = reachable([node], lambda n: () if n.target is aten.sym_size.int else n.all_input_nodes)
        if all(n.op != "placeholder" or n.target != "input_ids" for n in sources):
            return False
        if isinstance(module, Leaf):
            return module.kind == "Embedding"
        return "weight" in module.parameters and any(n.target is aten.embedding.default for n in module.graph.nodes)

    def _split_lookup(self, node: fx.Node, rows: int) -> None:
        path = str(node.target)
        module = self.modules[path]
        width = module.parameters["weight"][1]
        if isinstance(module, Leaf):
            options = {**module.options, "num_embeddings": rows, "embedding_dim": width}
            self.modules[path] = Leaf("VocabParallelEmbedding", options, {"weight": (rows, width)})
        elif isinstance(module, Body):
            body_graph, _ = copy_graph(module.graph)
            for inner in list(body_graph.nodes):
                if inner.target is aten.embedding.default:
                    weight, ids, *padding = args_of(inner)[:3]
                    inner.target, inner.args, inner.kwargs = ops.vocab_embedding, (ids, weight, AXIS, *padding), {}
            self.modules[path] = replace(module, graph=body_graph, parameters={"weight": (rows, width)})
        self._reduce(node)
        self.counts["embeddings"] += 1

    def _reduce(self, node: fx.Node) -> fx.Node:
        total = put_after(node, ops.all_reduce, AXIS)
        set_marks(total, marks(node).only("layer", "block"))
        self._stand_for(node, total)
        return total

    @staticmethod
    def _stand_for(node: fx.Node, total: fx.Node) -> None:
        """Let `total`, which all ranks hold, be the value of the stream that `node` was."""
        if in_stream(node):
            mark(total, stream=marks(node).stream)
            mark(node, stream=None)

    def _shard(self, name: str, shard: Shard) -> None:
        """Tied parameters are sharded under their first name."""
        name = self.program.ties.get(name, name)
        full = self.program.parameters[name]
        shape = resized(full.shape, shard.dim, held(shard.ranges))
        self.parameters[name] = replace(
            full, shape=shape, full_shape=full.shape, ranges=shard.ranges, dim=shard.dim, shared=shard.shared
        )
