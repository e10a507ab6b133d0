"""An independent reference for ladder: the unmodified eager Hugging Face model, whose blocks are handed other inputs.

Nothing here knows the IR, the analyses or the passes; they are what it checks. A ladder changes only what each block
*reads*. Number the blocks of a model in order; let X_0 be the stream before the first, X_{j+1} = X_j + block_j(read_j).
Standard: read_j = X_j. In a ladder layer: read_j = X_{j-1}, with X_{-1} := X_0. Both transitions follow from that.

Where blocks begin is found by watching one forward pass: a child of a decoder layer that is given a tensor which no
child of a layer made (the layer's input, or a sum that the layer's own code made) is given the stream. Children of a
layer that are given the same stream value are one block (parallel attention and MLP).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rewriter.errors import RewriterError

_Value = tuple[int, int]
"""A tensor at a moment: its identity and its version, which in-place additions advance."""


@dataclass(frozen=True)
class Entry:
    """A module through which a block reads the stream. `argument` is its place in the call: an index or a keyword."""

    layer: int
    module: nn.Module
    block: int
    argument: int | str


@contextmanager
def ladder_reference(model: PreTrainedModel, layers: Collection[int]) -> Iterator[PreTrainedModel]:
    """Within the `with`, `model` (eval mode) computes the ladder of itself on `layers`: forward, backward, `generate`.

    Raises RewriterError for a layer that the model does not have, and when the blocks cannot be told apart.
    """
    depth = len(decoder_layers(model))
    if surplus := sorted(set(layers) - set(range(depth))):
        raise RewriterError(f"ladder reference: layers {surplus}, the model has 0 to {depth - 1}")
    # Only the current and the previous stream value are needed, and a copy of each: some models add in place.
    values: dict[int, torch.Tensor] = {}

    def reading(entry: Entry, stale: bool) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            fresh = args[entry.argument] if isinstance(entry.argument, int) else kwargs[entry.argument]
            if entry.block == 0:
                values.clear()
            if entry.block not in values:
                values[entry.block] = fresh.clone()
                values.pop(entry.block - 2, None)
            if not stale or entry.block == 0:
                return None
            if entry.block - 1 not in values:
                raise RewriterError(f"ladder reference: block {entry.block} ran without the block before it")
            return _replaced(entry.argument, values[entry.block - 1], args, kwargs)

        return hook

    with ExitStack() as stack:
        for entry in find_entries(model):
            handle = entry.module.register_forward_pre_hook(reading(entry, entry.layer in layers), with_kwargs=True)
            stack.callback(handle.remove)
        yield model


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers: the longest ModuleList that is inside no other one."""
    lists: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = list(module)
    if not lists:
        raise RewriterError(f"{type(model).__name__}: no list of decoder layers")
    return max(lists.values(), key=lambda layers: len(layers))


@torch.no_grad()
def find_entries(model: PreTrainedModel) -> list[Entry]:
    """The modules through which the blocks of `model` read the stream, in order of execution.

    Runs the model once on two tokens. Raises RewriterError when a layer gives no child a stream value.
    """
    layers = decoder_layers(model)
    watch = _Watch()
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            pre = layer.register_forward_pre_hook(watch.layer_begins(number), with_kwargs=True, prepend=True)
            stack.callback(pre.remove)
            for child in layer.children():
                before = child.register_forward_pre_hook(watch.child_begins(number), with_kwargs=True)
                after = child.register_forward_hook(watch.child_ends)
                stack.callback(before.remove)
                stack.callback(after.remove)
        ids = torch.tensor([[0, 1]], device=next(model.parameters()).device)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    for number, layer in enumerate(layers):
        if not any(entry.layer == number for entry in watch.entries):
            raise RewriterError(
                f"ladder reference: no child of layer {number} ({type(layer).__name__}) reads the stream"
            )
    return watch.entries


class _Watch:
    """Tells stream values from others while a model runs: by who made each tensor."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._made_by_children: dict[_Value, torch.Tensor] = {}  # holding the tensor keeps its identity unique
        self._handed_to_layer: dict[int, torch.Tensor] = {}
        self._hidden: torch.Tensor | None = None
        self._blocks: dict[_Value, tuple[int, torch.Tensor]] = {}  # of this layer, by the stream value they read

    def layer_begins(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._hidden = args[0] if args else kwargs["hidden_states"]
            given = list(_tensors((args[1:], {k: v for k, v in kwargs.items() if v is not self._hidden})))
            self._handed_to_layer = {id(t): t for t in given}
            self._made_by_children.clear()
            self._blocks.clear()

        return hook

    def child_begins(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert self._hidden is not None
            places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            for place, value in places:
                if not isinstance(value, torch.Tensor) or value.shape != self._hidden.shape:
                    continue
                moment = (id(value), value._version)
                if moment in self._made_by_children or id(value) in self._handed_to_layer:
                    continue
                if moment not in self._blocks:
                    self._blocks[moment] = (self._next_block(), value)
                self.entries.append(Entry(number, module, self._blocks[moment][0], place))
                return

        return hook

    def child_ends(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._made_by_children |= {(id(t), t._version): t for t in _tensors(output)}

    def _next_block(self) -> int:
        return 1 + max((entry.block for entry in self.entries), default=-1)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)


def _replaced(
    argument: int | str, value: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(argument, int):
        return (*args[:argument], value, *args[argument + 1 :]), kwargs
    return args, {**kwargs, argument: value}
