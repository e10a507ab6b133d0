"""What brings values of two tokens together is refused, whatever operator does it; what treats tokens alike passes."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from programs import traced
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Opaque, copy_graph, ops
from rewriter.passes.sequence.token_locality import check_tokens

aten = torch.ops.aten
MLP = "model.layers.2.mlp"
ATTENTION = "model.layers.2.self_attn"


def edited(name, path, edit):
    """A program of the zoo with `edit(graph)` made in the body at `path`."""
    program = traced(name)
    body = program.modules[path]
    assert isinstance(body, Body)
    graph, _ = copy_graph(body.graph)
    edit(graph)
    return program.with_(modules={**program.modules, path: replace(body, graph=graph)})


def with_mlp(build):
    """The zoo's Llama, in one layer of which `build(graph, x)` follows the MLP. Its value has x's shape."""

    def edit(graph):
        output = graph.output_node()
        with graph.inserting_before(output):
            output.args = (build(graph, output.args[0]),)

    return edited("llama", MLP, edit)


def call(graph: fx.Graph, target, *args, **kwargs) -> fx.Node:
    return graph.call_function(target, args, kwargs)


def length(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, aten.sym_size.int, x, 1)


def rolled(graph, x):
    return call(graph, aten.add.Tensor, x, call(graph, aten.flip.default, x, [1]))


def shifted(graph, x):
    before = call(graph, aten.slice.Tensor, call(graph, aten.constant_pad_nd.default, x, [0, 0, 1, 0]), 1, 0, -1)
    return call(graph, aten.add.Tensor, x, before)


def scored(graph, x):
    return call(
        graph, aten.matmul.default, call(graph, aten.matmul.default, x, call(graph, aten.transpose.int, x, 1, 2)), x
    )


def counted(graph, x):
    places = call(graph, aten.unsqueeze.default, call(graph, aten.arange.default, length(graph, x)), 1)
    return call(graph, aten.add.Tensor, x, places)


def summed_ones(graph, x):
    ones = call(graph, aten.new_ones.default, x, [1, length(graph, x), 1])
    return call(graph, aten.add.Tensor, x, call(graph, aten.cumsum.default, ones, 1))


def reinterpreted(graph, x):
    flat = call(graph, aten.reshape.default, call(graph, aten.transpose.int, x, 1, 2), [3, length(graph, x), 64])
    return call(graph, aten.add.Tensor, x, flat)


REFUSED = {
    "mean": (
        lambda g, x: call(g, aten.sub.Tensor, x, call(g, aten.mean.dim, x, [1], True)), "aten.mean.dim computes over",
    ),
    "sum of all": (lambda g, x: call(g, aten.mul.Tensor, x, call(g, aten.sum.default, x)), "aten.sum sums over"),
    "softmax": (lambda g, x: call(g, aten.softmax.int, x, 1), "aten.softmax.int computes over"),
    "cumsum": (lambda g, x: call(g, aten.cumsum.default, x, 1), "aten.cumsum sums over"),
    "experts that choose tokens": (
        lambda g, x: call(g, operator.getitem, call(g, aten.topk.default, x, 2, 1), 0), "aten.topk computes over",
    ),
    "linear over tokens": (
        lambda g, x: g.call_module("gate_proj", (call(g, aten.transpose.int, x, 1, 2),)),
        "(Linear) computes over the tokens of a call",
    ),
    "sort": (lambda g, x: call(g, aten.argsort.default, x, 1), "aten.argsort computes over"),
    "flip": (rolled, "aten.add.Tensor combines values of different tokens"),
    "shift": (shifted, "aten.add.Tensor combines values of different tokens"),
    "scores": (scored, "aten.matmul combines values of different tokens"),
    "first": (
        lambda g, x: call(g, aten.add.Tensor, x, call(g, aten.slice.Tensor, x, 1, 0, 1)),
        "aten.add.Tensor combines values of different",
    ),
    "positions": (counted, "aten.arange numbers the tokens of a call from 0"),
    "counted ones": (summed_ones, "aten.cumsum sums over"),
    "length": (
        lambda g, x: call(g, aten.mul.Tensor, x, length(g, x)), "aten.mul.Tensor computes with the number of tokens",
    ),
    "reinterpreted": (reinterpreted, "combines values of different tokens"),
    "convolution": (
        lambda g, x: call(g, aten.convolution.default, x, x, None, [1], [0], [1], False, [0], 1),
        "aten.convolution is not known to treat each token on its own",
    ),
    "mask": (
        lambda g, x: call(g, ops.additive_mask, x, mask=ops.MaskSpec("causal")),
        "additive_mask is the mask as a tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_reads_other_tokens_is_refused_by_name(case):
    build, message = REFUSED[case]
    with pytest.raises(RewriterError) as caught:
        check_tokens(with_mlp(build))
    assert str(caught.value).startswith(f"sequence_parallel: {MLP}")
    assert message in str(caught.value)
    assert "--sp 1" in str(caught.value)


def flat(graph, x):
    rows = call(graph, aten.reshape.default, x, [-1, 64])
    return call(graph, aten.reshape.default, rows, [-1, length(graph, x), 64])


def top(graph, x):
    best = call(graph, aten.topk.default, call(graph, aten.softmax.int, x, -1), 2, -1)
    values = call(graph, operator.getitem, best, 0)
    return call(graph, aten.mul.Tensor, x, call(graph, aten.sum.dim_IntList, values, [-1], True))


ALIKE = {
    "nothing": lambda g, x: x,
    "flat and back": flat,
    "best of channels": top,
    "there and back": lambda g, x: call(g, aten.transpose.int, call(g, aten.transpose.int, x, 1, 2), 1, 2),
    "zeros": lambda g, x: call(g, aten.add.Tensor, x, call(g, aten.new_zeros.default, x, [1, length(g, x), 1])),
    "stretched": lambda g, x: call(g, aten.expand.default, x, [-1, length(g, x), -1]),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_treats_tokens_alike_passes(case):
    check_tokens(with_mlp(ALIKE[case]))


def flipped(position):
    def change(graph, attention):
        attention.update_arg(position, call(graph, aten.flip.default, attention.args[position], [2]))

    return change


def fewer_keys(graph, attention):
    for position in (1, 2):
        attention.update_arg(position, call(graph, aten.slice.Tensor, attention.args[position], 2, 0, 2))


def sinks_of_the_first(graph, attention):
    first = call(graph, aten.select.int, call(graph, aten.select.int, attention.args[0], 2, 0), 0, 0)
    attention.update_kwarg("sinks", call(graph, aten.select.int, first, 1, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flipped(0), "has queries that are not the call's tokens in their order"),
        (flipped(1), "has keys that are not the call's tokens in their order"),
        (flipped(2), "has values that are not the call's tokens in their order"),
        (fewer_keys, "has keys that are not the call's tokens in their order"),
        (sinks_of_the_first, "has sinks that depend on tokens"),
    ],
)
def test_attention_over_anything_but_the_tokens_in_order_is_refused(change, message):
    def edit(graph):
        attention = next(n for n in graph.nodes if n.target is ops.attention)
        with graph.inserting_before(attention):
            change(graph, attention)

    with pytest.raises(RewriterError, match=f"{ATTENTION}: attention {message}"):
        check_tokens(edited("llama", ATTENTION, edit))


def test_experts_that_are_given_other_tokens_choices_are_refused():
    def edit(graph):
        experts = next(n for n in graph.nodes if n.target is ops.experts)
        with graph.inserting_before(experts):
            experts.update_arg(1, call(graph, aten.flip.default, experts.args[1], [0]))

    with pytest.raises(RewriterError, match=f"{MLP}: experts combines values of different tokens"):
        check_tokens(edited("mixtral", MLP, edit))


def test_the_largest_position_is_named_with_its_reason():
    def edit(graph):
        positions = next(n for n in graph.nodes if n.name == "position_ids")
        output = graph.output_node()
        with graph.inserting_before(output):
            scaled = call(graph, aten.mul.Tensor, output.args[0][0], call(graph, aten.max.default, positions))
            output.args = ((scaled, output.args[0][1]),)

    with pytest.raises(
        RewriterError, match=r"model.rotary_emb: aten.max takes the largest of all tokens' positions, as ro"
    ):
        check_tokens(edited("llama", "model.rotary_emb", edit))


def test_an_opaque_module_is_refused_by_name():
    program = traced("llama")
    opaque = Opaque("Mixer", "it scans", {}, ((0, 0),), (("B", "S", 64),), None)
    with pytest.raises(
        RewriterError, match=r"model.layers.2.mlp stays the source's own module \(Mixer\), since it scans"
    ):
        check_tokens(program.with_(modules={**program.modules, MLP: opaque}))
