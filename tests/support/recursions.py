"""Ladders of models whose stream is more than x + f(x), written by hand as recursions over the layers.

Nothing here imports `rewriter`: these say what the general form means. A layer is a list of `Block`s over a stream X,

    X' = K(X) + b(X) ⊗ F,    F = f(c(read))

of which late ones read R instead of X: K(X) of the last block whose F ranks sum, on which blocks that ranks do not
share have acted as well. With late coefficients, what K multiplies X by and b are computed from R, too. The modules are
those of the unmodified eager model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """`branch` gives F, and what the layer hands on; `carry` is K, of X and of what its coefficients are computed from;
    `write` is b(X) ⊗ F, with b computed from its first argument."""

    branch: Callable[[Tensor], tuple[Tensor, Any]]
    carry: Callable[[Tensor, Tensor], Tensor] = lambda x, mixed_by: x
    write: Callable[[Tensor, Tensor], Tensor] = lambda x, f: f
    shared: bool = True


@dataclass
class State:
    """The stream between layers: X and R as the last block left them, and what every layer does with them first."""

    x: Tensor
    late: Tensor
    first: Callable[[Tensor], Tensor] = lambda x: x


def _alone(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Any]]:
    return lambda x: (f(x), None)


def _deepseek_v4(layer: Any, kw: dict[str, Any]) -> list[Block]:
    def block(mixes: Any, branch: Callable[[Tensor], Tensor]) -> Block:
        return Block(
            _alone(lambda x: branch(mixes(x)[2])),
            lambda x, mixed_by: torch.matmul(mixes(mixed_by)[1].to(x.dtype).transpose(-1, -2), x),
            lambda x, f: mixes(x)[0].to(x.dtype).unsqueeze(-1) * f.unsqueeze(-2),
        )

    ids = kw.pop("input_ids")
    return [
        block(layer.attn_hc, lambda x: layer.self_attn(layer.input_layernorm(x), **kw)[0]),
        block(layer.ffn_hc, lambda x: layer.mlp(layer.post_attention_layernorm(x), input_ids=ids)),
    ]


def _hy_v4(layer: Any, kw: dict[str, Any]) -> list[Block]:
    def attention(x: Tensor) -> tuple[Tensor, Any]:
        out, _, places = layer.self_attn(hidden_states=layer.input_layernorm(layer.attn_hc(x)[1]), **kw)
        return out, places

    def write(mixes: Any) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, f: (mixes(x)[0].float().unsqueeze(-1) * f.float().unsqueeze(-2)).to(x.dtype)

    return [
        Block(attention, write=write(layer.attn_hc)),
        Block(
            _alone(lambda x: layer.mlp(layer.post_attention_layernorm(layer.ffn_hc(x)[1]))), write=write(layer.ffn_hc)
        ),
    ]


def _qwen4_exp_text(layer: Any, kw: dict[str, Any]) -> list[Block]:
    def mixed(x: Tensor) -> Tensor:
        if layer.layer_type == "linear_attention":
            return layer.linear_attn(x, cache=None, attention_mask=kw["conv_mask"])
        return layer.self_attn(x, kw["position_embeddings"], attention_mask=kw["attention_mask"], cache=None)[0]

    def block(mixes: Any, f: Callable[[Tensor], Tensor]) -> Block:
        def write(x: Tensor, out: Tensor) -> Tensor:
            return (out.unsqueeze(-2) * mixes(x)[2].unsqueeze(-1)).flatten(-2)

        return Block(_alone(lambda x: f(mixes(x)[0])), write=write)

    def embedded(x: Tensor) -> Tensor:
        return layer.ple(x, kw["ple_input_ids"], None, conv_mask=kw["conv_mask"])

    ngrams = [Block(_alone(embedded), shared=False)] if layer.ple is not None else []
    return [*ngrams, block(layer.attn_hyper_connection, mixed), block(layer.mlp_hyper_connection, layer.mlp)]


def _gemma4_text(layer: Any, kw: dict[str, Any]) -> list[Block]:
    given = kw.pop("per_layer_input")

    def attention(x: Tensor) -> Tensor:
        return layer.post_attention_layernorm(layer.self_attn(hidden_states=layer.input_layernorm(x), **kw)[0])

    def mlp(x: Tensor) -> Tensor:
        return layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))

    def embedded(x: Tensor) -> Tensor:
        gated = layer.act_fn(layer.per_layer_input_gate(x)) * given
        return layer.post_per_layer_input_norm(layer.per_layer_projection(gated))

    return [Block(_alone(attention)), Block(_alone(mlp)), Block(_alone(embedded), shared=False)]


def _bart(layer: Any, kw: dict[str, Any]) -> list[Block]:
    norm = layer.self_attn_layer_norm

    def mlp(x: Tensor) -> Tensor:
        return layer.fc2(layer.activation_fn(layer.fc1(norm(x))))

    return [
        Block(_alone(lambda x: layer.self_attn(hidden_states=x, attention_mask=kw.get("attention_mask"))[0])),
        Block(_alone(mlp), carry=lambda x, _: norm(x)),
    ]


def _longcat_flash(layer: Any, kw: dict[str, Any]) -> list[Block]:
    def attention(index: int, x: Tensor) -> Tensor:
        return layer.self_attn[index](hidden_states=layer.input_layernorm[index](x), **kw)[0]

    def rest(x: Tensor) -> Tensor:  # a block with sums inside
        normed = layer.post_attention_layernorm[0](x)
        shortcut, first = layer.mlp(normed), layer.mlps[0](normed)
        second = attention(1, x + first)
        third = layer.mlps[1](layer.post_attention_layernorm[1](x + first + second))
        return first + second + third + shortcut

    return [Block(_alone(lambda x: attention(0, x))), Block(_alone(rest))]


def _minimax(layer: Any, kw: dict[str, Any]) -> list[Block]:
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    return [
        Block(
            _alone(lambda x: layer.self_attn(hidden_states=first(x), **kw)[0]),
            lambda x, _: layer.attn_alpha_factor * first(x),
            lambda x, f: layer.attn_beta_factor * f,
        ),
        Block(
            _alone(lambda x: layer.mlp(second(x))),
            lambda x, _: layer.mlp_alpha_factor * second(x),
            lambda x, f: layer.mlp_beta_factor * f,
        ),
    ]


LAYERS = {
    "deepseek_v4": _deepseek_v4,
    "hy_v4": _hy_v4,
    "qwen4_exp_text": _qwen4_exp_text,
    "gemma4_text": _gemma4_text,
    "bart": _bart,
    "longcat_flash": _longcat_flash,
    "minimax": _minimax,
}
# what a layer does with the stream after its last block, and its first block reads and carries on
_LAST = {
    "gemma4_text": lambda layer: lambda x: x * layer.layer_scalar,
    "bart": lambda layer: layer.final_layer_norm,
}
_TUPLES = ("hy_v4",)  # layers that return what they hand on beside the hidden state


@contextmanager
def laddered(
    model: Any, layers: Any, name: str, late: Collection[int], late_coefficients: bool = False
) -> Iterator[None]:
    """Within the `with`, the decoder `layers` of `model` (type `name`) whose numbers are in `late` read late, with
    coefficients of what they read where `late_coefficients`."""
    state: list[State] = []

    def forward(index: int, layer: Any, hidden_states: Tensor, *args: Any, **kw: Any) -> Any:
        kw |= dict(zip([*inspect.signature(type(layer).forward).parameters][2:], args, strict=False))
        if index == 0:
            state[:] = [State(hidden_states, hidden_states)]
        now, handed = state[0], None
        for place, block in enumerate(LAYERS[name](layer, kw)):
            before = now.first if place == 0 else lambda x: x
            x, r = before(now.x), before(now.late)
            f, side = block.branch(r if index in late else x)
            handed = side if side is not None else handed
            mixed_by = r if index in late and late_coefficients else x
            carried, written = block.carry(x, mixed_by), block.write(mixed_by, f)
            now.late = carried if block.shared else block.carry(r, r) + written
            now.x = carried + written
        now.first = _LAST.get(name, lambda layer: lambda x: x)(layer)
        out = now.first(now.x)
        return (out, handed) if name in _TUPLES else out

    for index, layer in enumerate(layers):
        layer.forward = lambda hidden, *args, _i=index, _l=layer, **kw: forward(_i, _l, hidden, *args, **kw)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
