"""The shapes of a wiring are those of the values that it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from general_streams import few_layers
from programs import OVERLAP, tensor_parallel, traced
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rewriter.check.random_model import build_model, random_ids, randomize
from rewriter.ir import Program
from rewriter.ir.communication import model_dtype_bytes
from rewriter.ir.op_semantics import aten
from rewriter.ir.shapes import Value, is_shape, wiring_shapes
from rewriter.ir.simulate import Shards, Simulator
from rewriter.passes.placement.rank_memory import memory
from rewriter.tracing import trace

FAST = ("bart", "deepseek_v4")
SLOW = ("gemma4_text", "glm5_next", "hy_v4", "longcat_flash", "minimax", "qwen4_exp_text", "zaya")
SIZES = {"B": 3, "S": 7, "N": 21}
# Values of a type that stay as the trace had them: keys that a rank has some heads of
AS_TRACED = {"gemma4_text": ("self_attn", "getitem")}


class Recorded(Simulator):
    def __init__(self, program: Program, weights: Mapping[str, Tensor]) -> None:
        super().__init__(program, weights)
        self.values: dict[fx.Node, Any] = {}

    def note(self, prefix: str, node: fx.Node, value: Shards) -> None:
        if not prefix:
            self.values[node] = value[0].values[0]


class OnMetaAlone(TorchDispatchMode):
    """Operators that are given no tensor make theirs on meta."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        assert given or torch.device((kwargs or {}).get("device") or "cpu").type == "meta", func
        return func(*args, **(kwargs or {}))


def in_numbers(shape: Value) -> Any:
    if shape is None or is_shape(shape):
        return shape and tuple(SIZES.get(size, size) for size in shape)
    return tuple(in_numbers(each) for each in shape)


def shape_of(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(shape_of(each) for each in value)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_shapes_are_those_of_values(name: str) -> None:
    config = few_layers(name)
    model, program = build_model(config), trace(config)
    randomize(model)
    weights = {n: t.detach() for n, t in (*model.named_buffers(), *model.named_parameters())}
    for wiring in (program, tensor_parallel(program, 2, ("ladder", {}), OVERLAP)):
        simulator, shapes = Recorded(wiring, weights), wiring_shapes(wiring)
        with torch.no_grad():
            simulator.run(random_ids(config, 7, 3))
        of_tensors = {n: shape_of(v) for n, v in simulator.values.items() if isinstance(v, Tensor | tuple)}
        assert len(of_tensors) > 40
        told = {n: in_numbers(shapes[n]) for n in of_tensors}
        wrong = [n.name for n in of_tensors if told[n] != of_tensors[n]]
        assert [n for n in wrong if not any(part in n for part in AS_TRACED.get(name, ()))] == []


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda graph, x, b, s: graph.call_function(aten.ones.default, ([b, s],), {"dtype": torch.bool}), ("B", "S")),
        (lambda graph, x, b, s: graph.call_function(aten.full.default, ([b, s], 2.0)), ("B", "S")),
        (lambda graph, x, b, s: graph.call_function(aten.arange.start_step, (0, s, 1)), ("S",)),
        (lambda graph, x, b, s: graph.call_function(aten.zeros_like.default, (x,)), ("B", "S")),
        (lambda graph, x, b, s: graph.call_function(aten.to.device, (x, "cpu", torch.float32)), ("B", "S")),
        (lambda graph, x, b, s: graph.call_function(torch.ones, (b, s), {"device": "cpu"}), ("B", "S")),
        (lambda graph, x, b, s: graph.call_method("to", (x,), {"device": "cpu", "dtype": torch.int32}), ("B", "S")),
    ],
)
def test_what_makes_a_tensor_makes_none_with_data(make: Callable[..., fx.Node], shape: Value) -> None:
    """The sizes stand for symbols: [B, S] of them are 2 · 10¹⁰ numbers (GLM 5 Next's masks were 20 GB)."""
    program = traced("llama")
    graph = fx.Graph()
    x = graph.placeholder("input_ids")
    sizes = [graph.call_function(aten.sym_size.int, (x, dim)) for dim in (0, 1)]
    graph.output(made := make(graph, x, *sizes))
    with OnMetaAlone():
        assert wiring_shapes(program.with_(graph=graph))[made] == shape


def test_memory_of_streams_is_that_of_their_vectors() -> None:
    config = few_layers("deepseek_v4", hc_mult=3)
    program = tensor_parallel(trace(config), 2, ("ladder", {}))
    assert memory(program).stream_per_token == 3 * config.hidden_size * model_dtype_bytes(program)
