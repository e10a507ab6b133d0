"""Watching the residual stream of an eager Hugging Face model, call by call, and giving its readers other values.

Nothing here knows the IR, the analyses or the passes; they are what it checks. The stream begins as the hidden states
given to the first decoder layer. An addition of the stream and another tensor of its shape makes the next stream value,
and the other tensor is a *write*; a cast, a view or a multiple (by a number) of the stream is the stream; all else that
is computed from it is a *read*. This is seen in the calls of torch functions, so it does not matter which module adds,
norms or reads.

While a model is watched, the tensors that it holds as its stream are filled with NaN: they are tokens that say where in
the stream a computation stands. Values come from a `Ledger` alone. A read that goes unnoticed therefore gives NaN
logits, never wrong ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from rewriter.common.errors import RewriterError

# Functions that may stand between a stream value and its next addition: the result holds the same numbers.
_SAME = frozenset(
    {"to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "contiguous", "detach", "dropout"}
    | {"view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"}
)
_ADDS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
_SCALINGS = frozenset(
    {"mul", "multiply", "__mul__", "__rmul__", "mul_", "__imul__", "div", "__truediv__", "div_", "__itruediv__"}
)
_IN_PLACE = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"})

# Functions that give some places of a tensor other values.
_PUTS = frozenset({"__setitem__", "masked_scatter", "masked_scatter_", "index_put", "index_put_"})

# Calls that ask for the shape, type or place of a tensor alone.
_QUESTIONS = frozenset(
    {"size", "dim", "numel", "is_floating_point", "get_device", "element_size", "stride", "__len__", "__hash__"}
    | {"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"}
)


@dataclass(frozen=True)
class Reader:
    """A place that reads the stream: the innermost module whose code does, and the decoder layer around it."""

    module: nn.Module
    layer: int


Carry = Callable[[torch.Tensor], torch.Tensor]
"""Linear function of the stream that a model adds to: the same, another type, a multiple by numbers or by tensors that
the model holds."""


class Ledger:
    """Holds the values and writes of the stream of one forward pass. Called in the order of execution.

    `source(values, value)` is what a reader of stream value number `value` is given; by default, as in the unmodified
    model, that value.
    """

    def __init__(self, source: Callable[[list[torch.Tensor], int], torch.Tensor] = list.__getitem__) -> None:
        self.source = source
        self.values: list[torch.Tensor] = []
        self.writes: list[torch.Tensor] = []

    def begin(self, stream: torch.Tensor) -> None:
        """A forward pass begins: `stream`, [B, S, D], is what the first layer is given."""
        self.values, self.writes = [stream.clone()], []  # some models add in place

    def write(self, value: int, carry: Carry, written: torch.Tensor) -> None:
        """`written`, [B, S, D], is added to `carry` of stream value number `value`, which makes value + 1."""
        self.writes.append(written.clone())
        self.values.append(carry(self.values[value]) + written)

    def read(self, value: int) -> torch.Tensor:
        """The tensor that a reader of stream value number `value` is given."""
        return self.source(self.values, value)

    def between(self, value: int) -> torch.Tensor:
        """Stream value number `value`, for the model's own code between its layers."""
        return self.values[value]

    def change(self, value: int, change: Carry) -> None:
        """The model's own code between its layers makes `change` of stream value number `value`, the newest."""
        self.values[value] = change(self.values[value])


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers: the longest ModuleList that is inside no other one and runs when the model is given text."""
    lists: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = list(module)
    if len(lists) > 1:
        lists = _that_run(model, lists)
    if not lists:
        raise RewriterError(f"{type(model).__name__}: no list of decoder layers")
    return max(lists.values(), key=lambda layers: len(layers))


@torch.no_grad()
def _that_run(model: PreTrainedModel, lists: Mapping[str, list[nn.Module]]) -> dict[str, list[nn.Module]]:
    """Those lists of which every module is called: not the encoders of images, not what only training needs."""
    called: set[nn.Module] = set()
    with ExitStack() as stack:
        for module in {module for modules in lists.values() for module in modules}:
            handle = module.register_forward_pre_hook(lambda module, args: called.add(module))
            stack.callback(handle.remove)
        model(input_ids=few_ids(model), use_cache=False)
    return {name: modules for name, modules in lists.items() if called.issuperset(modules)}


def few_ids(model: PreTrainedModel) -> torch.Tensor:
    """int64 [2, 3]: enough to see which module does what."""
    return torch.tensor([[2, 3, 5], [7, 3, 2]], device=next(model.parameters()).device)


@torch.no_grad()
def watch_few(model: PreTrainedModel, ledger: Ledger, chain: tuple[int, ...] | None = None) -> tuple[Watch, Any]:
    """(what was seen when `model` ran on three tokens with its stream in `ledger`, the logits)."""
    with watched(model, ledger, chain) as watch:
        return watch, model(input_ids=few_ids(model), use_cache=False).logits


@contextmanager
def watched(model: PreTrainedModel, ledger: Ledger, chain: tuple[int, ...] | None = None) -> Iterator[Watch]:
    """Within the `with`, `ledger` holds the stream of `model` in every forward pass, `generate` included.

    Without `chain` every addition to the stream counts as one. Raises RewriterError, from within the forward pass, for
    what is done to the stream and cannot be followed.
    """
    watch = Watch(ledger, chain)
    with ExitStack() as stack:
        layers = decoder_layers(model)
        numbers = {id(layer): number for number, layer in enumerate(layers)}
        if len(numbers) < len(layers):
            raise RewriterError(f"{type(model).__name__}: one decoder layer stands for several; they share a module")
        for module in model.modules():
            before = module.register_forward_pre_hook(watch.enters, with_kwargs=True, prepend=True)
            after = module.register_forward_hook(watch.leaves, with_kwargs=True, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        watch.layers = numbers
        watch.stored = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        stack.enter_context(watch)
        yield watch


@dataclass
class _Token:
    """A tensor of the model that stands for a stream value. `as_token` makes of the value what the model made of it."""

    tensor: torch.Tensor  # holding it keeps its identity unique
    value: int
    as_token: Carry


class Watch(TorchFunctionMode):
    """Follows the stream through the torch calls of a forward pass."""

    def __init__(self, ledger: Ledger, chain: tuple[int, ...] | None) -> None:
        super().__init__()
        self.ledger, self.chain = ledger, chain
        self.layers: dict[int, int] = {}
        self.layer: int | None = None
        self.made: list[tuple[int, int]] = [(-1, 0)]  # of each value: the value before it, the how-manieth addition
        self.reads: list[tuple[int, Reader]] = []
        self.calls: list[tuple[int, nn.Module]] = []  # modules called in the layers, with the newest value then
        self.returned = -1  # the value that the newest layer returned
        self.stored: set[int] = set()  # ids of the model's parameters and buffers
        self._tokens: dict[int, _Token] = {}
        self._shape = torch.Size()
        self._additions: dict[int, int] = {}
        self._inside: list[nn.Module] = []

    # hooks

    def enters(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside.append(module)
        number = self.layers.get(id(module))
        if number is not None:
            self.layer = number
            if number == 0:
                return self._begin(module, args, kwargs)
        if self._tokens:
            self.calls.append((len(self.made) - 1, module))
        return None

    def leaves(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._inside.pop()
        number = self.layers.get(id(module))
        if number is None or output is None:
            return
        hidden = _hidden(output)
        token = self._token(hidden)
        if token is None:
            raise RewriterError(
                f"layer {number} ({type(module).__name__}) returns something other than the residual stream plus what "
                "its blocks write: the stream is scaled or normed, or added where it cannot be followed"
            )
        self.returned = token.value
        self.layer = None if number == len(self.layers) - 1 else number

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = _hidden((args, kwargs))
        if hidden is None:
            raise RewriterError(f"layer 0 ({type(module).__name__}) is given no hidden states")
        self._tokens.clear()
        self._additions.clear()
        del self.made[1:], self.reads[:], self.calls[:]
        self._shape = hidden.shape
        self.ledger.begin(hidden.contiguous())
        token = torch.full_like(hidden.detach(), torch.nan)
        self._remember(token, 0, lambda value: value)
        leaves, spec = tree_flatten((args, kwargs))
        return tree_unflatten([token if leaf is hidden else leaf for leaf in leaves], spec)

    # torch calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._among((*args, *kwargs.values())):
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tokens = [self._token(leaf) for leaf in leaves]
        name = _name(func)
        if name in _ADDS and (made := self._add(func, args, kwargs)) is not None:
            return made
        first = tokens[0]
        if first is not None and not any(tokens[1:]) and (name in _SAME or self._scales(name, args, kwargs)):
            return self._same(func, first, args, kwargs)
        if len(args) == 2 and tokens[1] is not None and self._scales(name, args[::-1], kwargs) and "div" not in name:
            return self._same(func, tokens[1], args[::-1], kwargs)
        taken = first is not None and name == "__getitem__" and self._between_layers() and not any(tokens[1:])
        # all tokens, where a model may leave some out
        if first is not None and taken and func(*args, **kwargs).shape == first.tensor.shape:
            return self._same(func, first, args, kwargs)
        if first is not None and self.chain is not None and self._between_layers():
            if name == "__getitem__":
                now = first.as_token(self.ledger.between(first.value)).to(first.tensor.dtype)
                return func(now, *args[1:], **kwargs)
            if name in _PUTS and not any(tokens[1:]):
                return self._put(func, first, args, kwargs)
        if first is not None and (name in _IN_PLACE or re.fullmatch(r"[a-z]\w*[a-z]_", name)):
            raise RewriterError(f"the residual stream is changed in place by {name} in {self._place()}")
        if name == "__get__":  # shape, dtype, device
            result = func(*args, **kwargs)
            if not isinstance(result, torch.Tensor):
                return result
        if name in _QUESTIONS:
            return func(*args, **kwargs)
        given = [leaf if token is None else self._read(token) for leaf, token in zip(leaves, tokens, strict=True)]
        args, kwargs = tree_unflatten(given, spec)
        return func(*args, **kwargs)

    def _add(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The token of the sum when this addition makes a stream value; None when it is a read like any other."""
        first = self._token(args[0])
        token, other = (first, args[1]) if first is not None else (self._token(args[1]), args[0])
        assert token is not None
        if not isinstance(other, torch.Tensor) or other.shape != token.tensor.shape:
            return None
        if self._token(other) is not None:
            raise RewriterError(f"two values of the residual stream are added to each other in {self._place()}")
        count = self._additions.get(token.value, 0)
        self._additions[token.value] = count + 1
        if self.chain is not None and (token.value >= len(self.chain) or self.chain[token.value] != count):
            return None
        result: torch.Tensor = func(*args, **kwargs)
        value = len(self.made)
        self.made.append((token.value, count))
        written = other if kwargs.get("alpha", 1) == 1 else other * kwargs["alpha"]
        shape, carry = self._shape, token.as_token
        self.ledger.write(token.value, lambda x: carry(x).reshape(shape), written.reshape(shape).contiguous())
        self._remember(result, value, lambda x: x.reshape(result.shape))
        return result

    def _same(self, func: Callable[..., Any], token: _Token, args: Any, kwargs: Any) -> torch.Tensor:
        before, rest = token.as_token, args[1:]
        result: torch.Tensor = func(*args, **kwargs)
        if result is not token.tensor:
            self._remember(result, token.value, lambda value: func(before(value), *rest, **kwargs))
        elif _name(func) in _SCALINGS:  # in place, which the value must not be
            self._remember(result, token.value, lambda value: func(before(value).clone(), *rest, **kwargs))
        return result

    def _put(self, func: Callable[..., Any], token: _Token, args: Any, kwargs: Any) -> Any:
        """Between its layers a model puts other values in some places of the stream: features of images."""
        before, rest, shape = token.as_token, args[1:], self._shape

        def change(value: torch.Tensor) -> torch.Tensor:
            given = before(value).clone()
            result = func(given, *rest, **kwargs)
            return (given if result is None else result).reshape(shape)

        self.ledger.change(token.value, change)
        result = func(*args, **kwargs)
        made = token.tensor if result is None else result
        made.detach().fill_(torch.nan)
        self._remember(made, token.value, lambda value: value.reshape(made.shape))
        return result

    def _scales(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if a call multiplies its first argument by a number, or by tensors that the model holds."""
        if name not in _SCALINGS or len(args) != 2 or kwargs:
            return False
        return isinstance(args[1], (int, float)) or id(args[1]) in self.stored

    def _between_layers(self) -> bool:
        return bool(self._inside) and not any(id(module) in self.layers for module in self._inside)

    def _read(self, token: _Token) -> torch.Tensor:
        if self._inside and self.layer is not None:
            self.reads.append((token.value, Reader(self._inside[-1], self.layer)))
        return token.as_token(self.ledger.read(token.value)).to(token.tensor.dtype)

    def _remember(self, tensor: torch.Tensor, value: int, as_token: Carry) -> None:
        self._tokens[id(tensor)] = _Token(tensor, value, as_token)

    def _token(self, leaf: Any) -> _Token | None:
        return self._tokens.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None

    def _among(self, values: Iterable[Any]) -> bool:
        """True if a token is among arguments, or inside of their lists, tuples and mappings."""
        for value in values:
            inside = value.values() if isinstance(value, dict) else value
            if id(value) in self._tokens or (isinstance(value, (list, tuple, dict)) and self._among(inside)):
                return True
        return False

    def _place(self) -> str:
        return f"layer {self.layer}, {type(self._inside[-1]).__name__}" if self._inside else "the model's own code"


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", None) or str(resolve_name(func))
    return name.rpartition(".")[2]


def _hidden(tree: Any) -> torch.Tensor | None:
    """The hidden states among arguments or results: by name, else the first floating-point tensor [B, S, D]."""
    if isinstance(tree, tuple) and len(tree) == 2 and isinstance(tree[1], dict) and "hidden_states" in tree[1]:
        return tree[1]["hidden_states"]
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim == 3:
            return leaf
    return None


@dataclass(frozen=True)
class Structure:
    """The blocks of a model: block b reads stream value `starts[b]` and makes the values up to `starts[b + 1]`.

    `layers[b]` is its decoder layer, `readers[b]` are the modules that read for it, `modules[b]` those that run in it.
    `chain` names the additions that make the stream: value t + 1 comes from the `chain[t]`-th addition to value t.
    """

    chain: tuple[int, ...]
    starts: tuple[int, ...]
    layers: tuple[int, ...]
    readers: tuple[tuple[nn.Module, ...], ...]
    modules: tuple[tuple[nn.Module, ...], ...]

    @property
    def last(self) -> int:
        """The number of the last stream value, which the final norm reads."""
        return len(self.chain)


@torch.no_grad()
def find_structure(model: PreTrainedModel) -> Structure:
    """The blocks of `model` (eval mode), found by running it on three tokens.

    Raises RewriterError when the stream cannot be followed, or when its reads do not explain the model's logits.
    """
    expected = model(input_ids=few_ids(model), use_cache=False).logits
    watch, _ = watch_few(model, Ledger())
    chain: list[int] = []
    value = watch.returned
    while value > 0:
        value, count = watch.made[value]
        chain.insert(0, count)
    watch, actual = watch_few(model, Ledger(), tuple(chain))
    # The same additions in the same order: a difference means a read that was not seen, or a change of the stream.
    if not torch.allclose(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
        raise RewriterError(
            f"{type(model).__name__}: the residual stream cannot be followed: something reads or changes it elsewhere "
            "than in additions, casts and calls of torch functions"
        )
    return _blocks(model, watch, tuple(chain))


def _blocks(model: PreTrainedModel, watch: Watch, chain: tuple[int, ...]) -> Structure:
    last = len(chain)
    starts = tuple(sorted({value for value, _ in watch.reads if value < last}))
    if not starts or starts[0] != 0:
        raise RewriterError(f"{type(model).__name__}: no layer reads the residual stream that the first one is given")
    layers: list[int] = []
    readers: list[tuple[nn.Module, ...]] = []
    modules: list[tuple[nn.Module, ...]] = []
    for start, end in zip(starts, (*starts[1:], last), strict=True):
        own = [reader for value, reader in watch.reads if value == start]
        if strays := [reader for reader in own if reader.layer != own[0].layer]:
            raise RewriterError(
                f"layer {strays[0].layer} ({type(strays[0].module).__name__}) reads the residual stream as it was for "
                f"layer {own[0].layer}"
            )
        layers.append(own[0].layer)
        readers.append(tuple(dict.fromkeys(reader.module for reader in own)))
        modules.append(tuple(dict.fromkeys(module for value, module in watch.calls if start <= value < end)))
    return Structure(chain, starts, tuple(layers), tuple(readers), tuple(modules))


def check_layers(name: str, model: PreTrainedModel, layers: Collection[int]) -> None:
    """Raises RewriterError for layers that `model` does not have."""
    depth = len(decoder_layers(model))
    if surplus := sorted(set(layers) - set(range(depth))):
        raise RewriterError(f"{name}: layers {surplus}, the model has 0 to {depth - 1}")
