"""The models of a run behind one interface: Hugging Face's, on data-parallel ranks, and the sharded runtime module."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.runtime.context import Context
from rewriter.runtime.module import LocalLogits, RuntimeModel

Batch = Mapping[str, Tensor]
"""input_ids, labels, position_ids, segment_ids: int64 [B, S]."""


class Computed(NamedTuple):
    """Logits [B, n, V] of the n tokens that this rank holds, their places in the row, and hidden states [B, n, D]."""

    logits: Tensor
    indices: Tensor
    hidden: tuple[Tensor, ...] = ()


class Model(Protocol):
    """`module` has the parameters; `group` are the ranks whose sums make up a whole batch (None: this one alone)."""

    module: nn.Module
    group: ProcessGroup | None

    def __call__(self, batch: Batch, hidden: bool = False, module: nn.Module | None = None) -> Computed:
        """Compute a batch, with `module` in place of `self.module` where a trainer has wrapped that."""
        ...


def base_of(module: nn.Module) -> Any:
    """The model of transformers below adapters; `module` itself where there are none."""
    return cast(Any, module).get_base_model() if hasattr(module, "peft_config") else module


class HuggingFaceModel:
    """A causal LM of transformers, whole on each rank or sharded by FSDP2."""

    def __init__(self, module: nn.Module, group: ProcessGroup | None) -> None:
        self.module, self.group = module, group
        self._takes_positions = "position_ids" in inspect.signature(type(base_of(module)).forward).parameters

    def __call__(self, batch: Batch, hidden: bool = False, module: nn.Module | None = None) -> Computed:
        ids = batch["input_ids"]
        positions = {"position_ids": batch["position_ids"]} if self._takes_positions else {}
        # without a mask, transformers tells packed sequences by positions that begin anew
        output = (module or self.module)(input_ids=ids, use_cache=False, output_hidden_states=hidden, **positions)
        states = tuple(output.hidden_states[1:]) if hidden else ()
        return Computed(output.logits, torch.arange(ids.shape[1], device=ids.device), states)


class ShardedModel:
    """A runtime module: its ranks share heads, channels or tokens."""

    def __init__(self, module: RuntimeModel) -> None:
        self.module: nn.Module = module
        self.group = module.replicas.group

    def __call__(self, batch: Batch, hidden: bool = False, module: nn.Module | None = None) -> Computed:
        context = Context(segment_ids=batch["segment_ids"])
        output = (module or self.module)(batch["input_ids"], ctx=context, gather=False)
        assert isinstance(output, LocalLogits)
        return Computed(output.logits, output.indices)
