"""ZeRO stages 1 and 2 on plain modules: every rank holds all parameters, and steps an equal part of them.

Optimizer state and fp32 master weights take 1 / ranks of what they take on one device; stage 2 also keeps no gradients
but those of the own part. A step costs one all-reduce for each bucket of gradients and one all-gather for each dtype of
parameters (DeepSpeed's communication post, sections 2 and 3). Stage 3, which shards the parameters too, is FSDP2:
`rewriter.training.shard_parameters`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from rewriter.common.errors import RewriterError
from rewriter.runtime.collectives.process_groups import group_rank, group_size
from rewriter.runtime.context import checksum
from rewriter.training.zero.buckets import BUCKET_BYTES, Reducer
from rewriter.training.zero.flat import FlatParameters
from rewriter.training.zero.master_weights import (
    MakeOptimizer,
    MasterWeightOptimizer,
    Parameters,
    groups_of_masters,
    groups_of_parameters,
    refuse_differing,
)

_OWNED = "_rewriter_zero_optimizer"  # set on a parameter whose gradients one takes


def zero_optimizer(
    model: nn.Module,
    optimizer: MakeOptimizer,
    group: ProcessGroup | None,
    *,
    stage: int,
    params: Parameters | None = None,
    divide: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> ZeroOptimizer:
    """Train `model`, which every rank of `group` holds whole, with 1 / ranks of the optimizer's state on each.

        optimizer = zero_optimizer(model, lambda groups: torch.optim.AdamW(groups, lr=1e-4), group, stage=2)
        for batch in batches:  # other rows on every rank
            model(batch).loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    group: the ranks that hold the same parameters and see other rows or tokens (of a mesh with tensor parallelism, not
    the world); None for one rank. optimizer: called with groups of parameters, as torch.optim's classes take them; it
    gets fp32 master weights, one-dimensional pieces that together hold each element on one rank, so its update must be
    elementwise (SGD, Adam, AdamW, Lion; not Muon, Shampoo or Adafactor). params: parameters of the model, or groups of
    them with their options; default all that require a gradient. divide: what the sum of gradients over `group`
    is divided by, default its size, for ranks whose loss is the mean over their own rows. bucket_bytes: of gradients
    that are reduced together, in fp32 for parameters of any dtype.

    In place: parameters become views of one flat tensor for each dtype, so the model must be on its device and in its
    dtype; 16-bit ones get fp32 master weights. Gradients are summed while backward runs, and leave the parameters'
    `.grad` None: those of the own part are in the master weights' `.grad`, averaged, where several backward passes add
    up. Stage 1 keeps fp32 gradients of the whole model, so that `no_sync` can put the sum off to the last of several
    passes; stage 2 frees them bucket by bucket, and sums in every pass. A parameter that takes no part in any rank's
    backward pass is not stepped. All ranks call backward equally often, each with some parameter taking part, and
    `step`.

    Raises RewriterError where nothing is trained, a parameter is not the model's, comes twice or belongs to FSDP2,
    or ranks hold different parameters.
    """
    if stage not in (1, 2):
        raise RewriterError(
            f"zero_optimizer: stage {stage}, expected 1 or 2. Stage 3 is rewriter.training.shard_parameters"
        )
    if bucket_bytes <= 0:
        raise RewriterError(f"zero_optimizer: bucket_bytes {bucket_bytes}, expected more than 0")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise RewriterError("zero_optimizer: the model is sharded by FSDP2, which is stage 3. Use a plain optimizer")
    divide = float(group_size(group)) if divide is None else divide
    return ZeroOptimizer(model, optimizer, group, stage, params, bucket_bytes, divide)


class ZeroOptimizer(MasterWeightOptimizer):
    """The optimizer of `zero_optimizer`, of this rank's master weights.

    Schedulers take it; `param_groups` and `state` are those of the optimizer inside. `model.zero_grad()` does what the
    optimizer's does. Loading weights into the model renews the master weights.
    """

    name = "zero_optimizer"
    place_words = "rank and ranks"

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        group: ProcessGroup | None,
        stage: int,
        params: Parameters | None,
        bucket_bytes: int,
        divide: float,
    ) -> None:
        self.group, self.stage = group, stage
        groups = groups_of_parameters(
            self.name, model, params, lambda p: {"belongs to another zero_optimizer": getattr(p, _OWNED, False)}
        )
        wanted = {parameter for each in groups for parameter in each["params"] if parameter.numel()}
        # in the model's order, which is about that of its computation
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter in wanted]
        self._flats = [FlatParameters(each, group) for each in _by_kind(named)]
        places = {held.parameter: (flat, held) for flat in self._flats for held in flat.parameters}
        self._places = [places[parameter] for _, parameter in named]
        self._check_replicas()
        held = [held for _, held in self._places]
        for each in held:
            setattr(each.parameter, _OWNED, True)
        self.reducer = Reducer(held, group, bucket_bytes, divide, keep=stage == 1)
        masters = {each.parameter: [each.master] for each in held if each.master is not None}
        super().__init__(optimizer(groups_of_masters(groups, lambda parameter: masters.get(parameter, []))))
        self.follow(model, [each.parameter for each in held], self._loaded)

    def _check_replicas(self) -> None:
        """A sum of gradients of different parameters, or of different values, would be nobody's."""
        if self.group is None or self.group.size() == 1:
            return
        held = [held for _, held in self._places]
        layout = zlib.crc32(repr([(h.name, h.parameter.shape, h.parameter.dtype) for h in held]).encode())
        refuse_differing(
            torch.tensor([layout], device=held[0].parameter.device), ["layout"], self.rank_groups(),
            "zero_optimizer: ranks train parameters of different names, shapes or dtypes. Build the same model on "
            "all ranks of the group, and freeze the same parameters",
        )  # fmt: skip
        refuse_differing(
            torch.stack([checksum(h.parameter.detach()) for h in held]), [h.name for h in held], self.rank_groups(),
            "zero_optimizer: ranks hold different weights in {names} ({count} parameters). Load the same checkpoint on "
            "all ranks, or seed them alike",
        )  # fmt: skip

    def _loaded(self, index: int) -> None:
        flat, held = self._places[index]
        with torch.no_grad():
            flat.read_master(held)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave gradients where they are; the first one outside sums them all, or `step`.

        Stage 2 has no memory for them, and sums them nevertheless: gradients are equal, messages are not fewer.
        """
        before, self.reducer.sync = self.reducer.sync, False
        try:
            yield
        finally:
            self.reducer.sync = before

    def complete(self) -> None:
        self.reducer.finish()

    def before_step(self) -> None:
        """Complete the gradients, and refuse parameters that are no views of the flat tensors any more."""
        self.complete()
        for flat in self._flats:
            flat.check()

    def after_step(self) -> None:
        """Give all ranks all parameters, in one all-gather for each dtype."""
        for flat in self._flats:
            flat.publish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.reducer.clear()
        self.inner.zero_grad(set_to_none)

    def owned(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(held.parameter, held.master) for _, held in self._places if held.master is not None]

    def rank_groups(self) -> list[ProcessGroup]:
        return [] if self.group is None else [self.group]

    def master_weights(self) -> list[Tensor]:
        """Those of 16-bit parameters: others are their own master weights."""
        return [flat.master_S for flat in self._flats if flat.separate]

    def place(self) -> list[int]:
        return [group_rank(self.group), group_size(self.group)]

    def state_dict(self) -> dict[str, Any]:
        """As `MasterWeightOptimizer.state_dict`; either stage loads that of the other."""
        return {**super().state_dict(), "layout": self._layout()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises RewriterError for that of another rank, of another number of ranks or of other parameters."""
        if state_dict.get("place") == self.place() and state_dict["layout"] != self._layout():
            before, now = set(state_dict["layout"]), set(self._layout())
            raise RewriterError(
                "zero_optimizer: state of other parameters, or in another order: "
                f"{sorted(before ^ now)[:3] or 'order'} differ. Train those that were trained when it was saved"
            )
        super().load_state_dict(state_dict)

    def _layout(self) -> list[tuple[str, int, str]]:
        return [(h.name, h.parameter.numel(), str(h.parameter.dtype)) for _, h in self._places]


def _by_kind(named: list[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """Those of one dtype and device together."""
    kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    return list(kinds.values())
