"""The parts of a decode step that are compiled separately: segments between collectives, and products outside of them.

A part's inputs are tensors alone, in the order of `PartCall`: its arguments, of a context what it reads, and its
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
from rewriter.runtime.compiled import ModulePart, segments_of
from rewriter.runtime.context import Context

# Entries of a cache in the example that is traced: fewer than there are, since those of a whole cache lie side by side.
_LOOKED_AT, _THERE = 192, 448
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def weights_of(part: ModulePart) -> list[Tensor]:
    return [x.detach() for x in tensors_of(part.module).values()]


def parts_of(model: nn.Module) -> list[ModulePart]:
    """The segments of `model`, and the linear layers outside of modules with segments."""
    segments = segments_of(model)
    within = {id(module) for part in segments for module in part.module.modules()}
    linear = [
        ModulePart(path, module, "forward")
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in within
    ]
    return segments + linear


def why_no_parts(model: nn.Module) -> str | None:
    """Reason why parts of `model` cannot replace its code; None where they can."""
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
class PartInput:
    """shape, strides and dtype of a tensor; `grows`: its third dimension is as many entries of a cache as a step looks
    at, of as many as there are. Neither number is this one's, and no compiled part depends on them."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    grows: bool = False

    @staticmethod
    def of(x: Tensor, grows: bool = False) -> PartInput:
        shape, strides = tuple(x.shape), tuple(x.stride())
        if grows:
            batch, heads, _, width = shape
            shape = (batch, heads, _LOOKED_AT, width)
            strides = (heads * _THERE * width, _THERE * width, width, 1)
        return PartInput(shape, strides, str(x.dtype).removeprefix("torch."), grows)

    def fits(self, x: Tensor) -> bool:
        return x.shape == self.shape and x.stride() == self.strides

    @staticmethod
    def read(said: Mapping[str, Any]) -> PartInput:
        return PartInput(tuple(said["shape"]), tuple(said["strides"]), said["dtype"], said["grows"])


@dataclass(frozen=True)
class PartCall:
    """A part's call in every step. `kinds`: "tensor", "context" or "none" by argument; `fixed`: True for its slots
    whose size does not depend on the cache's; `inputs`: those that its arguments give; `weights`: the module's."""

    kinds: tuple[str, ...]
    fixed: tuple[bool, ...]
    inputs: tuple[PartInput, ...]
    weights: tuple[PartInput, ...]

    @staticmethod
    def of(part: ModulePart, arguments: Sequence[Any]) -> PartCall | None:
        """None for arguments that compiled code does not take."""
        kinds, fixed, inputs = [], [], []
        for argument in arguments:
            kinds.append(_kind(argument))
            if kinds[-1] is None:
                return None
            if isinstance(argument, Context):
                assert isinstance(argument.cache, StaticCache)
                fixed += [argument.cache.fixed[slot] for slot in part.slots]
        flat = _flat(arguments, part.slots)
        grows = _growing(kinds, fixed)
        inputs = [PartInput.of(x, g) for x, g in zip(flat, grows, strict=True)]
        return PartCall(tuple(kinds), tuple(fixed), tuple(inputs), tuple(PartInput.of(x) for x in weights_of(part)))

    @staticmethod
    def read(said: Mapping[str, Any]) -> PartCall:
        inputs, weights = ([PartInput.read(x) for x in said[name]] for name in ("inputs", "weights"))
        return PartCall(tuple(said["kinds"]), tuple(said["fixed"]), tuple(inputs), tuple(weights))

    def arguments(self, inputs: Sequence[Tensor], slots: Sequence[int]) -> list[Any]:
        """The arguments again, of `inputs` as `of` makes them: the reverse of what a compiled part is given."""
        rest: Iterator[Any] = iter(inputs)
        arguments: list[Any] = []
        for kind in self.kinds:
            if kind != "context":
                arguments.append(next(rest) if kind == "tensor" else None)
                continue
            position, first_valid = next(rest), next(rest)
            cache: Any = object.__new__(StaticCache)
            cache.fixed = dict(zip(slots, self.fixed, strict=True))
            cache.keys = {slot: next(rest) for slot in slots}
            cache.values = {slot: next(rest) for slot in slots}
            arguments.append(Context(cache, position, first_valid))
        return arguments


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return "tensor"
    if isinstance(argument, Context) and isinstance(argument.cache, StaticCache):
        whole = argument.position is not None and argument.first_valid is not None
        return "context" if whole and argument.segment_ids is None and argument.shards is None else None
    return "none" if argument is None else None


def _flat(arguments: Sequence[Any], slots: Sequence[int]) -> list[Tensor]:
    flat: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            flat.append(argument)
        elif argument is not None:
            keys, values = argument.cache.keys, argument.cache.values
            flat += [argument.position, argument.first_valid, *map(keys.__getitem__, slots)]
            flat += map(values.__getitem__, slots)
    return flat


def _growing(kinds: Sequence[Any], fixed: Sequence[bool]) -> list[bool]:
    entries = [not stays for stays in fixed]
    of_kind = {"tensor": [False], "none": [], "context": [False, False, *entries, *entries]}
    return [grows for kind in kinds for grows in of_kind[kind]]


class CompiledPart:
    """Replaces a part's method. A call of another kind than it was compiled for runs the method itself."""

    def __init__(
        self, part: ModulePart, call: PartCall, run: Callable[[list[Tensor]], list[Tensor]], single: bool
    ) -> None:
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
        outputs = self._run([*inputs, *self._weights])
        return outputs[0] if self._single else tuple(outputs)


@contextmanager
def in_place_of(parts: Sequence[ModulePart], calls: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Within it, `calls` are called in place of the parts' methods."""
    for part, call in zip(parts, calls, strict=True):
        vars(part.module)[part.method] = call
    try:
        yield
    finally:
        for part in parts:
            vars(part.module).pop(part.method, None)


@contextmanager
def watched(parts: Sequence[ModulePart]) -> Iterator[dict[str, PartCall]]:
    """The calls of `parts` within it, by name; without parts that are not called, or cannot be compiled so."""
    seen: dict[str, PartCall | None] = {}

    def watch(part: ModulePart) -> Callable[..., Any]:
        plain = getattr(part.module, part.method)

        def run(*arguments: Any, **named: Any) -> Any:
            call = PartCall.of(part, arguments) if not named else None
            if part.name in seen and seen[part.name] != call:
                call = None  # called in two ways
            seen[part.name] = call
            return plain(*arguments, **named)

        return run

    calls: dict[str, PartCall] = {}
    with in_place_of(parts, [watch(part) for part in parts]):
        yield calls
    calls |= {name: call for name, call in seen.items() if call is not None}


def structure(part: ModulePart) -> tuple[object, ...]:
    """Equal for parts that are the same computation of their inputs: modules of the same classes with the same
    attributes, but for their tensors and the numbers of their slots."""
    ordinary = vars(nn.Module())
    parts: list[object] = [part.method]
    for path, module in part.module.named_modules():
        own = {name: _comparable(x) for name, x in vars(module).items() if name not in ordinary}
        if isinstance(slot := own.get("slot"), int):
            own["slot"] = part.slots.index(slot)
        parts.append((path, type(module), tuple(sorted(own.items(), key=lambda item: item[0]))))
    return tuple(parts)


def _comparable(x: Any) -> object:
    """`x` itself where equal ones are the same, else which object it is."""
    if isinstance(x, (tuple, list)):
        return (type(x), *map(_comparable, x))
    return x if isinstance(x, (int, float, str, bytes, torch.dtype, type(None))) else ("object", id(x))
