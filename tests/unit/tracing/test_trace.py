"""Tracing: the program computes what the unmodified eager model computes, and nothing of the model stays patched."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import zoo
from oracles import relative_error
from torch import fx
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_overlay,
)

from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import build_model, random_ids, randomize
from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Opaque, Program, ops, walk_modules
from rewriter.ir.marks import marks
from rewriter.ir.ops import MaskSpec, attention
from rewriter.ir.residual import residual_blocks
from rewriter.ir.simulate import simulate
from rewriter.tracing import trace, trace_skeleton
from rewriter.tracing.interception import LIFTED, lifted_attention, lifted_interfaces
from rewriter.tracing.masks import StaticGraph, find_mask_spec, refuse_unknown_masks
from rewriter.tracing.meta_model import build_skeleton
from rewriter.weights import Checkpoint

pytestmark = pytest.mark.tracer


@pytest.mark.parametrize("length", [1, 21, 100])
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_trace_replays_the_eager_model(family: str, length: int) -> None:
    model = zoo.shared(family)
    ids = zoo.batch(2, length, model.config.vocab_size)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        found = simulate(programs.traced(family), ids, weights=programs.weights(family))
    assert relative_error(found, expected) <= 1e-5


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_residual_stream_is_found(family: str) -> None:
    blocks = residual_blocks(programs.traced(family))
    depth = programs.traced(family).source.num_layers
    if family == "gpt_neox":
        assert [(b.kind, b.layer) for b in blocks] == [("parallel", i) for i in range(depth)]
    else:
        second = "moe" if "moe" in family or family == "mixtral" else "mlp"
        assert [(b.kind, b.layer) for b in blocks] == [(k, i) for i in range(depth) for k in ("attention", second)]
    assert all(b.reads == (b.index,) for b in blocks)


def test_a_trace_reads_headers_and_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.save("mixtral", tmp_path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "evaluate", refuse)
    program = trace(tmp_path)
    assert all(p.expression is not None for p in program.parameters.values())
    assert program.fingerprint() == programs.traced("mixtral").fingerprint()


def libraries_attributes() -> dict[tuple[str, ...], Any]:
    """Every attribute of the modules and classes of torch, of transformers and of Python's own types."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "transformers", "builtins", "types", "functools", "operator"):
            for attribute, value in list(vars(module).items()):
                found[name, attribute] = value
                if isinstance(value, type):
                    found |= {(name, attribute, inner): x for inner, x in vars(value).items()}
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of deprecated attributes, which are read
@pytest.mark.parametrize("failing", ["", "mlp", "norm"])
def test_a_trace_leaves_nothing_changed(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.traced("llama")  # imports, and what libraries keep for themselves
    skeleton = build_skeleton(zoo.config("llama"))
    tensors = dict(skeleton.model.named_parameters())
    if failing:
        broken = skeleton.layers[0].mlp if failing == "mlp" else skeleton.model.base_model.norm
        monkeypatch.setattr(type(broken), "forward", lambda *_: 1 / 0)
    before = libraries_attributes()
    with pytest.raises(RewriterError, match="division by zero") if failing == "norm" else contextlib.nullcontext():
        kept = trace_skeleton(skeleton).modules[f"{skeleton.layers_path}.0.mlp"]
    if failing == "mlp":  # it stays the source's own module
        assert isinstance(kept, Opaque)
        assert "division by zero" in kept.reason
    after = libraries_attributes()
    changed = [key for key, value in before.items() if key not in after or after[key] is not value]
    assert [key for key in changed if type(before[key]) is not int] == []  # counters count on
    ours = [key for key, value in after.items() if str(getattr(value, "__module__", "")).startswith("rewriter")]
    assert ours == []
    # A type's slots are none of its attributes: one that is filled makes every tensor a sequence.
    assert ctypes.pythonapi.PySequence_Check(ctypes.py_object(torch.ones(()))) == 0
    assert torch.tensor([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    for interface in (AttentionInterface, AttentionMaskInterface, type(ALL_EXPERTS_FUNCTIONS)):
        assert LIFTED not in interface._global_mapping
    assert not any("forward" in m.__dict__ for m in skeleton.model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in skeleton.layers.modules())
    assert skeleton.model.config._attn_implementation == "eager"
    assert all(tensors[name] is p for name, p in skeleton.model.named_parameters())
    assert len(tensors) == len(list(skeleton.model.named_parameters()))


@pytest.mark.parametrize(
    "spec",
    [
        MaskSpec("causal"),
        *(MaskSpec("window", n) for n in (2, 3, 128, 4096)),
        *(MaskSpec("chunk", n) for n in (5, 9, 64, 8192)),
    ],
)
def test_masks_are_found_from_their_function(spec: MaskSpec) -> None:
    def visible(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        seen = kv <= q
        if spec.kind == "window":
            return seen & (kv > q - spec.size)
        return seen & (kv // spec.size == q // spec.size) if spec.kind == "chunk" else seen

    assert find_mask_spec(visible) == spec


def traced_as_it_computes(name: str) -> Program:
    """The program of a small model of that type, whose logits are the model's."""
    config = small_config(name)
    model = build_model(config)
    randomize(model)
    program, ids = trace(config), random_ids(config, 21)
    weights = {name: x.detach() for name, x in (*model.named_parameters(), *model.named_buffers())}
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    assert relative_error(simulate(program, ids, weights=weights), expected) <= 1e-5
    return program


def test_a_child_may_return_a_tensor_in_one_layer_and_none_in_another() -> None:
    """Attention returns its bias in the last layer alone, and layers ask whether it did."""
    program = traced_as_it_computes("gpt_neox_japanese")
    methods = [(marks(n).layer, n.target) for n in program.graph.nodes if n.op == "call_method"]
    assert methods == [(program.source.num_layers - 1, "expand_as")]


def test_a_layer_may_return_its_result_before_a_slice_of_other_results() -> None:
    """`(hidden,) + outputs[1:]`, in the layer and in a child that adds to the stream; the others are not read."""
    program = traced_as_it_computes("megatron-bert")
    assert len(residual_blocks(program)) == 2 * program.source.num_layers
    assert set(program.source.returns) == {1}


def test_masks_that_transformers_joins_are_found() -> None:
    causal, window = causal_mask_function, sliding_window_overlay(9)
    assert find_mask_spec(and_masks(causal, window)) == MaskSpec("window", 9)
    assert find_mask_spec(or_masks(and_masks(causal, window), causal)) == MaskSpec("causal")


def test_blocks_of_tokens_that_see_each_other_are_left_to_images() -> None:
    """GIT's masks are of blocks, which text alone has none of."""
    ids = torch.full((2, 9), -1)
    found: list[torch.Tensor] = []
    assert find_mask_spec(or_masks(causal_mask_function, blockwise_overlay(ids)), found) == MaskSpec("causal")
    assert found[0] is ids
    program = traced_as_it_computes("git")
    bodies = [m for _, m in walk_modules(program.modules) if isinstance(m, Body)]
    masks = [n.kwargs["mask"] for body in bodies for n in body.graph.nodes if n.target is attention]
    assert masks == [MaskSpec("causal")] * program.source.num_layers


@pytest.mark.parametrize("block", [-1, 0])
def test_a_mask_of_blocks_has_a_rule_where_no_token_is_in_one(block: int) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    blocks = graph.call_function(torch.full, ((1, 13), block))
    blocks.meta["val"] = torch.full((1, 13), block)
    graph.output(graph.call_function(ops.additive_mask, (x,), {"mask": MaskSpec("causal"), "blocks": (blocks,)}))
    StaticGraph(graph, {}, {}, 13).settle_blocks()
    assert all(not n.kwargs.get("blocks") for n in graph.nodes)
    if block == -1:
        refuse_unknown_masks(graph)
    else:
        with pytest.raises(RewriterError, match="tokens of a block see each other"):
            refuse_unknown_masks(graph)


@pytest.mark.parametrize(
    "visible",
    [
        lambda batch, head, q, kv: (kv <= q) & (kv % 2 == 0),
        lambda batch, head, q, kv: (kv <= q) & ((kv > q - 8) | (kv < 4)),
        lambda batch, head, q, kv: kv <= q + 1,
        lambda batch, head, q, kv: kv.no_such_method(),
    ],
    ids=["strided", "window with sinks", "one token ahead", "fails"],
)
def test_other_masks_are_refused(visible: Any) -> None:
    with pytest.raises(RewriterError, match="mask"):
        find_mask_spec(visible)


def test_windows_of_a_model_are_in_its_attention() -> None:
    program = programs.traced("gemma3_text")
    bodies = [m for path, m in walk_modules(program.modules) if path.endswith("self_attn") and isinstance(m, Body)]
    masks = [n.kwargs["mask"] for body in bodies for n in body.graph.nodes if n.target is attention]
    window = MaskSpec("window", zoo.config("gemma3_text").sliding_window)
    assert masks == [window, window, MaskSpec("causal")] * 2


def test_alike_layers_share_their_bodies() -> None:
    modules = programs.traced("gemma3_text").modules
    attentions = [modules[f"model.layers.{i}.self_attn"] for i in range(6)]
    assert attentions[0] is attentions[1] is attentions[3] is attentions[4]
    assert attentions[2] is attentions[5]
    assert attentions[0] is not attentions[2]


def test_an_attention_keyword_that_is_not_known_is_refused() -> None:
    q = torch.empty(1, 2, 3, 4, device="meta")
    skeleton = build_skeleton(zoo.config("llama"))
    with lifted_interfaces(skeleton.model), pytest.raises(RewriterError, match="score_mod"):
        lifted_attention(skeleton.model, q, q, q, q, score_mod=q)
    with pytest.raises(RewriterError, match="instead of the mask"):
        lifted_attention(skeleton.model, q, q, q, None)
