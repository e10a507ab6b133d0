"""The order of a wiring in which reductions overwrite what they sum."""

from __future__ import annotations

import pytest
from programs import PASSES, tensor_parallel, traced
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Program, ops
from rewriter.ir.op_semantics import starts_sum
from rewriter.ir.schedule import earlier_readers, with_readers_first


def own_partial(layers: object = "all") -> Program:
    split = tensor_parallel(traced("llama"), 2)
    return PASSES["ladder"](layers=layers, variant="own_partial").apply(split)


def read_too_late(graph: fx.Graph) -> list[str]:
    """Reductions after which something still reads the partial."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    reductions = [n for n in graph.nodes if starts_sum(n)]
    return [r.name for r in reductions if any(order[u] > order[r] for u in r.all_input_nodes[0].users)]


def test_own_partials_are_read_before_the_start() -> None:
    program = own_partial()
    assert read_too_late(program.graph)  # as the pass leaves it, where nothing works in place yet
    graph = PASSES["overlap"]().apply(program).graph
    assert read_too_late(graph) == []
    starts = [n for n in graph.nodes if n.target is ops.all_reduce_start]
    assert len(starts) == 7
    assert all(len(s.all_input_nodes[0].users) == 2 for s in starts)


def test_without_overlap_the_readers_are_moved() -> None:
    graph = with_readers_first(own_partial([1, 2]).graph)
    assert read_too_late(graph) == []
    assert not any(n.target is ops.all_reduce_start for n in graph.nodes)


def test_an_order_that_is_right_is_left_alone() -> None:
    graph = tensor_parallel(traced("llama"), 2).graph
    assert with_readers_first(graph) is graph


def test_a_block_waits_for_no_later_sum_than_it_reads() -> None:
    """Each own-partial block runs between the start of the sum before it and its wait."""
    graph = PASSES["overlap"]().apply(own_partial()).graph
    blocks = [str(n.target) for n in graph.nodes if n.op == "call_module" and str(n.target).endswith(("attn", "mlp"))]
    kinds = {ops.all_reduce_start: "start", ops.all_reduce_wait: "wait"}
    events = [
        kinds.get(n.target) or ("block" if str(n.target) in blocks else None)
        for n in graph.nodes
        if n.target in kinds or str(n.target) in blocks
    ]
    assert events == ["block", "start", *["block", "wait", "start"] * 6, "block", "wait"]


def test_a_value_that_needs_the_partial_and_its_sum_is_refused() -> None:
    graph = fx.Graph()
    partial = graph.call_function(ops.copy_to_group, (graph.placeholder("x"), "tp"))
    total = graph.call_function(ops.all_reduce, (partial, "tp"))
    graph.output(graph.call_function(ops.copy_to_group, (graph.call_function(max, (partial, total)), "tp")))
    with pytest.raises(RewriterError, match="reads the partial copy_to_group and its sum all_reduce"):
        earlier_readers(graph)
