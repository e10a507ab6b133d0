"""What dropping one attention reduction costs, layer by layer, on real weights: what `drop_sync` chooses its layers by.

Each layer's drop alone is compared with the original. What comes before that layer is the same in both, so it is
computed once for all layers: with L layers this takes as long as about 1 + L/2 forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rewriter.analysis.residual import Block, stream_values
from rewriter.common.errors import RewriterError
from rewriter.ir import Program, args_of, drop_dead_nodes
from rewriter.passes.drop_sync import DropSync, attention_reductions
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.verify.drift import DriftSums, windows
from rewriter.verify.simulate import Simulator, load_weights

STREAM = "stream"
# Digits that are kept: enough to rank layers, few enough that another summation order gives the same.
_DIGITS = 4


@torch.no_grad()
def sensitivity(
    program: Program,
    tokens: torch.Tensor,
    ranks: int,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    progress: Callable[..., None] = lambda *_: None,
) -> tuple[float | None, ...]:
    """Per layer, the mean KL(original ‖ that layer's attention reduction dropped) in nats per token, on `ranks` ranks.

    `program` is as traced; `tokens`, int64 [T], are read in windows as `drift` reads them. None stands for a layer
    without an attention reduction that can be dropped. `weights` are full fp32 tensors by runtime name; by default the
    checkpoint is read. Raises RewriterError for a program without weights.
    """
    if len(tokens) < 2:
        raise RewriterError(f"drop_sync: {len(tokens)} tokens to measure with; at least two are needed")
    sharded = TensorParallel().apply(program.with_(mesh={"tp": ranks}, origin=program))
    blocks = attention_reductions(sharded)
    tails = _tails(sharded, blocks)
    if not tails:
        return (None,) * program.source.num_layers
    if weights is None:
        weights = load_weights(program, torch.float32)
    whole = _with_stream(program, [blocks[layer].index for layer in tails])
    found = {layer: DriftSums() for layer in tails}
    done, pieces = 0, windows(program, tokens)
    for window in pieces:
        logits, *stream = Simulator(whole, weights).run(window[None])[0]
        for (layer, tail), value in zip(tails.items(), stream, strict=True):
            progress("measuring what each layer's drop costs", done, len(pieces) * len(tails))
            changed = Simulator(tail, weights).run(window[None], given={STREAM: value})
            found[layer].add(window, logits[0], changed[0][0])
            done += 1
    costs = {layer: float(f"{comparison.kl:.{_DIGITS}g}") for layer, comparison in found.items()}
    return tuple(costs.get(layer) for layer in range(program.source.num_layers))


def _tails(sharded: Program, blocks: Mapping[int, Block]) -> dict[int, Program]:
    """By layer that allows it, the program with its reduction dropped, from what its attention reads on."""
    tails: dict[int, Program] = {}
    for layer, block in blocks.items():
        try:
            dropped = DropSync(layers=layer).apply(sharded)
        except RewriterError:
            continue
        tails[layer] = _from_stream(dropped, block.index)
    return tails


def _with_stream(program: Program, places: list[int]) -> Program:
    """A program that returns its logits and the stream values at `places`."""
    graph, env = program.edit()
    stream = stream_values(program.graph)
    output = graph.output_node()
    output.args = ((args_of(output)[0], *(env[stream[place]] for place in places)),)
    return program.with_(graph=graph)


def _from_stream(program: Program, place: int) -> Program:
    """A program that is given the stream value at `place` instead of computing it."""
    graph, env = program.edit()
    value = env[stream_values(program.graph)[place]]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        given = graph.placeholder(STREAM)
    given.meta.update(value.meta)
    value.replace_all_uses_with(given)
    drop_dead_nodes(graph)
    return program.with_(graph=graph)
