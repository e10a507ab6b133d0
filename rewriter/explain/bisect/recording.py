"""Values of a computation while it runs: of a program that is simulated on all ranks, and of its eager reference."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from rewriter.check.reference_modes import ModelReference
from rewriter.check.withheld_reference import WithheldReference
from rewriter.common.errors import RewriterError
from rewriter.explain.bisect.values import LOGITS, Point, Ranks, Values, merged
from rewriter.ir import Program, args_of
from rewriter.ir.marks import marks
from rewriter.ir.sequence_plan import join_tokens
from rewriter.ir.simulate import Shards, Simulator
from rewriter.passes.sequence.sequence_plans import sequence_plan

Key = tuple[str, str]
"""(path of the body with a dot after it, empty for the wiring; name of the node in its graph)."""


@dataclass
class Record:
    """Values by node of the wiring, or of a module that was run alone, in the order of execution; those of the wiring
    also as the simulation holds them (`shards`).

    `result` is what the module returns. `stopped` is the node of the wiring that could not be computed, and why.
    """

    nodes: dict[Key, fx.Node] = field(default_factory=dict)
    values: dict[Key, Ranks] = field(default_factory=dict)
    shards: dict[fx.Node, Shards] = field(default_factory=dict)
    result: Ranks | None = None
    stopped: tuple[fx.Node | None, str] | None = None

    def points(self) -> dict[Point, Key]:
        """The nodes of the wiring that give the values at points."""
        points: dict[Point, Key] = {}
        for key, node in self.nodes.items():
            if node.op == "call_module":
                source = first_input(node)
                if ("", source.name) in self.values and source is not node:
                    points["given", str(node.target)] = "", source.name
                points["returned", str(node.target)] = key
            elif (number := marks(node).stream) is not None:
                points["stream", str(number)] = key
        if self.nodes and self.stopped is None:
            output = next(n for n in next(iter(self.nodes.values())).graph.nodes if n.op == "output")
            points[LOGITS] = "", args_of(output)[0].name
        return points

    def shown(self) -> Values:
        """The values at those points."""
        return {point: self.values[key] for point, key in self.points().items() if key in self.values}


def first_input(node: fx.Node) -> fx.Node:
    """The first tensor that a module is called with; the node itself where there is none."""
    return next((a for a in node.args if isinstance(a, fx.Node)), node)


class _Recorder(Simulator):
    """A simulation that keeps values: those of the wiring, with `inside` those of all nodes."""

    def __init__(
        self, program: Program, weights: Mapping[str, torch.Tensor], host: nn.Module | None, inside: bool
    ) -> None:
        super().__init__(program, weights, host)
        self.record, self.inside, self.plan = Record(), inside, sequence_plan(program)

    def note(self, prefix: str, node: fx.Node, value: Shards) -> None:
        if not prefix:
            self.record.shards[node] = value
        if (not prefix or self.inside) and (whole := self.whole(value)) is not None:
            self.record.nodes[prefix, node.name], self.record.values[prefix, node.name] = node, whole

    def whole(self, value: Shards) -> Ranks | None:
        """A value of all tokens, by rank of "tp"; None where it is no tensor, or how it is sharded is not known."""
        by_rank = [[v[0] if isinstance(v, (tuple, list)) and v else v for v in ranks.values] for ranks in value]
        if not all(isinstance(v, torch.Tensor) for values in by_rank for v in values):
            return None
        if len(by_rank) == 1:
            return tuple(by_rank[0])
        dim = {3: 1, 4: 2}.get(by_rank[0][0].ndim)
        if dim is None or self.plan is None:
            return None
        parts = [[values[r % len(values)] for values in by_rank] for r in range(max(map(len, by_rank)))]
        try:
            return tuple(join_tokens(p, dim, self.plan.layout, self.length) for p in parts)
        except (IndexError, RuntimeError):
            return None


@torch.no_grad()
def record(
    program: Program,
    ids: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    host: nn.Module | None = None,
    module: str = "",
    inputs: Sequence[Shards] = (),
) -> Record:
    """Values of the wiring of `program` and of the modules it calls for `ids` [B, S] (int64).

    With the path of a `module`: values of all nodes inside it, given `inputs`. What cannot be computed ends the record;
    it is named in `stopped`.
    """
    simulator = _Recorder(program, weights, host, inside=bool(module))
    rec = simulator.record
    try:
        if module:
            simulator.device, simulator.length = ids.device, ids.shape[1]
            if simulator.host is not None:
                simulator.host.run(ids, None)
            rec.result = simulator.whole(simulator._module(program.modules[module], module, list(inputs)))
        else:
            simulator.run(ids)
    except (RewriterError, RuntimeError, IndexError, KeyError, TypeError, ValueError) as error:
        computed = (n for n in program.graph.nodes if n.op not in ("placeholder", "get_attr", "output"))
        waiting = next((node for node in computed if node not in rec.shards), None)
        rec.stopped = (waiting, " ".join(str(error).split()))
    return rec


# --- the reference ---------------------------------------------------------------------------------------------------

ModuleCall = tuple[nn.Module, torch.Tensor | None, torch.Tensor | None]
"""(module, what it is given, what it returns)."""


def _tensor(tree: Any) -> torch.Tensor | None:
    """A copy of the first floating-point tensor among arguments or results, else of the first tensor."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    first = next((leaf for leaf in leaves if leaf.is_floating_point()), leaves[0] if leaves else None)
    return None if first is None else first.detach().clone()  # some models add in place


def _last_pass(calls: list[ModuleCall]) -> dict[Point, torch.Tensor]:
    """Values of the last call, which is that of a whole model, by the paths of its modules.

    Modules that are called several times are left out: which call is meant is not known.
    """
    root = calls[-1][0]
    begin = max((i + 1 for i, call in enumerate(calls[:-1]) if call[0] is root), default=0)
    names, count = {module: name for name, module in root.named_modules()}, [call[0] for call in calls[begin:]].count
    return {
        (side, names[module]): value
        for module, given, returned in calls[begin:-1]
        if module in names and count(module) == 1
        for side, value in (("given", given), ("returned", returned))
        if value is not None
    }


@torch.no_grad()
def expected_values(reference: ModelReference, model: PreTrainedModel, ids: torch.Tensor) -> dict[Point, Ranks]:
    """Values that `reference` makes of the eager `model` (in eval mode) for `ids` [B, S] (int64).

    The residual stream is given by number, before each block and at the end, where the reference keeps it.
    """
    calls: dict[str, list[ModuleCall]] = {}  # by the thread that makes them: one for each rank

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = module, _tensor((args, kwargs)), _tensor(output)
        calls.setdefault(threading.current_thread().name, []).append(call)

    handle = register_module_forward_hook(note, with_kwargs=True)
    try:
        logits = reference.logits(model, ids)
    finally:
        handle.remove()
    built = [one for one in reference._built.values() if not isinstance(one, WithheldReference)]
    if len(built) < len(reference._built):  # its modules compute several copies of the batch
        return {LOGITS: (logits,)}
    # ranks are the threads of the newest pool, POOL_RANK
    pools = [name.rpartition("_") for name in calls if name.startswith("ThreadPoolExecutor")]
    newest = sorted(int(rank) for pool, _, rank in pools if pool == pools[-1][0])
    threads = [f"{pools[-1][0]}_{rank}" for rank in newest] or [threading.current_thread().name]
    ranks = [_last_pass(calls[thread]) for thread in threads]
    values: dict[Point, Ranks] = {}
    for point in ranks[0]:
        each = [rank[point] for rank in ranks if point in rank]
        if len(each) == len(ranks) and all(bool(v.isfinite().all()) for v in each):  # the stream itself is NaN there
            values[point] = merged(each)
    for one in built:
        values |= {("stream", str(i)): merged(list(each)) for i, each in enumerate(one.streams)}
    return values | {LOGITS: (logits,)}
