"""Weights that are read when a module asks for them and given up afterwards, so that a model of any size can be run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

KEPT = 1 << 28  # bytes of weights that stay in memory for the next access


def stream_parameters(model: nn.Module, read: Callable[[str], Tensor]) -> None:
    """Let every parameter of `model`, which is on the meta device, be what `read(name)` gives, at every access.

    `read` takes the first of a parameter's names. Nothing of the model's own code changes: `self.weight` is an entry of
    a module's `_parameters`, which is replaced by a table that reads. At most `KEPT` bytes, or one tensor, are kept.
    """
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    kept = _ReadParameters(read)
    for module in model.modules():
        module._parameters = _Streamed(module._parameters, first, kept)


class _ReadParameters:
    def __init__(self, read: Callable[[str], Tensor]) -> None:
        self.read, self.tensors = read, OrderedDict[str, Any]()

    def __call__(self, name: str) -> Tensor:
        if name not in self.tensors:
            self.tensors[name] = self.read(name)
        self.tensors.move_to_end(name)
        while len(self.tensors) > 1 and sum(t.nbytes for t in self.tensors.values()) > KEPT:
            self.tensors.popitem(last=False)
        tensor: Tensor = self.tensors[name]
        return tensor


class _Streamed(dict[str, Any]):
    """A module's `_parameters`. An entry by its name is read; iteration gives one number, expanded to the shape."""

    def __init__(self, parameters: dict[str, Any], first: dict[int, str], kept: _ReadParameters) -> None:
        from torch import nn, zeros

        super().__init__(
            {
                name: p if p is None else nn.Parameter(zeros((), dtype=p.dtype).expand(p.shape), requires_grad=False)
                for name, p in parameters.items()
            }
        )
        self.names = {name: first[id(p)] for name, p in parameters.items() if p is not None}
        self.kept = kept

    def __getitem__(self, name: str) -> Any:
        return self.kept(self.names[name]) if name in self.names else super().__getitem__(name)
