"""Programs of the zoo's models, sharded or not, with their weights."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
import zoo

from rewriter.emit.module import emit_runtime_module
from rewriter.ir import Program
from rewriter.ir.simulate import Simulator
from rewriter.passes import available
from rewriter.tracing import trace

Step = tuple[str, dict[str, Any]]
"""A pass and its options."""

PASSES = available()
MERGE: Step = ("merge_reductions", {})
OVERLAP: Step = ("overlap", {})


@functools.cache
def traced(name: str) -> Program:
    """The program of a zoo family, from its config alone."""
    return trace(zoo.config(name))


def applied(program: Program, *steps: Step) -> Program:
    """`program` after these passes, each with its options."""
    for name, options in steps:
        program = PASSES[name](**options).apply(program)
    return program


def tensor_parallel(program: Program, ranks: int, *steps: Step) -> Program:
    """`program` over `ranks` ranks, after further passes."""
    return applied(program.with_(mesh={"tp": ranks} if ranks > 1 else {}), ("tensor_parallel", {}), *steps)


def program(name: str, layers: Collection[int] = (), tp: int = 1, overlap: bool = True) -> Program:
    """Family `name` with `layers` made a ladder, over `tp` ranks."""
    ladder = [("ladder", {"layers": sorted(layers)})] if layers else []
    return tensor_parallel(traced(name), tp, MERGE, *ladder, *[OVERLAP] * overlap)


def runtime_case(sharded: Program, full: dict[str, torch.Tensor]) -> tuple[str, list[dict[str, torch.Tensor]], Any]:
    """Source, tensors of each rank, and ties of its runtime module."""
    return emit_runtime_module(sharded), shards(sharded, full), dict(sharded.ties)


def weights(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Full tensors by runtime name, of the model that `zoo.shared` gives."""
    return {n: p.detach() for n, p in zoo.shared(name, seed).named_parameters()}


def shards(sharded: Program, full: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Per rank, the tensors that its runtime module holds."""
    simulator = Simulator(sharded, full)
    values = {name: simulator.parameter(name) for name in sharded.parameters}
    return [{n: value[r].contiguous() for n, value in values.items()} for r in range(sharded.mesh.get("tp", 1))]
