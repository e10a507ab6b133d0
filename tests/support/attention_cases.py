"""Distributed attention against fp64 on one device: cases, their inputs, what ranks find, and how far off it is.

    for outcome in run_cases([Case(SequencePlan("ring", (1, 4, 1)), (16, 4), 281), ...]):   # one launch for each P
        outcome.errors(), outcome.limits()

The reference is a softmax over scores written out here, from the definitions of the masks alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rewriter.ir.ops import MaskSpec, SequencePlan
from rewriter.ir.sequence_plan import join_tokens, take_tokens
from rewriter.runtime import record_events, sequence_mesh
from rewriter.runtime.attention.sequence_axis import SequenceAxis
from rewriter.runtime.attention.sequence_op import sequence_attention

CAUSAL, FULL = MaskSpec("causal"), MaskSpec("bidirectional")
DIVIDES, PADDED = 288, 281  # tokens: a multiple of every plan's below, and a prime


def attention2d(*grid: int, overlap: bool = False) -> SequencePlan:
    heads, rows, columns = grid
    return SequencePlan("attention2d", (heads, rows, columns), overlap)


def ulysses(ranks: int) -> SequencePlan:
    return SequencePlan("ulysses", (ranks, 1, 1))


def ring(ranks: int) -> SequencePlan:
    return SequencePlan("ring", (1, ranks, 1))


GRIDS = {
    4: [(1, 2, 2), (1, 4, 1), (1, 1, 4)],
    6: [(1, 2, 3), (1, 3, 2)],
    8: [(2, 2, 2)],
    16: [(1, 4, 4)],
}
PLANS = {
    ranks: [
        *(attention2d(*grid, overlap=overlap) for grid in grids for overlap in (False, True)),
        ulysses(ranks),
        ring(ranks),
    ]
    for ranks, grids in GRIDS.items()
}
# 4 × 4 ranks do nothing that 2 × 2, 2 × 3 and 2 × 2 × 2 do not; six processes are many for two cores.
RANKS = [pytest.param(ranks, marks=[pytest.mark.slow] * (ranks > 4)) for ranks in PLANS]
HEADS = [(16, 16), (16, 4), (9, 3)]


@dataclass(frozen=True)
class Case:
    """One call of attention. `heads` are (query, key/value); `padding` tokens at the left of the first row of the
    batch; `documents` are the lengths of packed sequences, the same in each row but the first, which holds one."""

    plan: SequencePlan
    heads: tuple[int, int]
    length: int
    mask: MaskSpec = CAUSAL
    dtype: torch.dtype = torch.float32
    batch: int = 2
    head_dim: int = 16
    value_dim: int = 16
    padding: int = 0
    documents: tuple[int, ...] = ()
    sinks: bool = False

    @property
    def name(self) -> str:
        size = "" if self.mask.size is None else str(self.mask.size)
        extras = [f"left{self.padding}"] * bool(self.padding) + ["packed"] * bool(self.documents)
        extras += ["sinks"] * self.sinks + [f"v{self.value_dim}"] * (self.value_dim != self.head_dim)
        parts = [*str(self.plan).split(), "{}:{}".format(*self.heads), f"{self.mask.kind}{size}", f"n{self.length}"]
        return "-".join([*parts, *extras, str(self.dtype).removeprefix("torch.")])

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def alone(self) -> Case:
        """On one device, where all plans are one."""
        return dataclasses.replace(self, plan=attention2d(1, 1, 1))

    def inputs(self) -> dict[str, Tensor]:
        """q, k, v, do of the whole sequence, alike for all plans and layouts, and sinks [H] if there are any."""
        generator = torch.Generator().manual_seed(self.length * 100 + self.heads[0])
        shapes = {
            "q": (self.heads[0], self.head_dim),
            "k": (self.heads[1], self.head_dim),
            "v": (self.heads[1], self.value_dim),
            "do": (self.heads[0], self.value_dim),
        }
        made = {
            name: torch.randn(self.batch, heads, self.length, size, generator=generator)
            for name, (heads, size) in shapes.items()
        }
        if self.sinks:
            made["sinks"] = torch.randn(self.heads[0], generator=generator)
        return {name: x.to(self.dtype) for name, x in made.items()}

    @property
    def first_valid(self) -> Tensor | None:
        return torch.tensor([self.padding] + [0] * (self.batch - 1)) if self.padding else None

    @property
    def segments(self) -> Tensor | None:
        if not self.documents:
            return None
        packed = torch.arange(len(self.documents)).repeat_interleave(torch.tensor(self.documents))
        return torch.stack([torch.zeros_like(packed), *[packed] * (self.batch - 1)])

    def visible(self) -> Tensor:
        """Boolean [B, 1, S, T], written out from the definitions."""
        s, t = torch.arange(self.length)[:, None], torch.arange(self.length)[None]
        seen = torch.ones(self.length, self.length, dtype=torch.bool)
        if self.mask.kind != "bidirectional":
            seen &= t <= s
        if self.mask.kind == "window":
            seen &= s - t < self.mask.size
        seen = seen.expand(self.batch, -1, -1).clone()
        if self.mask.kind == "chunk":
            starts = torch.zeros(self.batch) if self.first_valid is None else self.first_valid
            for row, start in enumerate(starts.tolist()):
                seen[row] &= (t <= s) & ((s - int(start)) // self.mask.size == (t - int(start)) // self.mask.size)
        if self.first_valid is not None:
            seen &= (t >= self.first_valid[:, None, None]) & (s >= self.first_valid[:, None, None])
        if self.segments is not None:
            seen &= self.segments[:, :, None] == self.segments[:, None, :]
        return seen[:, None]


# --- one device ---


@functools.cache
def reference(case: Case) -> dict[str, Tensor]:
    """o, dq, dk, dv (and dsinks) in fp64 from the case's inputs, rounded to its dtype before. A row that sees nothing
    gives 0."""
    x = {name: value.double() for name, value in case.inputs().items()}
    leaves = {name: value.requires_grad_() for name, value in x.items() if name != "do"}
    groups = case.heads[0] // case.heads[1]
    k, v = (leaves[name].repeat_interleave(groups, 1) for name in "kv")
    scores = (leaves["q"] @ k.transpose(-1, -2) * case.scale).masked_fill(~case.visible(), -torch.inf)
    if case.sinks:
        scores = torch.cat([scores, leaves["sinks"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0), -1)
    weights = weights[..., : case.length].masked_fill(~case.visible(), 0)
    return _with_gradients(weights @ v, leaves, x["do"])


@functools.cache
def single_device(case: Case) -> dict[str, Tensor]:
    """The same from F.scaled_dot_product_attention in the case's dtype: how exact one device is."""
    x = case.inputs()
    leaves = {name: x[name].requires_grad_() for name in "qkv"}
    missing = case.head_dim - case.value_dim  # no fused kernel takes values of another size than keys: filled up
    plain = case.mask.size is None and not case.padding and not case.documents
    options: dict[str, Any] = {"attn_mask": case.visible()}
    if plain:
        options = {"is_causal": case.mask.kind == "causal"}
    q, k = (F.pad(leaves[name], [0, max(0, -missing)]) for name in "qk")
    v = F.pad(leaves["v"], [0, max(0, missing)])
    o = F.scaled_dot_product_attention(q, k, v, scale=case.scale, enable_gqa=case.heads[0] != case.heads[1], **options)
    return _with_gradients(o[..., : case.value_dim], leaves, x["do"])


def _with_gradients(o: Tensor, leaves: dict[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(o, list(leaves.values()), do)
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(leaves, found, strict=True)}}


def relative(found: Tensor, expected: Tensor) -> float:
    """max |found − expected| / max |expected| of each head of each sequence, on average over these.

    Each is an attention of its own. The greatest of all is a matter of luck: how far |expected| is above the power of
    two at which the rounding of bf16 gets coarser.
    """
    found, expected = found.double(), expected.double()
    if expected.dim() == 1:  # sinks: one number a head
        found, expected = found[None], expected[None]
    wrong, size = (found - expected).abs().amax((-2, -1)), expected.abs().amax((-2, -1))
    return float((wrong / size).mean())


def typical(found: Tensor, expected: Tensor) -> float:
    """|found − expected| / |expected| in the root mean square."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _errors(found: dict[str, Tensor], case: Case) -> dict[str, float]:
    pairs = [(name, found[name], expected) for name, expected in reference(case.alone).items()]
    greatest = {name: relative(*tensors) for name, *tensors in pairs}
    return greatest | {f"{name} typical": typical(*tensors) for name, *tensors in pairs}


# --- on ranks ---


def attention_on(mesh: DeviceMesh, plan: SequencePlan) -> Callable[..., Tensor]:
    """Causal attention of unpadded sequences under `plan`, a function of a rank's own q, k and v."""
    key = SequenceAxis(mesh, plan).key

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"scale": q.shape[-1] ** -0.5, "length": plan.ranks * q.shape[2]}
        return sequence_attention(q, k, v, key, mask=CAUSAL, **options)

    return attend


@dataclass
class Outcome:
    """What the ranks of one case found: whole tensors, and what each rank sent and received over the wire.

    forward, backward: by rank, (bytes sent, bytes received). saved: by rank, the bytes of the tensors that autograd
    kept for backward, in the order kept.
    """

    case: Case
    tensors: dict[str, Tensor]
    forward: list[tuple[int, int]]
    backward: list[tuple[int, int]]
    saved: list[list[int]]

    def errors(self) -> dict[str, float]:
        """Errors against fp64 of o, dq, dk, dv, and dsinks where there are sinks: greatest and typical."""
        return _errors(self.tensors, self.case)

    def limits(self) -> dict[str, float]:
        """Of the errors of one device in the same dtype twice the greatest, and 1.5 times the typical, which varies
        less and tells one more rounding from many. fp64 is its own reference there: 1e-13."""
        if self.case.dtype == torch.float64:
            return dict.fromkeys(self.errors(), 1e-13)
        single = _errors(single_device(self.case.alone), self.case)
        return {name: error * (1.5 if name.endswith("typical") else 2) for name, error in single.items()}


def on_rank(group: Any, cases: Sequence[Case], prepare: Callable[[], None] | None = None) -> list[dict[str, Any]]:
    """Every case on this rank, forward and backward; `prepare` runs once before, to seed a fault."""
    if prepare is not None:
        prepare()
    keys: dict[SequencePlan, str] = {}
    return [_one(case, keys, group.rank()) for case in cases]


def _one(case: Case, keys: dict[SequencePlan, str], rank: int) -> dict[str, Any]:
    plan = case.plan
    if plan not in keys:
        keys[plan] = SequenceAxis(sequence_mesh("cpu", plan.grid), plan).key
    x = case.inputs()
    sinks = x.pop("sinks", None)
    # padding is not zero: neither its values nor the gradient that comes back to it may matter
    own = {name: take_tokens(value, 2, plan.layout, rank, plan.ranks, fill=3.0) for name, value in x.items()}
    do = own.pop("do")
    leaves = {name: value.requires_grad_() for name, value in own.items()}
    if sinks is not None:
        leaves["sinks"] = sinks.requires_grad_()
    saved: list[int] = []
    keep, back = (lambda t: (saved.append(t.nbytes), t)[1]), (lambda t: t)
    with record_events() as forward, torch.autograd.graph.saved_tensors_hooks(keep, back):
        o = sequence_attention(
            *own.values(),
            keys[plan],
            mask=case.mask,
            scale=case.scale,
            length=case.length,
            first_valid=case.first_valid,
            segment_ids=case.segments,
            sinks=sinks,
        )
    with record_events() as backward:
        found = torch.autograd.grad(o, list(leaves.values()), do)
    tensors = {"o": o.detach(), **{f"d{name}": g for name, g in zip(leaves, found, strict=True)}}
    return {
        "tensors": tensors,
        "saved": saved,
        **{
            name: (sum(e.sent for e in events), sum(e.received for e in events))
            for name, events in (("forward", forward), ("backward", backward))
        },
    }


def run_cases(cases: Sequence[Case], prepare: Callable[[], None] | None = None, timeout: float = 240) -> list[Outcome]:
    """The outcome of each case, in their order: one launch of ranks for each number of ranks."""
    outcomes: dict[int, Outcome] = {}
    for ranks in sorted({case.plan.ranks for case in cases}):
        chosen = [index for index, case in enumerate(cases) if case.plan.ranks == ranks]
        found = run_ranks(on_rank, ranks, [cases[index] for index in chosen], prepare, timeout=timeout)
        for index, results in zip(chosen, zip(*found, strict=True), strict=True):
            outcomes[index] = _joined(cases[index], list(results))
    return [outcomes[index] for index in range(len(cases))]


def _joined(case: Case, results: list[dict[str, Any]]) -> Outcome:
    by_name = {name: [result["tensors"][name] for result in results] for name in results[0]["tensors"]}
    tensors = {
        name: sum(parts) if name == "dsinks" else join_tokens(parts, 2, case.plan.layout, case.length)
        for name, parts in by_name.items()
    }
    forward, backward, saved = ([result[name] for result in results] for name in ("forward", "backward", "saved"))
    return Outcome(case, tensors, forward, backward, saved)


def possible(plan: SequencePlan, heads: tuple[int, int]) -> bool:
    """Whether the heads can be dealt to the plan's heads axis: evenly, but key/value heads may be repeated."""
    axis = plan.grid[0]
    return heads[0] % axis == 0 and (heads[1] % axis == 0 or axis % heads[1] == 0)


@functools.cache
def chosen(ranks: int) -> tuple[Outcome, ...]:
    """For each plan of `ranks` a few cases that together have every mask, dtype, number of heads and padding; cached,
    since several tests look at them."""
    kinds = [
        ((16, 16), DIVIDES, CAUSAL, torch.float32),
        ((16, 4), PADDED, CAUSAL, torch.bfloat16),
        ((16, 16), PADDED, FULL, torch.bfloat16),
        ((16, 4), DIVIDES, FULL, torch.float32),
        ((9, 3), PADDED, CAUSAL, torch.float32),
        ((9, 3), DIVIDES, FULL, torch.bfloat16),
        ((16, 4), 37, CAUSAL, torch.float64),
        ((9, 3), 37, FULL, torch.float64),
    ]
    cases = [Case(plan, *kind) for plan in PLANS[ranks] for kind in kinds if possible(plan, kind[0])]
    return tuple(run_cases(cases))
