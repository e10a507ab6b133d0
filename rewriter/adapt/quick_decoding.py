"""Many streams decoded in step on transformers' model: a cache that does not move, products in bf16."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from rewriter.adapt.budget import WIDE_ENOUGH, multiplies_bf16


class RoomyLayer(DynamicLayer):
    """A layer of a cache with room for `length` tokens from the start. transformers' own is copied at every token."""

    def __init__(self, layer: DynamicLayer, length: int) -> None:
        super().__init__()
        assert layer.keys is not None
        assert layer.values is not None
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self._room = [_roomy(held, length) for held in (layer.keys, layer.values)]
        self._show(layer.keys.shape[-2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, tokens, size] of all tokens so far."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[..., begin:end, :] = new
        return self._show(end)

    def _show(self, end: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (room[..., :end, :] for room in self._room)
        return self.keys, self.values


def _roomy(held: Tensor, length: int) -> Tensor:
    room = held.new_empty(*held.shape[:-2], length, held.shape[-1])
    room[..., : held.shape[-2], :] = held
    return room


def with_room(cache: Any, length: int) -> Any:
    """A cache of transformers, after the first tokens, with room for `length`. Layers that keep a window or a state
    stay as they are."""
    layers: list[Any] = getattr(cache, "layers", [])
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            layers[index] = RoomyLayer(layer, length)
    return cache


def with_bf16_products(model: nn.Module) -> nn.Module:
    """`model`, whose linear layers multiply in bf16 where its device has instructions for that: their weights are bf16
    then, all else stays as it is. Autocast would cast every weight at every token."""
    for layer in model.modules():
        if type(layer) is nn.Linear and multiplies_bf16(layer.weight.device) and layer.in_features >= WIDE_ENOUGH:
            layer.weight = nn.Parameter(layer.weight.bfloat16(), requires_grad=False)
            layer.register_forward_pre_hook(_narrow)
            layer.register_forward_hook(_wide)
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias.bfloat16(), requires_grad=False)
    return model


def _narrow(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.bfloat16() for x in inputs)


def _wide(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.float()
