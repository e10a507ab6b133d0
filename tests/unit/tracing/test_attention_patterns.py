"""Attention that models write out themselves: found in any spelling, exact, and left alone where it is no attention."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import programs
import pytest
import torch
import zoo
from oracles import relative_error
from programs import tensor_parallel
from torch import fx, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, cache_utils

from rewriter.check.coverage.configs import small_config
from rewriter.common.errors import RewriterError
from rewriter.emit.module import emit_runtime_module
from rewriter.ir import Body, ops, walk_modules
from rewriter.ir.absolute_positions import counts_tokens
from rewriter.ir.ops import MaskSpec
from rewriter.ir.simulate import simulate
from rewriter.tracing import trace
from rewriter.tracing.export import BodyTracer, Example
from rewriter.tracing.interception import Recorded
from rewriter.tracing.masks import Static, StaticGraph, find_mask_spec, seen_by
from rewriter.tracing.meta_model import TRACE_DTYPE

pytestmark = pytest.mark.tracer

HEADS, SIZE = 4, 8
WIDTH = HEADS * SIZE


# --- spellings of one attention --------------------------------------------------------------------------------------


class Written(nn.Module):
    """Self-attention whose scores are made by `spell(q, k, v, mask, module)`; q, k, v are [B, H, S, D]."""

    def __init__(self, spell: Callable[..., torch.Tensor], window: int | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        seen = torch.ones(64, 64, dtype=torch.bool).tril()
        seen = seen if window is None else seen & ~seen.tril(-window)
        self.register_buffer("bias", seen[None, None], persistent=False)
        self.spell = spell

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, SIZE).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        o = self.spell(q, k, v, mask, self)
        return self.out(o.transpose(1, 2).reshape(batch, length, WIDTH))


def plain(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(SIZE) + mask, dim=-1) @ v


def scaled_first(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    scores = torch.matmul(q * SIZE**-0.5, k.permute(0, 1, 3, 2)).float()
    return torch.matmul(module.drop(torch.softmax(mask + scores, dim=-1).to(v.dtype)), v)


def mask_before_scale(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    return torch.softmax((q @ k.transpose(2, 3) + mask) / math.sqrt(SIZE), dim=-1) @ v


def folded(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    batch, _, length, _ = q.shape
    q, k, v = (t.reshape(batch * HEADS, length, SIZE) for t in (q, k, v))
    scores = torch.baddbmm(q.new_zeros(batch * HEADS, length, length), q, k.transpose(1, 2), alpha=SIZE**-0.5)
    scores = torch.max(scores.view(batch, HEADS, length, length) + mask, torch.full((), -1e30, device=q.device))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.bmm(weights.view(batch * HEADS, length, length), v).view(batch, HEADS, length, SIZE)


def filled(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    length = q.shape[2]
    scores = q @ k.transpose(-1, -2) * SIZE**-0.5
    scores = scores.masked_fill(~module.bias[:, :, :length, :length], torch.finfo(torch.float32).min)
    return torch.softmax(scores, dim=-1) @ v


def chosen(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    length = q.shape[2]
    scores = torch.where(module.bias[:, :, :length, :length], q @ k.transpose(-1, -2) * SIZE**-0.5, -1e9)
    return torch.softmax(scores + mask, dim=-1) @ v


def multiplied(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    length = q.shape[2]
    seen = module.bias[:, :, :length, :length].float()
    return torch.softmax(q @ k.transpose(-1, -2) * SIZE**-0.5 * seen + -1e4 * (1 - seen), dim=-1).to(v.dtype) @ v


def made_here(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    length = q.shape[2]
    hidden = torch.triu(torch.ones(length, length, device=q.device), 1)
    return torch.softmax(q @ k.transpose(-1, -2) * SIZE**-0.5 + hidden * -1e4, dim=-1).to(v.dtype) @ v


def capped(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    return torch.softmax(torch.tanh(q @ k.transpose(-1, -2) * SIZE**-0.5 / 5.0) * 5.0 + mask, dim=-1) @ v


def with_alibi(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=q.device)
    bias = slopes[:, None, None] * torch.arange(q.shape[2], device=q.device)
    return torch.softmax(q @ k.transpose(-1, -2) * SIZE**-0.5 + bias + mask, dim=-1).to(v.dtype) @ v


SPELLINGS = {
    f.__name__: f
    for f in (plain, scaled_first, mask_before_scale, folded, filled, chosen, multiplied, made_here, capped, with_alibi)
}


def additive(spec: MaskSpec, batch: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return ops.additive_mask(torch.empty(batch, length, dtype=dtype), mask=spec)


def traced(module: nn.Module, spec: MaskSpec) -> Body:
    """The body of a module that takes (hidden states, mask), the mask known to follow `spec`."""
    example = Example()
    batch, length = example.batch, example.length
    buffers = {f"block.{n}": b.clone() for n, b in module.named_buffers()}
    on_meta = module.to("meta", TRACE_DTYPE).eval()
    x = torch.empty(batch, length, WIDTH, dtype=TRACE_DTYPE, device="meta")
    mask = torch.empty(batch, 1, length, length, dtype=TRACE_DTYPE, device="meta")
    known = Static(lambda n, stand_in: additive(stand_in or spec, 1, n, torch.float32), frozenset({spec}))
    call = Recorded((x, mask), {}, x)
    body = BodyTracer(buffers, {}, example).trace("block", on_meta, call, lambda t: known if t is mask else None)
    assert isinstance(body, Body)
    return body


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data = torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1])
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def run(body: Body, x: torch.Tensor, mask: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """A body node by node, without the simulator."""
    given = {"x": x, "mask": mask, "ctx": None}
    env: dict[fx.Node, Any] = {}
    for node in body.graph.nodes:
        if node.op == "placeholder":
            env[node] = given[str(node.target)]
        elif node.op == "get_attr":
            env[node] = body.buffers[str(node.target)]
        elif node.op == "call_module":
            path = str(node.target)
            env[node] = nn.functional.linear(env[node.args[0]], weights[f"{path}.weight"], weights[f"{path}.bias"])
        elif node.op == "output":
            return env[node.args[0]]
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}
            env[node] = node.target(*args, **kwargs)
    raise AssertionError("no output")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_one_attention_node(spelling: str) -> None:
    window = 5 if spelling in ("filled", "chosen") else None
    module = Written(SPELLINGS[spelling], window).eval()
    weights = weights_of(module)
    expected = {}
    for length in (1, 21, 50):
        x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))
        mask = additive(MaskSpec("causal"), 2, length, torch.float32)
        with torch.no_grad():
            expected[length] = (x, mask, module(x, mask))
    body = traced(module, MaskSpec("causal"))
    nodes = [n for n in body.graph.nodes if n.target is ops.attention]
    assert [n.kwargs["mask"] for n in nodes] == [MaskSpec("causal") if window is None else MaskSpec("window", window)]
    assert nodes[0].kwargs["scale"] == pytest.approx(1.0 if spelling == "scaled_first" else SIZE**-0.5)
    assert nodes[0].kwargs.get("softcap") == (5.0 if spelling == "capped" else None)
    assert "bias" not in nodes[0].kwargs
    assert ("slopes" in nodes[0].kwargs) == (spelling == "with_alibi")
    assert not any(n.target is torch.ops.aten.softmax.int for n in body.graph.nodes)
    for x, mask, wanted in expected.values():
        assert relative_error(run(body, x, mask, weights), wanted) <= 1e-5


@pytest.mark.parametrize("spec", [MaskSpec("causal"), MaskSpec("window", 3), MaskSpec("chunk", 4)], ids=str)
def test_a_mask_that_is_handed_in_keeps_its_rule(spec: MaskSpec) -> None:
    module = Written(plain).eval()
    weights_of(module)
    (node,) = (n for n in traced(module, spec).graph.nodes if n.target is ops.attention)
    assert node.kwargs["mask"] == spec


def capped_with_its_mask(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    return torch.softmax(torch.tanh((q @ k.transpose(-1, -2) + mask) / 5.0) * 5.0, dim=-1) @ v


def zeroed_but_seen(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    length = q.shape[2]
    scores = q @ k.transpose(-1, -2) * module.bias[:, :, :length, :length].float()
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v


def filled_weakly(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    length = q.shape[2]
    scores = (q @ k.transpose(-1, -2)).masked_fill(~module.bias[:, :, :length, :length], -3.0)
    return torch.softmax(scores, dim=-1) @ v


def over_queries(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) + mask, dim=-2) @ v


@pytest.mark.parametrize(
    "spell", [capped_with_its_mask, zeroed_but_seen, filled_weakly, over_queries], ids=lambda f: f.__name__
)
def test_what_only_looks_like_attention_stays_as_it_is(spell: Callable[..., torch.Tensor]) -> None:
    module = Written(spell).eval()
    weights = weights_of(module)
    x = torch.randn(2, 21, WIDTH, generator=torch.Generator().manual_seed(0))
    mask = additive(MaskSpec("causal"), 2, 21, torch.float32)
    with torch.no_grad():
        wanted = module(x, mask)
    body = traced(module, MaskSpec("causal"))
    assert not any(n.target is ops.attention for n in body.graph.nodes)
    assert relative_error(run(body, x, mask, weights), wanted) <= 1e-5


BIASES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], list[float] | None]] = {
    "by key": (lambda s, t: t * 1.0 + 0 * s, [0.5, 0.25, 0.125, 0.0625]),
    "by distance": (lambda s, t: (t - s) * 1.0, [0.5, 0.25, 0.125, 0.0625]),
    "shifted by query": (lambda s, t: t - 3.0 * s, [0.5, 0.25, 0.125, 0.0625]),
    "steps that grow": (lambda s, t: (t - s) ** 2.0, None),
    "steps that stop": (lambda s, t: (t - s).clamp(min=-200) * 1.0, None),
    "another slope for each query": (lambda s, t: t * s * 1.0, None),
    "computed in the model's dtype": (lambda s, t: t.to(TRACE_DTYPE) * 1.0 + 0 * s, None),
}


@pytest.mark.parametrize(("bias", "slopes"), BIASES.values(), ids=BIASES)
@pytest.mark.fast("by key", "shifted by query", "steps that stop", "computed in the model's dtype")
def test_a_bias_is_a_slope_where_every_key_adds_the_same(bias: Any, slopes: list[float] | None) -> None:
    def spell(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
        places = torch.arange(q.shape[2], device=q.device)
        heads = 2.0 ** -torch.arange(1, HEADS + 1, device=q.device)
        added = heads[:, None, None] * bias(places[:, None] + 0 * places, places + 0 * places[:, None])
        return torch.softmax(q @ k.transpose(-1, -2) * SIZE**-0.5 + added + mask, dim=-1).to(v.dtype) @ v

    module = Written(spell).eval()
    weights = weights_of(module)
    x = torch.randn(2, 21, WIDTH, generator=torch.Generator().manual_seed(0))
    mask = additive(MaskSpec("causal"), 2, 21, torch.float32)
    with torch.no_grad():
        wanted = module(x, mask)
    body = traced(module, MaskSpec("causal"))
    (node,) = (n for n in body.graph.nodes if n.target is ops.attention)
    assert ("slopes" in node.kwargs, "bias" in node.kwargs) == (slopes is not None, slopes is None)
    if slopes is not None:
        assert body.buffers[str(node.kwargs["slopes"].target)].tolist() == slopes
    assert relative_error(run(body, x, mask, weights), wanted) <= 1e-5


# --- rules -----------------------------------------------------------------------------------------------------------


def test_a_mask_without_a_rule_is_not_taken_for_slopes_of_zero() -> None:
    config = small_config("gemma3_text", {"use_bidirectional_attention": True})
    with pytest.raises(RewriterError, match="a mask is none of causal, window, chunk, bidirectional"):
        trace(config)


def test_a_window_too_long_to_show_is_not_taken_for_causal() -> None:
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    value = StaticGraph(graph := fx.Graph(), {"bias": seen}, {}, 37).of(graph.get_attr("bias"))
    assert value is not None
    assert value.largest == 12

    def hidden(length: int, stand_in: MaskSpec | None) -> torch.Tensor:
        if length > 12:
            raise IndexError("longer than the buffer")
        return ~seen[:length, :length]

    assert seen_by(hidden, value) == MaskSpec("causal")
    assert seen_by(hidden, Static(value.evaluate, largest=5000)) is None


def masked_by(far: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Scores of which those are filled whose distance [S, S] is negative or `far`."""

    def spell(q: Any, k: Any, v: Any, mask: Any, module: Any) -> torch.Tensor:
        positions = torch.arange(q.shape[2], device=q.device)
        distance = positions[:, None] - positions
        scores = q @ k.transpose(-1, -2) * SIZE**-0.5
        scores = scores.masked_fill((distance < 0) | far(distance), torch.finfo(torch.float32).min)
        return torch.softmax(scores, dim=-1) @ v

    return spell


WINDOWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int | None]] = {
    "none": (lambda d: d < 0, None),
    "integer": (lambda d: d >= 300, 300),
    "float": (lambda d: d.float() >= 300.0, 300),
    "sum": (lambda d: d - 150 >= 150, 300),
    "product": (lambda d: d >= torch.full((), 6) * torch.full((), 50), 300),
    "quotients": (lambda d: (d // 10) // 5 >= 6, 300),
    "many small ones": (lambda d: d // 2 // 2 // 2 // 2 >= 2 * torch.full((), 3), 96),
    "long": (lambda d: d >= 1500, 1500),
    "small factor": (lambda d: d * 0.005 >= 1, 200),
    "square": (lambda d: d >= torch.full((), 20).square(), 400),
    "power": (lambda d: d >= torch.full((), 2) ** 8, 256),
    "shift": (lambda d: (d >> 8) >= 1, 256),
}


@pytest.mark.parametrize(("far", "window"), WINDOWS.values(), ids=WINDOWS)
def test_a_window_shows_however_its_size_is_computed(far: Any, window: int | None) -> None:
    module = Written(masked_by(far)).eval()
    weights_of(module)
    (node,) = (n for n in traced(module, MaskSpec("causal")).graph.nodes if n.target is ops.attention)
    assert node.kwargs["mask"] == (MaskSpec("causal") if window is None else MaskSpec("window", window))


def test_chunks_begin_after_left_padding() -> None:
    left_padding = torch.zeros(2, dtype=torch.int64, device="meta")

    def visible(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & ((kv - left_padding[batch]) // 5 == (q - left_padding[batch]) // 5)

    assert find_mask_spec(visible) == MaskSpec("chunk", 5)


# --- models ----------------------------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_XGLM = {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96, "max_position_embeddings": 128}
_GPT_NEO = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
MODELS: dict[str, dict[str, Any]] = {
    "falcon": _SMALL | {"multi_query": True, "new_decoder_architecture": False},
    "falcon-alibi": _SMALL | {"model_type": "falcon", "alibi": True, "multi_query": False, "parallel_attn": False},
    "gpt_neo": _GPT_NEO | {"vocab_size": 256, "window_size": 9, "max_position_embeddings": 128},
    "codegen": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 128, "rotary_dim": 4},
    "xglm": _XGLM | {"vocab_size": 256},
    "mpt": {"vocab_size": 256, "d_model": 64, "n_layers": 2, "n_heads": 8, "max_seq_len": 128},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.fast("falcon-alibi", "mpt", "xglm")
def test_models_with_attention_of_their_own_are_exact_on_one_device_and_on_several(name: str) -> None:
    options = dict(MODELS[name])
    config = CONFIG_MAPPING[options.pop("model_type", name)](**options)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    zoo.randomize(model, 0)
    weights = dict(model.named_parameters(remove_duplicate=False))
    program = trace(config)
    bodies = [module for _, module in walk_modules(program.modules) if isinstance(module, Body)]
    nodes = [n for body in bodies for n in body.graph.nodes if n.target is ops.attention]
    windows = {MaskSpec("window", 9)} if name == "gpt_neo" else set()
    assert {n.kwargs["mask"] for n in nodes} == {MaskSpec("causal"), *windows}
    # Falcon multiplies slopes and places in bf16, which are no line far away
    assert any("bias" in n.kwargs for n in nodes) == (name == "falcon-alibi")
    assert any("slopes" in n.kwargs for n in nodes) == (name == "mpt")
    split = tensor_parallel(program, 4)
    assert f"{config.num_hidden_layers} attention blocks" in split.history[-1].summary
    for length in (1, 21, 100):
        ids = zoo.batch(2, length)
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits
            assert relative_error(simulate(program, ids, weights=weights), expected) <= 1e-5
            assert relative_error(simulate(split, ids, weights=weights), expected) <= 1e-5
    if name == "falcon-alibi":
        with pytest.raises(RewriterError, match=r"with its mask outside of attention.* no output is written without"):
            emit_runtime_module(split)


def test_a_program_that_counts_its_tokens_itself_is_not_emitted_for_the_runtime() -> None:
    program = programs.traced("llama")
    assert counts_tokens(program) is None
    graph, _ = program.edit()
    (positions,) = (n for n in graph.nodes if n.target == "position_ids")
    (ids,) = (n for n in graph.nodes if n.target == "input_ids")
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        length = graph.call_function(torch.ops.aten.sym_size.int, (ids, 1))
        counted = graph.call_function(torch.ops.aten.arange.default, (length,))
    positions.replace_all_uses_with(counted)
    with pytest.raises(RewriterError, match="numbers the tokens of a call itself"):
        emit_runtime_module(program.with_(graph=graph))


@pytest.mark.tracer
def test_a_model_with_a_cache_of_its_own_is_not_emitted_for_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlimited OCR's drops what was generated long ago, which a forward without a cache sees."""

    class OwnLayer(cache_utils.DynamicSlidingWindowLayer):
        pass

    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "sliding_attention", OwnLayer)
    with pytest.raises(RewriterError, match=r"keys and values by OwnLayer, a class of its own.* no output is written"):
        emit_runtime_module(trace(zoo.config("gemma2")))
