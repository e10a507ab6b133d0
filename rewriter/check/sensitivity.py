"""Cost of dropping one attention reduction, layer by layer, on real weights: `drop_sync` chooses its layers by it.

Each layer's drop alone is compared with the original. What comes before that layer is the same in both, so it is
computed once for all layers. Only that layer is computed rank by rank: after it the ranks agree again, and what
follows is the original on another residual stream. With L layers this takes as long as about 1 + L/2 forward passes on
one device, and the output layer L/2 times more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from rewriter.check.drift import windows
from rewriter.common.errors import RewriterError
from rewriter.common.run_context import ProgressCall, silent
from rewriter.ir import Program, args_of, drop_dead_nodes
from rewriter.ir.residual import by_layer, residual_blocks, stream_values
from rewriter.ir.simulate import Simulator, load_weights
from rewriter.passes.drop_sync import DropSync, attention_reductions
from rewriter.passes.tensor_parallel import TensorParallel

# Digits that are kept: enough to rank layers, few enough that another summation order gives the same.
_DIGITS = 4


@torch.no_grad()
def sensitivity(
    program: Program,
    tokens: torch.Tensor,
    ranks: int,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    progress: ProgressCall = silent,
) -> tuple[float | None, ...]:
    """Per layer, the mean KL(original ‖ that layer's attention reduction dropped) in nats per token, on `ranks` ranks.

    `program` is as traced; `tokens`, int64 [T], are read in windows as `drift` reads them. None stands for a layer
    without an attention reduction that can be dropped. `weights` are full fp32 tensors by runtime name; by default the
    checkpoint is read. Raises RewriterError for a program without weights.
    """
    if len(tokens) < 2:
        raise RewriterError(f"drop_sync: {len(tokens)} tokens to measure with; at least two are needed")
    sharded = TensorParallel().apply(program.with_(mesh={"tp": ranks}, origin=program))
    dropped = _dropped_layers(sharded)
    if not dropped:
        return (None,) * program.source.num_layers
    if weights is None:
        weights = load_weights(program, torch.float32)
    original = with_stream(program, [start for start, _, _ in dropped.values()])
    rest = {end: between(program, [end]) for _, end, _ in dropped.values()}
    divergence, pieces, done = dict.fromkeys(dropped, 0.0), windows(program, tokens), 0
    for window in pieces:
        logits, *stream = Simulator(original, weights).run(window[None])[0]
        expected = logits[0].float().log_softmax(-1)
        for value, (layer, (start, end, changed)) in zip(stream, dropped.items(), strict=True):
            progress("measuring what each layer's drop costs", done, len(pieces) * len(dropped))
            for part, place in ((changed, start), (rest[end], end)):
                (given,) = given_names([place])
                value = Simulator(part, weights).run(window[None], given={given: value})[0]
            actual = value[0].float().log_softmax(-1)
            divergence[layer] += float(F.kl_div(actual, expected, reduction="sum", log_target=True))
            done += 1
    costs = {layer: float(f"{max(d / len(tokens), 0.0):.{_DIGITS}g}") for layer, d in divergence.items()}
    return tuple(costs.get(layer) for layer in range(program.source.num_layers))


def _dropped_layers(sharded: Program) -> dict[int, tuple[int, int, Program]]:
    """Layers that allow it: the stream values that each reads and leaves, and the layer with its reduction dropped."""
    attention, blocks = attention_reductions(sharded), by_layer(residual_blocks(sharded))
    programs: dict[int, tuple[int, int, Program]] = {}
    for layer, block in attention.items():
        try:
            changed = DropSync(layers=layer).apply(sharded)
        except RewriterError:
            continue
        start, end = block.index, blocks[layer][-1].index + 1
        programs[layer] = (start, end, between(changed, [start], end))
    return programs


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
