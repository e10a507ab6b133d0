"""A stream that each block scales before it adds to it: x ← a·x + f(x)."""

from __future__ import annotations

import operator
import types

import pytest
import torch
import zoo
from oracles import relative_error
from programs import PASSES, tensor_parallel, traced, weights

from rewriter.check.per_rank_reference import LayerMode, PerRankReference
from rewriter.ir.marks import Marks, mark, marks, set_marks
from rewriter.ir.residual import residual_blocks
from rewriter.ir.simulate import simulate
from rewriter.ir.stream import annotate

SCALE, RANKS = 0.5, 2


def scaled():
    """The zoo's llama with SCALE in front of every skip, its stream found anew."""
    graph, _ = traced("llama").edit()
    for node in [n for n in graph.nodes if marks(n).stream]:
        skip = node.all_input_nodes[0]
        with graph.inserting_before(node):
            carried = graph.call_function(operator.mul, (skip, SCALE))
        mark(carried, layer=marks(node).layer)
        node.replace_input_with(skip, carried)
    for node in graph.nodes:
        set_marks(node, Marks(layer=marks(node).layer, hidden=marks(node).hidden))
    program = traced("llama").with_(graph=graph)
    annotate(graph, program.modules, 4, program.source.config["hidden_size"])
    return program


def part(model, layer, kind, x, rank):
    """What `rank` adds in a block on its residual `x`: the exit projection sees its features alone."""
    block = model.model.layers[layer]
    exit = block.self_attn.o_proj if kind == "attention" else block.mlp.down_proj

    def own(module, args):
        kept = torch.zeros_like(args[0])
        size = kept.shape[-1] // RANKS
        kept[..., rank * size : (rank + 1) * size] = args[0][..., rank * size : (rank + 1) * size]
        return (kept,)

    handle = exit.register_forward_pre_hook(own)
    try:
        if kind == "mlp":
            return block.mlp(block.post_attention_layernorm(x))
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        angles = model.model.rotary_emb(x, torch.arange(length)[None])
        return block.self_attn(block.input_layernorm(x), position_embeddings=angles, attention_mask=mask)[0]
    finally:
        handle.remove()


def desynced(model, ids, resync):
    """Attention's reductions dropped, the MLP's kept."""
    streams = [model.model.embed_tokens(ids)] * RANKS
    for layer in range(4):
        synchronised = streams[0]
        first = [part(model, layer, "attention", x, r) for r, x in enumerate(streams)]
        streams = [SCALE * x + f for x, f in zip(streams, first, strict=True)]
        second = [part(model, layer, "mlp", x, r) for r, x in enumerate(streams)]
        if resync == "mean":
            x = sum(f + SCALE * x / RANKS for f, x in zip(second, streams, strict=True))
        else:
            x = SCALE * SCALE * synchronised + sum(SCALE * a + b for a, b in zip(first, second, strict=True))
        streams = [x] * RANKS
    return model.lm_head(model.model.norm(streams[0]))


def laddered(model, ids, own_partial):
    """Each block reads the stream one block earlier, scaled on, plus its own part where that is asked for."""
    stream, parts = [model.model.embed_tokens(ids)], [[0.0] * RANKS]
    for block in range(8):
        layer, kind = block // 2, ("attention", "mlp")[block % 2]
        reads = [stream[max(block - 1, 0)]] * RANKS
        if own_partial and block:
            reads = [SCALE * x + f for x, f in zip(reads, parts[-1], strict=True)]
        parts.append([part(model, layer, kind, x, r) for r, x in enumerate(reads)])
        stream.append(SCALE * stream[-1] + sum(parts[-1]))
    return model.lm_head(model.model.norm(stream[-1]))


REWRITES = {
    "mean": (("desync", {"n": 2}), lambda m, ids: desynced(m, ids, "mean")),
    "sum": (("desync", {"n": 2, "resync": "sum"}), lambda m, ids: desynced(m, ids, "sum")),
    "paper": (("ladder", {}), lambda m, ids: laddered(m, ids, False)),
    "own-partial": (("ladder", {"variant": "own_partial"}), lambda m, ids: laddered(m, ids, True)),
}


@pytest.mark.parametrize("name", REWRITES)
def test_rewrites_scale_what_they_carry(name):
    (rewrite, options), reference = REWRITES[name]
    model, ids = zoo.shared("llama"), zoo.batch(2, 21, 256)
    program = tensor_parallel(scaled(), RANKS)
    assert len(residual_blocks(program)) == 8
    rewired = PASSES[rewrite](**options).apply(program)
    with torch.no_grad():
        expected = reference(model, ids)
        assert relative_error(simulate(program, ids, weights=weights("llama")), expected) >= 1e-2
        assert relative_error(simulate(rewired, ids, weights=weights("llama")), expected) <= 1e-5


LAST_KEPT = {resync: LayerMode("desync", (False, True), resync) for resync in ("mean", "sum")}
MODES = LAST_KEPT | {"paper": LayerMode("ladder"), "own-partial": LayerMode("own_partial")}


@pytest.mark.parametrize("name", REWRITES)
def test_the_per_rank_reference_scales_what_it_carries(name):
    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = SCALE * hidden_states + attended
        return hidden_states * SCALE + self.mlp(self.post_attention_layernorm(hidden_states))

    model, ids = zoo.build("llama"), zoo.batch(2, 21, 256)
    for layer in model.model.layers:
        layer.forward = types.MethodType(forward, layer)
    with torch.no_grad():
        actual = PerRankReference(model, dict.fromkeys(range(4), MODES[name]), RANKS)(ids)
        assert relative_error(actual, REWRITES[name][1](zoo.shared("llama"), ids)) <= 1e-5
