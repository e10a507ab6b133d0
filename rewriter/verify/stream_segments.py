"""Parts of a program between values of its residual stream, so that what comes before need not be computed again."""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.analysis.residual import stream_values
from rewriter.ir import Program, args_of, drop_dead_nodes

STREAM = "stream"


def with_stream(program: Program, places: Sequence[int]) -> Program:
    """A program that returns its logits and the stream values at `places`."""
    graph, env = program.edit()
    stream = stream_values(program.graph)
    output = graph.output_node()
    output.args = ((args_of(output)[0], *(env[stream[place]] for place in places)),)
    return program.with_(graph=graph)


def given_names(starts: Sequence[int]) -> tuple[str, ...]:
    """The inputs of `between(program, starts)`, by which `Simulator.run` is given the stream values."""
    return tuple(f"{STREAM}_{start}" for start in starts)


def between(program: Program, starts: Sequence[int] = (), end: int | None = None) -> Program:
    """A program that is given the stream values `starts` and returns the stream value `end`; by default, the logits.

    What is computed from other values of the stream is computed as before.
    """
    graph, env = program.edit()
    stream = [env[value] for value in stream_values(program.graph)]
    if end is not None:
        graph.output_node().args = (stream[end],)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for start, name in zip(starts, given_names(starts), strict=True):
        with graph.inserting_before(first):
            given = graph.placeholder(name)
        given.meta.update(stream[start].meta)
        stream[start].replace_all_uses_with(given)
    drop_dead_nodes(graph)
    return program.with_(graph=graph)
