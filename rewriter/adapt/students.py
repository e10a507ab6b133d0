"""The models of a run behind one interface: Hugging Face's, on data-parallel ranks, and the sharded runtime module."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from rewriter.runtime.context import Context
from rewriter.runtime.module import LocalLogits, RuntimeModel

Batch = Mapping[str, Tensor]
"""input_ids, labels, position_ids, segment_ids: int64 [B, S]."""


class Head(Protocol):
    """Logits [1, N, V] of states [1, N, D]. `weights`: the parameters to train that it uses."""

    weights: list[nn.Parameter]
    vocabulary: int

    def __call__(self, states: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Computed:
    """What a model makes of the n tokens of each row that this rank holds. `indices`: their places in the row.
    `states` [B, n, D] are the last ones, of which `head` makes logits, as many at a time as there is memory for;
    without a head, they are the logits [B, n, V]."""

    states: Tensor
    indices: Tensor
    head: Head | None = None

    def width(self) -> int:
        """How many logits a token has."""
        return self.head.vocabulary if self.head is not None else self.states.shape[-1]

    def head_weights(self) -> list[nn.Parameter]:
        """The parameters to train that make the logits of the states."""
        return [] if self.head is None else self.head.weights

    def logits_of(self, states_ND: Tensor) -> Tensor:
        """Logits [N, V] of some of the states."""
        return states_ND if self.head is None else self.head(states_ND[None])[0]


class Model(Protocol):
    """`module` has the parameters; `group` are the ranks whose sums make up a whole batch (None: this one alone)."""

    module: nn.Module
    group: ProcessGroup | None

    def __call__(self, batch: Batch, module: nn.Module | None = None) -> Computed:
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
        self._apart: bool | None = None  # whether the head can be computed apart from the body; asked once

    def __call__(self, batch: Batch, module: nn.Module | None = None) -> Computed:
        ids = batch["input_ids"]
        given = {"input_ids": ids, "use_cache": False}
        # without a mask, transformers tells packed sequences by positions that begin anew
        given |= {"position_ids": batch["position_ids"]} if self._takes_positions else {}
        indices = torch.arange(ids.shape[1], device=ids.device)
        if self._apart is None:
            self._apart = head_is_apart(self.module)
        if not self._apart:
            return Computed((module or self.module)(**given).logits, indices)
        base = base_of(self.module)
        output = base.base_model(**given)
        return Computed(output.last_hidden_state, indices, Rest(base, output))


class Rest:
    """What a causal LM of transformers computes after its body: its own forward, with the body's output given."""

    def __init__(self, model: Any, output: Any) -> None:
        self.model, self.output = model, {name: value for name, value in output.items() if name in _KEPT}
        self.kind = type(output)
        embeddings = model.get_output_embeddings()
        self.vocabulary = int(embeddings.weight.shape[0])
        inside = {id(p) for p in model.base_model.parameters()} - {id(p) for p in embeddings.parameters()}
        self.weights = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]

    def __call__(self, states_1ND: Tensor) -> Tensor:
        name, body = self.model.base_model_prefix, self.model.base_model
        ids = torch.zeros(states_1ND.shape[:2], dtype=torch.int64, device=states_1ND.device)
        self.model._modules[name] = _Given(self.kind(**self.output | {"last_hidden_state": states_1ND}))
        try:
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        finally:
            self.model._modules[name] = body
        return logits


_KEPT = ("router_logits",)  # what else a forward may ask of the body's output


class _Given(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


@torch.no_grad()
def head_is_apart(module: nn.Module) -> bool:
    """Whether the logits of `module` are what its forward makes of its body's output, token by token: it is tried on
    a few tokens. Not where FSDP2 gathers weights for a whole forward."""
    base = base_of(module)
    if isinstance(module, FSDPModule) or base.base_model is base or base.base_model_prefix not in base._modules:
        return False
    training = module.training
    module.eval()
    try:
        weight = base.get_input_embeddings().weight
        ids = torch.arange(4, device=weight.device)[None] % len(weight)
        whole = base(input_ids=ids, use_cache=False).logits
        output = base.base_model(input_ids=ids, use_cache=False)
        apart = Rest(base, output)(output.last_hidden_state[:, 1:3])
    except (TypeError, AttributeError, ValueError, RuntimeError, IndexError):  # a forward of another form
        return False
    finally:
        module.train(training)
    return bool(torch.allclose(whole[:, 1:3], apart, rtol=1e-4, atol=1e-5))


class ShardedModel:
    """A runtime module: its ranks share heads, channels or tokens."""

    def __init__(self, module: RuntimeModel) -> None:
        self.module: nn.Module = module
        self.group = module.replicas.group

    def __call__(self, batch: Batch, module: nn.Module | None = None) -> Computed:
        context = Context(segment_ids=batch["segment_ids"])
        output = (module or self.module)(batch["input_ids"], ctx=context, gather=False)
        assert isinstance(output, LocalLogits)
        return Computed(output.logits, output.indices)
