"""Programs of the zoo's models, sharded or not, with their weights."""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch
import zoo

from rewriter.ir import Program
from rewriter.passes import available
from rewriter.tracing import trace
from rewriter.verify.simulate import Simulator

_passes = available()


@functools.cache
def traced(name: str) -> Program:
    """The program of a zoo family, from its config alone."""
    return trace(zoo.config(name))


def program(name: str, layers: Collection[int] = (), tp: int = 1, overlap: bool = True) -> Program:
    """Family `name` with `layers` made a ladder, over `tp` ranks."""
    result = traced(name).with_(mesh={"tp": tp} if tp > 1 else {})
    result = _passes["merge_reductions"]().apply(_passes["tensor_parallel"]().apply(result))
    if layers:
        result = _passes["ladder"](sorted(layers)).apply(result)
    return _passes["overlap"]().apply(result) if overlap else result


def weights(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Full tensors by runtime name, of the model that `zoo.shared` gives."""
    return {n: p.detach() for n, p in zoo.shared(name, seed).named_parameters()}


def shards(sharded: Program, full: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Per rank, the tensors that its runtime module holds."""
    simulator = Simulator(sharded, full)
    values = {name: simulator.parameter(name) for name in sharded.parameters}
    return [{n: value[r].contiguous() for n, value in values.items()} for r in range(sharded.mesh.get("tp", 1))]
