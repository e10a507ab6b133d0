"""Cases of weights that stay in the node, as each rank runs them, with the faults that tests seed."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from zero_model import LOCAL, NODES, RANKS, backward, batches, model, node_local, sharded

from rewriter.training import node_local_optimizer, node_mesh
from rewriter.training.zero import node_local as module
from rewriter.training.zero.node_local import SlicedGroup


def adam(groups):
    return torch.optim.AdamW(groups, lr=1e-3)


def stepped(made, optimizer):
    """Per parameter this rank's shard of zeros, with what the optimizer's masters hold of it: gradients, and ones."""
    names = {p: name for name, p in made.named_parameters()}
    found = {}
    for group in optimizer._groups:
        shards = [(torch.zeros(p.to_local().numel()), torch.zeros(p.to_local().numel())) for p in group.parameters]
        for piece, master in zip(group.pieces[group.node], group.master_weights, strict=True):
            gradient, mask = shards[piece.parameter]
            gradient[piece.source] = master.grad
            mask[piece.source] = 1
        found |= {names[p]: shard for p, shard in zip(group.parameters, shards, strict=True)}
    return found


def replica(made):
    return {name: p.to_local().detach().clone() for name, p in made.named_parameters()}


CASES = ["once", "twice", "unsynced", "put off", "bf16", "nodes of one", "one node", "summed over nodes"]
SLOW = {"unsynced", "nodes of one", "one node", "trained"}


def case_gradients(group, expected, case):
    """This rank's part of the gradients, full gradients of FSDP2, and both norms."""
    ids = batches(group)
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    made = model().to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if case == "summed over nodes":
            summed_over_nodes(patch.setattr)
        optimizer = node_local(made, node={"nodes of one": 1, "one node": RANKS}.get(case, LOCAL))
        if case == "put off":  # nodes hear of the sum only, and nothing of what was given up before
            made.set_requires_all_reduce(False)
            (made(ids[0]) * 5000).backward()
            optimizer.zero_grad()
            for x in ids:
                made.set_requires_all_reduce(x is ids[-1])
                (made(x) * 500).backward()
        else:
            backward(made, ids, case if case in ("twice", "unsynced") else "once")
    assert all(p.grad is None for p in made.parameters())
    norm = optimizer.clip_grad_norm_(1e9)
    accumulate = "twice" if case in ("twice", "unsynced", "put off") else "once"
    if (accumulate, dtype) not in expected:
        plain = sharded(model().to(dtype), reduce_dtype=torch.float32)
        backward(plain, ids, accumulate)
        wanted = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9).full_tensor())
        full = {n: p.grad.full_tensor().flatten().float() for n, p in plain.named_parameters()}
        expected[accumulate, dtype] = full, wanted
    return stepped(made, optimizer), *expected[accumulate, dtype], norm


def summed_over_nodes(patch):
    start = module.reduce_scatter
    patch(module, "reduce_scatter", lambda *a, factor, **k: start(*a, factor=factor * NODES, **k))


def owner_adds_what_it_holds(patch):
    """Instead of what it has sent."""
    receive = SlicedGroup.receive

    def faulty(self, transfer):
        receive(self, transfer)
        for piece in self.pieces[self.node]:
            shard = self.parameters[piece.parameter].to_local().view(-1)
            shard[piece.source] = self.master[piece.place]

    patch(SlicedGroup, "receive", torch.no_grad()(faulty))


def trained(group, steps, fault=None, dtype=torch.float32):
    """The replica, how far masters are from it, and what the optimizer saved half way gives again."""
    ids = batches(group, steps)
    made = model().to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch.setattr)
        optimizer = node_local(made, adam, gradients="int4-hadamard")
        schedule = slowing(optimizer)
        saved = None
        for step, x in enumerate(ids):
            if step == steps // 2:
                saved = copy.deepcopy((made.state_dict(), optimizer.state_dict(), schedule.state_dict()))
            one_step(made, optimizer, x)
            schedule.step()
    lag = max(float((g.master - g._replica()).abs().max() / g.master.abs().max()) for g in optimizer._groups)
    again = model().to(dtype)
    other = node_local(again, adam, gradients="int4-hadamard")
    later = slowing(other)
    for part, state in zip((again, other, later), saved, strict=True):
        part.load_state_dict(state)
    for x in ids[steps // 2 :]:
        one_step(again, other, x)
        later.step()
    same = all(torch.equal(w, replica(again)[name]) for name, w in replica(made).items())
    return replica(made), lag, same


def slowing(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def one_step(made, optimizer, ids):
    optimizer.zero_grad()
    made(ids).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def loaded_weights(group):
    """What is not so of: weights that are loaded into the model, or a part, stay, since masters follow; masters of
    other parts do not change; parameters put in the place of others are trained; and `model.zero_grad`."""
    made = model()
    optimizer = node_local(made)
    wrong = []

    def check(what, right):
        if not right:
            wrong.append(what)

    def stays(state, prefix=""):
        optimizer.step()  # no gradient
        return all(torch.equal(made.get_parameter(prefix + name).to_local(), p.to_local()) for name, p in state.items())

    state = {name: p + 1 for name, p in made.state_dict().items()}
    made.load_state_dict(state)
    check("model", stays({name: state[name] for name, _ in made.named_parameters()}))
    for owned in optimizer._groups:
        owned.master += 0.25
    part = {name: p + 2 for name, p in made.bend.state_dict().items()}
    made.bend.load_state_dict(part)
    bend = {id(p) for p in made.bend.parameters()}
    for owned in optimizer._groups:
        ahead = owned.master - owned._replica()
        for piece in owned.pieces[owned.node]:
            expected = 0.0 if id(owned.parameters[piece.parameter]) in bend else 0.25
            check("masters", bool((ahead[piece.place] - expected).abs().max() < 1e-5))
    check("part", stays(part, "bend."))
    made.load_state_dict({name: p - 1 for name, p in made.state_dict().items()}, assign=True)
    before = replica(made)
    made(batches(group)[0]).backward()
    masters = [p for group_ in optimizer.param_groups for p in group_["params"]]
    check("hooks", all(p.grad is None for p in made.parameters()) and all(p.grad is not None for p in masters))
    optimizer.step()
    check("trained", any(not torch.equal(p, before[name]) for name, p in replica(made).items()))
    made.zero_grad()
    check("zero_grad", all(p.grad is None for p in masters))
    return wrong


def scaled(group):
    """By scaler: how far weights move, and the scale, after a step with one rank's overflow and one without, with what
    SGD moves them by."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(7))
    found = {}
    for scaler in (torch.amp.GradScaler, ShardedGradScaler):
        torch.manual_seed(0)
        mesh, made, plain = node_mesh("cpu", LOCAL), nn.Linear(64, 64), nn.Linear(64, 64)
        fully_shard(made, mesh=mesh["local"])
        build = functools.partial(torch.optim.SGD, lr=1e-2)
        optimizer = node_local_optimizer(made, mesh, build, gradients="int8", weights="int8")
        plain.load_state_dict({name: p.full_tensor() for name, p in made.named_parameters()})
        plain(x).square().sum().backward()
        scale, steps, before = scaler("cpu", init_scale=8.0), [], made.weight.detach().full_tensor()
        for overflows in (True, False):
            optimizer.zero_grad()
            scale.scale(made(x).square().sum()).backward()
            if overflows and group.rank() == 0:
                optimizer.param_groups[0]["params"][0].grad[0] = torch.inf
            if scaler is torch.amp.GradScaler:  # as for clipping
                scale.unscale_(optimizer)
            scale.step(optimizer)
            scale.update()
            steps.append((made.weight.detach().full_tensor() - before, scale.get_scale()))
        found[scaler.__name__] = (steps, -1e-2 * plain.weight.grad)
    return found


def options(group):
    """Groups of parameters with their options, and one parameter that is not trained: weights before and after
    a step without gradients, and what they should have decayed by."""
    made = model()
    made.cube.requires_grad_(False)
    mesh = node_mesh("cpu", LOCAL)
    sharded(made, mesh["local"])
    named, before = dict(made.named_parameters()), replica(made)
    matrices = {name for name, p in named.items() if p.ndim == 2}
    groups = [
        {"params": [p for name, p in named.items() if name in matrices], "weight_decay": 0.5},
        {"params": [p for name, p in named.items() if name not in matrices and name != "cube"]},
    ]
    build = functools.partial(torch.optim.SGD, lr=0.1)
    optimizer = node_local_optimizer(made, mesh, build, params=groups, weights="int8")
    for group_ in optimizer.param_groups:
        for p in group_["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    return {name: (before[name], w, 0.95 if name in matrices else 1.0) for name, w in replica(made).items()}


def node_local_cases(group, slow):
    expected = {}
    cases = [case for case in CASES if (case in SLOW) == slow]
    gradients = {case: case_gradients(group, expected, case) for case in cases}
    if slow:
        return {"gradients": gradients, "trained": trained(group, 6)}
    return {
        "gradients": gradients,
        "trained bf16": trained(group, 4, dtype=torch.bfloat16),
        "owner adds what it holds": trained(group, 2, owner_adds_what_it_holds),
        "loaded": loaded_weights(group),
        "options": options(group),
        "scaled": scaled(group),
    }
