"""Sizes of the example input of a trace: batch and length that no dimension of the model equals."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from rewriter.common.errors import RewriterError

# Primes, which sizes of models rarely are. 3 comes late: models that rotate by time, height and width have 3 positions.
_BATCHES = (5, 7, 11, 13, 17, 19, 3)
_LENGTHS = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73)


@dataclass(frozen=True)
class Example:
    """`batch` rows of `length` tokens. A dimension of one of these sizes, or of their product, is taken as dynamic."""

    batch: int = _BATCHES[0]
    length: int = _LENGTHS[0]

    @property
    def symbols(self) -> dict[int, str]:
        return {self.batch: "B", self.length: "S", self.batch * self.length: "N"}

    def symbolic(self, shape: Iterable[int]) -> tuple[int | str, ...]:
        """A shape with "B", "S" and "N" (batch · tokens) for the sizes that are the example's."""
        symbols = self.symbols
        return tuple(symbols.get(int(d), int(d)) for d in shape)

    def dynamic(self, tensor: torch.Tensor) -> dict[int, Any]:
        """The dynamic dimensions of an input, as `torch.export` takes them."""
        return {d: torch.export.Dim.DYNAMIC for d, n in enumerate(tensor.shape) if n in self.symbols}


def example_for(model: nn.Module, config: PreTrainedConfig) -> Example:
    """The first example none of whose sizes is a dimension of a tensor of `model` or a number in its config.

    Raises RewriterError when the model leaves none of them free.
    """
    taken = {int(d) for _, t in (*model.named_parameters(), *model.named_buffers()) for d in t.shape}
    taken |= {n for n in tree_leaves(config.to_dict()) if isinstance(n, int)}
    for batch, length in itertools.product(_BATCHES, _LENGTHS):
        example = Example(batch, length)
        if not taken & set(example.symbols):
            return example
    raise RewriterError(
        "the model has dimensions of all the sizes that tracing can give its example: one of "
        f"{', '.join(map(str, _BATCHES))} and one of {', '.join(map(str, _LENGTHS))} has to be free"
    )
