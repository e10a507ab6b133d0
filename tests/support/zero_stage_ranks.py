"""Cases of ZeRO stages 1 and 2, as each rank runs them, with the faults that tests seed."""

from __future__ import annotations

import collections
import io
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zero_stage_model import adam, model, rows

from rewriter.runtime import record_events
from rewriter.training import zero_optimizer
from rewriter.training.zero import buckets, flat, stages

STEPS = 4
SMALL = 4000  # bytes of a bucket: several, some of them with pieces of several owners


def decayed(made):
    """Two groups, as trainers make them."""
    named = [(n, p) for n, p in made.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


# name: dtype, stage, micro-batches, what else: groups, clipping, a scheduler, one bucket
CASES = {
    "1": (torch.float64, 1, 1, ()),
    "2": (torch.float64, 2, 1, ()),
    "1 accumulated": (torch.float64, 1, 3, ("no_sync",)),
    "1 accumulated, every pass sums": (torch.float64, 1, 3, ()),
    "2 accumulated": (torch.float64, 2, 3, ("no_sync",)),
    "1 clipped": (torch.float64, 1, 2, ("clip", "groups", "schedule")),
    "2 clipped": (torch.float64, 2, 1, ("clip", "groups", "schedule")),
    "1 one bucket": (torch.float64, 1, 1, ("one bucket",)),
    "1 fp32": (torch.float32, 1, 1, ()),
    "2 fp32": (torch.float32, 2, 1, ()),
    "1 bf16": (torch.bfloat16, 1, 2, ("no_sync",)),
    "2 bf16": (torch.bfloat16, 2, 2, ()),
}


def staged(made, group, case, **changed):
    _, stage, _, more = CASES[case]
    options = {
        "params": decayed(made) if "groups" in more else None,
        "bucket_bytes": 1 << 30 if "one bucket" in more else SMALL,
    }
    return zero_optimizer(made, adam, group, stage=stage, **{**options, **changed})


def schedule(optimizer, more):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t) if "schedule" in more else 1.0)


class Counted(TorchDispatchMode):
    """Counts torch's own calls of collectives, by any caller."""

    def __init__(self):
        super().__init__()
        self.operators = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.operators[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def run(group, case, made, optimizer, steps=range(STEPS), scheduler=None):
    """Norms before clipping, and the collectives of the last step by kind, by our events and by torch's count."""
    _, _, micro, more = CASES[case]
    scheduler, norms = scheduler or schedule(optimizer, more), []
    for step in steps:
        with record_events() as events, Counted() if step == steps[-1] else nullcontext() as counted:
            for m in range(micro):
                last = m == micro - 1
                with optimizer.no_sync() if "no_sync" in more and not last else nullcontext():
                    (made(rows(step, m, group.rank()), group.rank() == group.size() - 1) / micro).backward()
            assert all(p.grad is None for p in made.parameters())
            if "clip" in more:
                norms.append(float(optimizer.clip_grad_norm_(0.5)))
            optimizer.step()
        scheduler.step()
        made.zero_grad() if step % 2 else optimizer.zero_grad()
    kinds = [event.kind for event in events]
    ours = {kind: kinds.count(kind) for kind in ("start", "all_gather")}
    sent = sum(event.bytes for event in events if event.kind == "start")
    theirs = dict(counted.operators)
    return norms, ours, theirs, sent


def case_result(group, case, **changed):
    made = model(CASES[case][0])
    optimizer = staged(made, group, case, **changed)
    norms, ours, theirs, sent = run(group, case, made, optimizer)
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    own = sum(t.nbytes for flat in optimizer._flats for t in (flat.master_S, flat.gradient_S))
    kept = sum(bucket.buffer.nbytes for bucket in optimizer.reducer.buckets if bucket.buffer is not None)
    return {
        "parameters": {n: p.detach().clone() for n, p in made.named_parameters()},
        "norms": norms,
        "events": ours,
        "torch": theirs,
        "sent": sent,
        "memory": (state, own, kept),
        "buckets": len(optimizer.reducer.buckets),
    }


def owner_off_by_one(patch):
    """Each rank steps its neighbour's part, and gives it as its own."""
    patch(flat, "group_rank", lambda group: (group.rank() + 1) % group.size())


def not_averaged(patch):
    patch(stages, "group_size", lambda group: 1)


def nothing_gathered(patch):
    patch(flat, "all_gather_flat", lambda *a, **k: None)


def gathered_before_the_step(patch):
    step = stages.ZeroOptimizer.step

    def faulty(self, *a, **k):
        before = [flat.own_S.clone() for flat in self._flats]
        publish = stages.FlatParameters.publish

        def stale(flat):
            now = flat.master_S.clone()
            flat.own_S.copy_(before[self._flats.index(flat)])
            flat.master_S, kept = flat.own_S, flat.master_S
            publish(flat)
            flat.master_S = kept
            if kept is flat.own_S:
                flat.own_S.copy_(now)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(stages.FlatParameters, "publish", stale)
            return step(self, *a, **k)

    patch(stages.ZeroOptimizer, "step", faulty)


def unused_are_stepped(patch):
    patch(buckets.Bucket, "_used", lambda self: [True] * len(self.parameters))


def unused_elsewhere_are_forgotten(patch):
    patch(buckets.Bucket, "_used", lambda self: [i in self.filled for i in range(len(self.parameters))])


def reduced_in_bf16(patch):
    init = buckets.Bucket.__init__

    def faulty(self, *a, **k):
        init(self, *a, **k)
        self.dtype = torch.bfloat16

    patch(buckets.Bucket, "__init__", faulty)


FAULTS = {
    "owner off by one": ("2", owner_off_by_one),
    "not averaged": ("2 clipped", not_averaged),
    "nothing gathered": ("1", nothing_gathered),
    "gathered before the step": ("1", gathered_before_the_step),
    "gathered before the step, bf16": ("2 bf16", gathered_before_the_step),
    "unused are stepped": ("2", unused_are_stepped),
    "unused elsewhere are forgotten": ("1", unused_elsewhere_are_forgotten),
    "reduced in bf16": ("2 bf16", reduced_in_bf16),
}


def faulty_result(group, fault):
    case, seed = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        seed(patch.setattr)
        return case_result(group, case)


def resumed(group, case):
    """Parameters after all steps, uninterrupted and saved and loaded in between, by a process that starts anew."""
    whole = case_result(group, case)["parameters"]
    made = model(CASES[case][0])
    optimizer = staged(made, group, case)
    scheduler = schedule(optimizer, CASES[case][3])
    run(group, case, made, optimizer, range(STEPS // 2), scheduler)
    saved = io.BytesIO()
    torch.save([made.state_dict(), optimizer.state_dict(), scheduler.state_dict()], saved)
    saved.seek(0)
    weights, state, rates = torch.load(saved, weights_only=True)
    made = model(CASES[case][0])
    optimizer = staged(made, group, case)
    scheduler = schedule(optimizer, CASES[case][3])
    made.load_state_dict(weights)
    optimizer.load_state_dict(state)
    scheduler.load_state_dict(rates)
    run(group, case, made, optimizer, range(STEPS // 2, STEPS), scheduler)
    return whole, {n: p.detach().clone() for n, p in made.named_parameters()}


def everything(group):
    found = {"cases": {case: case_result(group, case) for case in CASES}}
    if group.size() == 2:
        found["faults"] = {fault: faulty_result(group, fault) for fault in FAULTS}
        found["resumed"] = {case: resumed(group, case) for case in ("2 fp32", "1 bf16", "1 clipped")}
    return found
