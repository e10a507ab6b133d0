"""What every node of a program computes, on all ranks, while it is simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from rewriter import ops
from rewriter.analysis.sequence_layout import sequence_plan
from rewriter.common.errors import RewriterError
from rewriter.explain.bisect.values import Ranks
from rewriter.ir import Module, Program
from rewriter.sequence.token_layout import join_tokens
from rewriter.verify.simulate import RankValues, Shards, Simulator

Key = tuple[str, str]
"""(path of the body with a dot after it, empty for the wiring; name of the node in its graph)."""


@dataclass
class Record:
    """Values by node, in the order of execution. `stopped` is the node that could not be computed, and why.

    `shards` are the wiring's values as the simulation holds them; `modules` those of every called module, by path.
    """

    nodes: dict[Key, fx.Node] = field(default_factory=dict)
    values: dict[Key, Ranks] = field(default_factory=dict)
    shards: dict[fx.Node, Shards] = field(default_factory=dict)
    modules: dict[str, Ranks] = field(default_factory=dict)
    stopped: tuple[fx.Node | None, str] | None = None


class _Recorder(Simulator):
    """A simulation that keeps values: those of the wiring and of called modules, with `inside` of all nodes."""

    def __init__(
        self, program: Program, weights: Mapping[str, torch.Tensor], host: nn.Module | None, inside: bool = False
    ) -> None:
        super().__init__(program, weights, host)
        self.record, self.inside = Record(), inside
        self.plan = sequence_plan(program)

    def note(self, prefix: str, node: fx.Node, value: Shards) -> None:
        if not prefix:
            self.record.shards[node] = value
        if prefix and not self.inside and node.op != "call_module":
            return
        found = self.whole(value)
        if found is None:
            return
        key = (prefix, node.name)
        self.record.nodes[key], self.record.values[key] = node, found
        if node.op == "call_module":
            self.record.modules[prefix + str(node.target)] = found

    def whole(self, value: Shards) -> Ranks | None:
        """A value of all tokens, by rank of "tp"; None where it is no tensor, or how it is sharded is not known."""
        by_rank = [[_first(v) for v in ranks.values] for ranks in value]
        if any(v is None for values in by_rank for v in values):
            return None
        if len(by_rank) == 1:
            return tuple(by_rank[0])  # type: ignore[arg-type]
        dim = {3: 1, 4: 2}.get(by_rank[0][0].ndim)  # type: ignore[union-attr]
        if dim is None or self.plan is None:
            return None
        count, plan = max(map(len, by_rank)), self.plan
        parts = [[values[r if len(values) > 1 else 0] for values in by_rank] for r in range(count)]
        try:
            return tuple(join_tokens(p, dim, plan.layout, self.length) for p in parts)  # type: ignore[arg-type]
        except (IndexError, RuntimeError):
            return None


def _first(value: Any) -> torch.Tensor | None:
    """The tensor, or the first of several that a module returns."""
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


@torch.no_grad()
def record(
    program: Program,
    ids: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    host: nn.Module | None = None,
    inside: bool = False,
) -> Record:
    """What the wiring of `program` and the modules it calls compute for `ids` [B, S] (int64), with `inside` all nodes.

    A node that cannot be computed ends the record; it is named in `stopped`.
    """
    simulator = _Recorder(program, weights, host, inside)
    _guarded(simulator, lambda: simulator.run(ids))
    return simulator.record


@torch.no_grad()
def record_module(
    program: Program,
    module: Module,
    path: str,
    inputs: list[Shards],
    ids: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    host: nn.Module | None = None,
) -> tuple[Ranks | None, Record]:
    """(what `module` at `path` of `program` returns for `inputs`, the values of all nodes inside)."""
    simulator = _Recorder(program, weights, host, inside=True)
    simulator.device, simulator.length = ids.device, ids.shape[1]
    if simulator.host is not None:
        simulator.host.run(ids, None)
    result: list[Ranks | None] = [None]

    def run() -> None:
        result[0] = simulator.whole(simulator._module(module, path, inputs))

    _guarded(simulator, run)
    return result[0], simulator.record


def _guarded(simulator: _Recorder, run: Callable[[], Any]) -> None:
    """Run a simulation; what stops it becomes part of the record."""
    try:
        run()
    except (RewriterError, RuntimeError, IndexError, KeyError, TypeError, ValueError) as error:
        graph, shards = simulator.program.graph, simulator.record.shards
        waiting = (n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output") and n not in shards)
        simulator.record.stopped = (next(waiting, None), " ".join(str(error).split()))


def attention_inputs(value: Any) -> RankValues:
    """A context of no cache, as every rank gets it."""
    return RankValues((value,))


def is_collective(node: fx.Node) -> bool:
    """Whether ranks exchange something at a node."""
    return node.target in (ops.all_reduce, ops.all_reduce_start, ops.all_reduce_wait, ops.all_gather)
