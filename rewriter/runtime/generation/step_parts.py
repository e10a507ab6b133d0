"""The parts of a decode step that are compiled each on its own: segments between collectives, and products outside of
them.

A part's inputs are tensors alone, in an order that `Call` says: its arguments, of a context what it reads, and its
weights. Layers that differ only in their tensors are one compiled part, and ranks communicate outside of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rewriter.runtime.cache import StaticCache
from rewriter.runtime.compiled import Part, segments_of
from rewriter.runtime.context import Context

# Entries of a cache in the example that is traced: fewer than there are, since those of a whole cache lie side by side.
_LOOKED_AT, _THERE = 192, 448
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def weights_of(part: Part) -> list[Tensor]:
    return [x.detach() for x in tensors_of(part.module).values()]


def parts_of(model: nn.Module) -> list[Part]:
    """The segments of `model`, and the linear layers outside of modules with segments."""
    segments = segments_of(model)
    within = {id(module) for part in segments for module in part.module.modules()}
    linear = [
        Part(path, module, "forward")
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in within
    ]
    return segments + linear


def why_no_parts(model: nn.Module) -> str | None:
    """Why parts of `model` cannot stand in for its own code; None where they can."""
    for path, module in model.named_modules():
        if any(vars(module).get(hooks) for hooks in _HOOKS):
            return f"{path or 'the model'} has hooks"
        if type(module._parameters) is not dict:
            return "weights are read whenever they are used"
        if any(type(x) not in (Tensor, nn.Parameter) for x in (*module._parameters.values(), *module._buffers.values())
               if x is not None):  # fmt: skip
            return "weights are stored in parts"
    if any(part.method in vars(part.module) for part in parts_of(model)):
        return "methods of its layers were replaced"
    return None


@dataclass(frozen=True)
class Input:
    """shape, strides and dtype of a tensor; `grows`: its third dimension is as many entries of a cache as a step looks
    at, of as many as there are. Neither number is this one's, and no compiled part depends on them."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    grows: bool = False

    @staticmethod
    def of(x: Tensor, grows: bool = False) -> Input:
        shape, strides = tuple(x.shape), tuple(x.stride())
        if grows:
            batch, heads, _, width = shape
            shape = (batch, heads, _LOOKED_AT, width)
            strides = (heads * _THERE * width, _THERE * width, width, 1)
        return Input(shape, strides, str(x.dtype).removeprefix("torch."), grows)

    def fits(self, x: Tensor) -> bool:
        return x.shape == self.shape and x.stride() == self.strides

    @staticmethod
    def read(said: Mapping[str, Any]) -> Input:
        return Input(tuple(said["shape"]), tuple(said["strides"]), said["dtype"], said["grows"])


@dataclass(frozen=True)
class Call:
    """How a part is called in every step. `kinds`: "tensor", "context" or "none" by argument; `rings`: which of its
    slots are; `inputs`: those that its arguments give; `weights`: the module's."""

    kinds: tuple[str, ...]
    rings: tuple[bool, ...]
    inputs: tuple[Input, ...]
    weights: tuple[Input, ...]

    @staticmethod
    def of(part: Part, arguments: Sequence[Any]) -> Call | None:
        """None for arguments that compiled code does not take."""
        kinds, rings, inputs = [], [], []
        for argument in arguments:
            kinds.append(_kind(argument))
            if kinds[-1] is None:
                return None
            if isinstance(argument, Context):
                assert isinstance(argument.cache, StaticCache)
                rings += [argument.cache.rings[slot] for slot in part.slots]
        flat = _flat(arguments, part.slots)
        grows = _growing(kinds, rings)
        inputs = [Input.of(x, g) for x, g in zip(flat, grows, strict=True)]
        return Call(tuple(kinds), tuple(rings), tuple(inputs), tuple(Input.of(x) for x in weights_of(part)))

    @staticmethod
    def read(said: Mapping[str, Any]) -> Call:
        inputs, weights = ([Input.read(x) for x in said[name]] for name in ("inputs", "weights"))
        return Call(tuple(said["kinds"]), tuple(said["rings"]), tuple(inputs), tuple(weights))

    def arguments(self, inputs: Sequence[Tensor], slots: Sequence[int]) -> list[Any]:
        """The arguments again, of `inputs` as `of` makes them: the reverse of what a compiled part is given."""
        rest: Iterator[Any] = iter(inputs)
        found: list[Any] = []
        for kind in self.kinds:
            if kind != "context":
                found.append(next(rest) if kind == "tensor" else None)
                continue
            position, first_valid = next(rest), next(rest)
            cache: Any = object.__new__(StaticCache)
            cache.only_slot, cache.rings = False, dict(zip(slots, self.rings, strict=True))
            cache.keys = {slot: next(rest) for slot in slots}
            cache.values = {slot: next(rest) for slot in slots}
            found.append(Context(cache, position, first_valid))
        return found


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return "tensor"
    if isinstance(argument, Context) and isinstance(argument.cache, StaticCache):
        whole = argument.position is not None and argument.first_valid is not None
        return "context" if whole and argument.segment_ids is None and argument.shards is None else None
    return "none" if argument is None else None


def _flat(arguments: Sequence[Any], slots: Sequence[int]) -> list[Tensor]:
    found: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif argument is not None:
            cache = argument.cache
            found += [argument.position, argument.first_valid]
            found += [cache.keys[slot] for slot in slots]
            found += [cache.values[slot] for slot in slots]
    return found


def _growing(kinds: Sequence[Any], rings: Sequence[bool]) -> list[bool]:
    found: list[bool] = []
    for kind in kinds:
        entries = [not ring for ring in rings]
        found += {"tensor": [False], "none": []}.get(kind, [False, False, *entries, *entries])
    return found


class CompiledPart:
    """Stands in for a part's method. A call of another kind than it was compiled for runs the method itself."""

    def __init__(self, part: Part, call: Call, run: Callable[[list[Tensor]], list[Tensor]], single: bool) -> None:
        self._plain = getattr(part.module, part.method)
        self._call, self._run, self._single, self._slots = call, run, single, part.slots
        self._fixed = [(i, x) for i, x in enumerate(call.inputs) if not x.grows]
        self._weights = weights_of(part)

    def __call__(self, *arguments: Any) -> Any:
        call = self._call
        if tuple(map(_kind, arguments)) != call.kinds:
            return self._plain(*arguments)
        inputs = _flat(arguments, self._slots)
        if not all(x.fits(inputs[i]) for i, x in self._fixed):
            return self._plain(*arguments)
        found = self._run([*inputs, *self._weights])
        return found[0] if self._single else tuple(found)


@contextmanager
def in_place_of(parts: Sequence[Part], calls: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Within it, `calls` are called in place of the parts' methods."""
    for part, call in zip(parts, calls, strict=True):
        vars(part.module)[part.method] = call
    try:
        yield
    finally:
        for part in parts:
            vars(part.module).pop(part.method, None)


@contextmanager
def watched(parts: Sequence[Part]) -> Iterator[dict[str, Call]]:
    """How each of `parts` is called within it, by name; those that are not called, or not so that they could be
    compiled, are left out."""
    found: dict[str, Call | None] = {}

    def watch(part: Part) -> Callable[..., Any]:
        plain = getattr(part.module, part.method)

        def run(*arguments: Any, **named: Any) -> Any:
            call = Call.of(part, arguments) if not named else None
            if part.name in found and found[part.name] != call:
                call = None  # called in two ways
            found[part.name] = call
            return plain(*arguments, **named)

        return run

    calls: dict[str, Call] = {}
    with in_place_of(parts, [watch(part) for part in parts]):
        yield calls
    calls |= {name: call for name, call in found.items() if call is not None}


def structure(part: Part) -> tuple[object, ...]:
    """Equal for parts that are the same computation of their inputs: modules of the same classes with the same
    attributes, but for their tensors and the numbers of their slots."""
    ordinary = vars(nn.Module())
    found: list[object] = [part.method]
    for path, module in part.module.named_modules():
        own = {name: _comparable(x) for name, x in vars(module).items() if name not in ordinary}
        if isinstance(slot := own.get("slot"), int):
            own["slot"] = part.slots.index(slot)
        found.append((path, type(module), tuple(sorted(own.items(), key=lambda item: item[0]))))
    return tuple(found)


def _comparable(x: Any) -> object:
    """`x` itself where equal ones are the same, else which object it is."""
    if isinstance(x, (tuple, list)):
        return (type(x), *map(_comparable, x))
    return x if isinstance(x, (int, float, str, bytes, torch.dtype, type(None))) else ("object", id(x))
