"""An all-reduce between its start and its wait, exact or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rewriter.runtime.collective_log import annotated, observe
from rewriter.runtime.exchange import Transfer
from rewriter.runtime.process_groups import RankSet
from rewriter.runtime.pytree_node import register_node
from rewriter.runtime.with_gradient import identity, with_gradient


@dataclass(eq=False)
class Pending:
    """An all-reduce on its way. `value` is readable only through `all_reduce_wait`.

    A pytree node whose only leaf is the tensor, and a dataclass: hooks on a module's inputs and outputs (checkpointing;
    FSDP2, which looks into dataclasses since torch 2.13) see the tensor and keep the handle.
    """

    value: Tensor
    work: Any = None  # None once it has been waited for, or when there is nothing to wait for
    name: str = ""
    group: RankSet | None = None


register_node(Pending, ("value",), ("work", "name", "group"))


def all_reduce_wait(pending: Pending | Tensor) -> Tensor:
    """The sum that `all_reduce_start` or `quantized_all_reduce_start` began; gradient: identity. Waiting twice is
    allowed; a plain tensor is returned as it is.

    On CUDA the current stream waits, not the host.
    """
    if isinstance(pending, Tensor):
        return pending
    if pending.work is not None:
        with annotated("all_reduce_wait", pending.name):
            observe("wait", pending.name, pending.value, pending.group)
            arrived = pending.work.wait()
        if isinstance(pending.work, Transfer):  # others sum in the memory of `value`
            pending.value = with_gradient(pending.value, lambda _: identity(arrived))
        pending.work = None
    return pending.value
