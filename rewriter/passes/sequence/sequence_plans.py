"""Plans for attention over sequence-sharded tokens: all that can run, ranked, with bytes, memory and time; and the plan
of a program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.fabric import Fabric, Link, load_fabric
from rewriter.ir import Program, args_of, nodes_inside, ops
from rewriter.ir.absolute_positions import most_tokens
from rewriter.ir.communication import model_dtype_bytes
from rewriter.ir.marks import marks
from rewriter.ir.ops import SequenceKind, SequencePlan
from rewriter.ir.sequence_plan import KINDS, Grid
from rewriter.passes.sequence.distributed_attention import (
    ALGORITHMS,
    AttentionShape,
    Axis,
    WireBytes,
    impossible,
    messages,
    slowest,
    wire_bytes,
)
from rewriter.passes.sequence.sequence_costs import AttentionSeconds, channels, lower_bound, memory, seconds

Shapes = AttentionShape | Sequence[AttentionShape]

# Predicted times that differ by less cannot be distinguished; of such plans the one that sends least is better.
MARGIN = 0.05
TOKENS = 131_072  # for a caller who knows no length: the longest of the paper's evaluation


@dataclass(frozen=True)
class Setting:
    """The setting that plans are compared in.

    `links` gives axes of the grid their own link instead of the fabric's. `tensor_parallel` ranks stand next to
    each other in the fabric. Plans that hold more than `memory_limit` bytes for attention come last.
    `quantized` and `min_bytes` are those of every plan.
    """

    tokens: int = TOKENS
    fabric: Fabric = field(default_factory=lambda: load_fabric("h100-nvlink"))
    links: Mapping[Axis, Link] | None = None
    tensor_parallel: int = 1
    memory_limit: int | None = None
    quantized: str | None = None
    min_bytes: int = 0


@dataclass(frozen=True)
class PlanCost:
    """A plan with what it costs, all layers together, on the rank that sends most.

    wire: bytes received, and as many sent. saved, live: bytes of memory that attention keeps for backward, and that it
    needs besides at the peak of one layer. times: seconds. bound: the least bytes of any algorithm. fits: whether its
    memory is within the limit.
    """

    plan: SequencePlan
    wire: WireBytes
    saved: int
    live: int
    times: AttentionSeconds
    bound: WireBytes
    fits: bool

    @property
    def memory(self) -> int:
        return self.saved + self.live

    @property
    def distance(self) -> float:
        """Bytes the plan sends, in multiples of the least possible; 1 where there is nothing to send."""
        if not self.wire.total:
            return 1.0
        return self.wire.total / self.bound.total if self.bound.total else math.inf


@dataclass(frozen=True)
class Ranking:
    """`costs`: all plans that can run, best first. `refused`: reasons why grids cannot."""

    costs: tuple[PlanCost, ...]
    refused: Mapping[str, tuple[Grid, ...]]

    @property
    def best(self) -> PlanCost:
        return self.costs[0]


def plans(shape: Shapes, ranks: int, setting: Setting | None = None) -> Ranking:
    """Every plan for `ranks` ranks, ranked. `shape` is that of every layer, or of groups of layers, which share a plan.

    First stand those whose time is within `MARGIN` of the best, least bytes first, then the others by time; then those
    that hold too much memory, least memory first. There is always one: a ring fits every shape.
    """
    setting = setting or Setting()
    costs: list[PlanCost] = []
    refused: dict[str, list[Grid]] = {}
    for candidate in candidates(ranks):
        plan = replace(candidate, quantized=setting.quantized, min_bytes=setting.min_bytes)
        reason = why_not(plan, shape)
        if reason is None:
            costs.append(cost(plan, shape, setting))
        elif plan.grid not in refused.setdefault(reason, []):
            refused[reason].append(plan.grid)
    return Ranking(tuple(ranked(costs)), {reason: tuple(grids) for reason, grids in refused.items()})


def choose(shape: Shapes, ranks: int, *, setting: Setting | None = None, **fixed: Any) -> SequencePlan:
    """The best plan that is `allowed` by the `fixed` options."""
    able = allowed(shape, ranks, **fixed)
    return ranked([cost(plan, shape, setting) for plan in able])[0].plan


def allowed(
    shape: Shapes,
    ranks: int,
    *,
    kind: SequenceKind | Literal["auto"] = "auto",
    grid: Sequence[int] | Literal["auto"] = "auto",
    overlap: bool | Literal["auto"] = "auto",
) -> list[SequencePlan]:
    """The plans for `ranks` ranks that the fixed options allow and that can run: at least one.

    Kind attention2d without a grid is one with r · c > 1: exchanging all heads is Ulysses. Raises RewriterError, with
    the reason and the nearest grids that can run, if there is none.
    """
    if ranks < 1:
        raise RewriterError(f"--sp {ranks}: expected 1 or more ranks")
    wanted = None if isinstance(grid, str) else _grid(grid, ranks, shape)
    asked = {name: None if kind == "auto" else wanted for name in ALGORITHMS if kind in ("auto", name)}
    pool = (plan for name, grid in asked.items() for plan in ALGORITHMS[name].plans(ranks, grid))
    fixed = [p for p in pool if wanted in (None, p.grid)]
    if not fixed:
        only = list(KINDS[next(iter(asked))].grid(ranks) or ())
        raise RewriterError(
            f"sequence_parallel: grid {list(wanted or only)} is no {kind}. On {ranks} ranks its grid is {only}"
        )
    fitting = [p for p in fixed if overlap in ("auto", p.overlap)]
    if not fitting:
        what = ALGORITHMS[fixed[0].kind].why_not_overlap(fixed[0])
        raise RewriterError(f"sequence_parallel: overlap {str(overlap).lower()}: {what}. Leave overlap: auto")
    reasons = {plan: why_not(plan, shape) for plan in fitting}
    able = [plan for plan, reason in reasons.items() if reason is None]
    if not able:
        plan = fitting[0]
        raise RewriterError(f"sequence_parallel: {plan}: {reasons[plan]}. {_nearest(plan.grid, ranks, shape)}")
    return able


def candidates(ranks: int) -> Iterator[SequencePlan]:
    """Every plan for `ranks` ranks, whether or not heads divide."""
    for algorithm in ALGORITHMS.values():
        yield from algorithm.plans(ranks)


def why_not(plan: SequencePlan, shape: Shapes) -> str | None:
    """Reason why attention of these layers cannot run so; None if it can."""
    return next((reason for one in _several(shape) if (reason := impossible(plan, one)) is not None), None)


def cost(plan: SequencePlan, shape: Shapes, setting: Setting | None = None) -> PlanCost:
    """Cost of one plan. Raises RewriterError if it is impossible."""
    setting = setting or Setting()
    through = channels(plan, setting.fabric, setting.links, setting.tensor_parallel)
    rank, tokens, device = slowest(plan), setting.tokens, setting.fabric.device
    shapes = _several(shape)

    def total(parts: Callable[[AttentionShape], tuple[float, ...]]) -> Iterator[float]:
        """The sum over all layers of each part."""
        return map(sum, zip(*([one.layers * part for part in parts(one)] for one in shapes), strict=True))

    wire = WireBytes(*total(lambda one: astuple(wire_bytes(plan, one, tokens, rank))))
    bound = WireBytes(*total(lambda one: astuple(lower_bound(one, tokens, plan.ranks))))
    times = AttentionSeconds(*total(lambda one: astuple(seconds(plan, one, tokens, device, through))))
    held = [(one.layers, memory(plan, one, tokens)) for one in shapes]
    saved = sum(layers * m.saved for layers, m in held)
    live = max(max(m.forward, m.backward) for _, m in held)
    fits = setting.memory_limit is None or saved + live <= setting.memory_limit
    return PlanCost(plan, wire, saved, live, times, bound, fits)


def ranked(costs: Sequence[PlanCost]) -> list[PlanCost]:
    """`costs`, best first, as `plans` says."""

    def bytes_first(c: PlanCost) -> tuple[float, ...]:
        return (c.wire.total, c.times.total, c.plan.overlap, c.memory)

    def time_first(c: PlanCost) -> tuple[float, ...]:
        return (c.times.total, *bytes_first(c))

    fitting = [c for c in costs if c.fits]
    limit = min((c.times.total for c in fitting), default=0.0) * (1 + MARGIN)
    return [
        *sorted((c for c in fitting if c.times.total <= limit), key=bytes_first),
        *sorted((c for c in fitting if c.times.total > limit), key=time_first),
        *sorted((c for c in costs if not c.fits), key=lambda c: (c.memory, *time_first(c))),
    ]


def _several(shape: Shapes) -> Sequence[AttentionShape]:
    return (shape,) if isinstance(shape, AttentionShape) else shape


def _grid(grid: Sequence[int], ranks: int, shape: Shapes) -> Grid:
    sizes = tuple(grid)
    if len(sizes) != 3 or min(sizes) < 1:
        raise RewriterError(f"sequence_parallel: grid {list(grid)}: expected [heads, rows, columns], each 1 or more")
    if math.prod(sizes) != ranks:
        raise RewriterError(
            f"sequence_parallel: grid {list(grid)} is of {math.prod(sizes)} ranks, but --sp is {ranks}. "
            f"{_nearest(sizes, ranks, shape)}"
        )
    return sizes


def _nearest(grid: Sequence[int], ranks: int, shape: Shapes) -> str:
    """The three grids of `ranks` ranks most like `grid` that attention of this shape can run on."""
    able = {p.grid for p in candidates(ranks) if why_not(p, shape) is None}

    def distance(other: Grid) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(other, grid, strict=True))

    near = sorted(able, key=lambda other: (distance(other), other))[:3]
    return f"Nearest grids that can: {', '.join(str(list(g)) for g in near)}"


AXIS = "sp"


def sequence_plan(program: Program) -> ops.SequencePlan | None:
    """The plan that the program's tokens are sharded by, one per model; None where every rank has all tokens."""
    for node in program.graph.nodes:
        if node.target is ops.shard_tokens:
            plan: ops.SequencePlan = args_of(node)[2]
            return plan
    return None


def attentions(program: Program) -> Iterator[tuple[str, fx.Node]]:
    """(path of the called body, node) of every attention of a forward pass; a body called twice counts twice."""
    for node in program.graph.nodes:
        if node.op == "call_module":
            nodes = nodes_inside(program.modules[str(node.target)], str(node.target))
            yield from ((path, inner) for path, inner in nodes if inner.target is ops.attention)


def attention_shapes(program: Program, storing: bool = False) -> tuple[AttentionShape, ...]:
    """The kinds of attention of a program, as one tensor-parallel rank computes them, with the number of each; with
    `storing` only those that keep keys and values, not layers that read another one's.

    Heads are a rank's own whether `tensor_parallel` was applied already or not. What that pass leaves replicated has
    all heads, which is known only after it.
    """
    ranks = program.mesh.get("tp", 1)
    split = any(entry.rewrite.makes_partials for entry in program.history)
    size = model_dtype_bytes(program)
    counts: Counter[AttentionShape] = Counter()
    for _, node in attentions(program):
        if storing and node.kwargs.get("stored"):
            continue
        q, k, v = (operand.meta["val"].shape for operand in args_of(node)[:3])
        mask: ops.MaskSpec = node.kwargs["mask"]  # type: ignore[assignment]
        q_heads, kv_heads = int(q[1]), int(k[1])
        if split:
            q_heads = marks(node).local_q_heads or q_heads
            kv_heads = marks(node).local_kv_heads or kv_heads
        elif q_heads % ranks == 0:
            q_heads, kv_heads = local_heads(q_heads, kv_heads, ranks)
        shape = AttentionShape(
            q_heads, kv_heads, int(q[3]), int(v[3]), 1, 1, size, causal=mask.causal, window=mask.reach
        )
        counts[shape] += 1
    return tuple(replace(shape, layers=layers) for shape, layers in counts.items())


def planning(program: Program, tokens: int | None = None) -> Setting:
    """Setting that a program's plans are compared in: one fabric, within its device's memory.

    Without `tokens`, for the positions that the model has, of which more than TOKENS are not planned for.
    """
    length = tokens or min(TOKENS, most_tokens(program))
    fabric = load_fabric("h100-nvlink")
    ranks = program.mesh.get("tp", 1)
    return Setting(length, fabric, tensor_parallel=ranks, memory_limit=fabric.device.memory)


def bytes_per_token(program: Program) -> dict[str, dict[str, int]]:
    """{"forward" | "backward": {message: bytes}}: what attention of all layers sends per token that a rank holds.

    Of a rank that sends most, in the model's dtype, and of sequences long enough for keys and values to be quantized,
    if they are. Empty where every rank has all tokens.
    """
    plan = sequence_plan(program)
    if plan is None:
        return {}
    plan = replace(plan, min_bytes=0)
    local = plan.local_tokens(plan.multiple)
    sizes_by_pass: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for shape in attention_shapes(program):
        for message in messages(plan, shape, plan.multiple, slowest(plan)):
            when = "backward" if message.backward else "forward"
            sizes_by_pass[when][message.name] += shape.layers * message.nbytes // local
    return {when: dict(sizes) for when, sizes in sizes_by_pass.items()}


def local_heads(q_heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """(query heads, key/value heads) that a rank of `ranks` holds: of the latter, those that its query heads read."""
    own, groups = q_heads // ranks, q_heads // kv_heads
    return own, max((r * own + own - 1) // groups - r * own // groups + 1 for r in range(ranks))
