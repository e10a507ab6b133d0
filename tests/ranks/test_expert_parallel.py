"""Experts sharded over ranks, against one device that sees all rows: logits, losses, all gradients, steps, weights.

Models compute in fp64, so that only what routers and norms do in fp32 rounds. Ranks have rows of their own.
"""

from __future__ import annotations

import functools
import tempfile

import pytest
import torch
import zoo
from expert_parallel_ranks import CASES, FAST, SLOW, STEPS, adam, build, forward, one, rows
from ranks import refusal, run_ranks

from rewriter import RewriterError
from rewriter.training import expert_mesh, expert_parallel, shard_experts
from rewriter.training.expert_parallel import ORDERS


@functools.cache
def ladder_path():
    import emitted

    emitted.shared("mixtral", "upper-half")  # its code, where ranks would race to copy it
    return str(emitted.emitted("mixtral", "upper-half"))


# --- faults ---


def experts_averaged_over_replicas(patch):
    """By as many ranks as summed them, though tokens of all ranks have added to them."""
    finish = expert_parallel.Bucket.finish

    def faulty(self):
        return [total * 2 if p.dim() == 3 else total for p, total in zip(self.parameters, finish(self), strict=True)]

    patch(expert_parallel.Bucket, "finish", faulty)


def experts_not_reduced(patch):
    bucket = expert_parallel.Bucket
    patch(expert_parallel, "Bucket", lambda p, g, name: bucket(p, None if "experts" in name else g, name))


def experts_summed_over_all(patch):
    bucket = expert_parallel.Bucket
    patch(expert_parallel, "Bucket", lambda p, g, name: bucket(p, torch.distributed.group.WORLD, name))


def experts_of_the_neighbour(patch):
    from torch.distributed.device_mesh import DeviceMesh

    local = DeviceMesh.get_local_rank
    patch(DeviceMesh, "get_local_rank", lambda self, dim=None: (local(self, dim) + (dim == "ep")) % 2)


def gradient_of_dispatch_lost(patch):
    backward = expert_parallel._TokenExchange.backward

    def faulty(ctx, gradient):
        rows, *rest = backward(ctx, gradient)
        return (torch.zeros_like(rows) if "dispatch" in ctx.args[3] else rows), *rest

    patch(expert_parallel._TokenExchange, "backward", staticmethod(faulty))


def counts_of_own_rows_mixed_up(patch):
    exchange = expert_parallel.ParallelExperts._exchange_counts

    def faulty(self, counts_E):
        found = exchange(self, counts_E)
        found[self.ranks.rank()] = found[self.ranks.rank()].flip(0)
        return found

    patch(expert_parallel.ParallelExperts, "_exchange_counts", faulty)


FAULTS = {
    "experts averaged over replicas": experts_averaged_over_replicas,
    "experts not reduced": experts_not_reduced,
    "experts summed over all": experts_summed_over_all,
    "experts of the neighbour": experts_of_the_neighbour,
    "gradient of dispatch lost": gradient_of_dispatch_lost,
    "counts of own rows mixed up": counts_of_own_rows_mixed_up,
}


def faulty(group, fault, ladder):
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch.setattr)
        return one(group, "short, D+E", ladder, steps=1)


# --- launches ---


def everything(group, ladder, directory, slow):
    ranks, cases = group.size(), SLOW if slow else FAST
    found = {case: one(group, case, ladder) for case, (_, dp, ep, _, _) in cases.items() if dp * ep == ranks}
    if ranks == 4 and not slow:
        found |= {fault: faulty(group, fault, ladder) for fault in FAULTS}
        found["refused"] = refused()
    if ranks == 2 and not slow:
        kept = found["mixtral, ep 2"]
        if group.rank() == 0:
            kept["parallel"].model.save_pretrained(directory, state_dict=kept["weights"])
    return {
        key: {k: v for k, v in value.items() if k != "parallel"} if isinstance(value, dict) else value
        for key, value in found.items()
    }


def refused():
    found = {}
    for name, family, dp, ep in (
        ("count", "qwen3_moe", 1, 4),
        ("dense", "llama", 2, 2),
        ("own code", "llama4_text", 2, 2),
    ):
        mesh = expert_mesh(dp, ep, "E+D", "cpu")
        found[name] = refusal(lambda family=family, mesh=mesh: shard_experts(zoo.build(family), mesh))
    made = zoo.build("mixtral")
    mesh = expert_mesh(2, 2, "E+D", "cpu")
    shard_experts(made, mesh)
    found["twice"] = refusal(lambda: shard_experts(made, mesh))
    return found


@functools.cache
def saved():
    return tempfile.mkdtemp(prefix="experts-")


@functools.cache
def results(ranks, slow=False):
    return run_ranks(everything, ranks, ladder_path() if ranks == 4 else None, saved(), slow)


@functools.cache
def reference(family, ranks, experts="eager"):
    made = build(family, ladder_path() if family == "ladder" else None, experts)
    optimizer, found = adam(made), {}
    for step in range(STEPS):
        ids = torch.cat([rows(step, rank) for rank in range(ranks)])
        logits, loss = forward(made, ids)
        loss.backward()
        if step == 0:
            found["logits"], found["loss"] = logits.detach(), loss.detach()
            found["gradients"] = {n: p.grad.clone() for n, p in made.named_parameters()}
            found["norm"] = torch.nn.utils.clip_grad_norm_(made.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = {n: v.detach() for n, v in made.state_dict().items()}
    return found


def close(found, expected, limit, name):
    scale = float(expected.abs().max())
    error = float((found - expected).abs().max())
    assert error <= limit * max(scale, 1e-30), f"{name}: {error:.1e} of {scale:.1e}"


def check(case, ranks, key=None):
    family, _, _, _, experts = CASES[case]
    expected, found = (
        reference(family, ranks, experts),
        [each[key or case] for each in (results(ranks, True) if case in SLOW else results(ranks))],
    )
    close(torch.cat([each["logits"] for each in found]), expected["logits"], 1e-9, "logits")
    close(torch.stack([each["loss"] for each in found]).mean(), expected["loss"], 1e-9, "loss")
    for each in found:
        for name, gradient in expected["gradients"].items():
            close(each["gradients"][name], gradient, 1e-8, name)
        close(each["norm"], expected["norm"], 1e-8, "norm")
    if key is not None:  # a fault, of the first step alone
        return
    assert set(found[0]["weights"]) == set(expected["weights"])
    assert not any(each["weights"] for each in found[1:])
    for name, weight in expected["weights"].items():
        close(found[0]["weights"][name], weight, 1e-7, name)


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_all_is_that_of_one_device(case):
    check(case, CASES[case][1] * CASES[case][2])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_the_same_comparison(fault):
    with pytest.raises(AssertionError):
        check("short, D+E", 4, fault)


def test_ranks_hold_their_part_of_the_experts():
    total = sum(p.numel() for n, p in zoo.shared("mixtral").named_parameters() if "experts" in n)
    for case, ranks in (("mixtral, ep 2", 2), ("ladder, D+E", 4)):
        assert {each[case]["held"] for each in results(ranks)} == {total // CASES[case][2]}


def test_starved_experts_have_gradients_of_zero():
    gradient = reference("starved", 2)["gradients"]["model.layers.0.mlp.experts.down_proj"]
    assert (gradient.flatten(1).abs().sum(1) == 0).tolist().count(True) == 2


def test_full_weights_are_a_checkpoint_of_the_source():
    from transformers import AutoModelForCausalLM

    results(2)
    made = AutoModelForCausalLM.from_pretrained(saved(), dtype=torch.float64)
    for name, weight in reference("mixtral", 2)["weights"].items():
        close(made.state_dict()[name], weight, 1e-7, name)


def test_an_order_moves_gradients_or_tokens_between_nodes():
    """Nodes of two ranks: with E+D replicas are in other nodes, with D+E the other experts are."""
    e_d, d_e = ([each[f"short, {order}"]["traffic"] for each in results(4)] for order in ORDERS)
    short = dict(build("short", None).named_parameters())
    experts = sum(p.numel() for n, p in short.items() if "experts" in n)
    others = sum(p.numel() for n, p in short.items() if "experts" not in n)
    for rank in range(4):
        tensors = 2  # of experts, each with the number of ranks that have its gradient
        assert e_d[rank].experts == 2 * (1 / 2) * 8 * (experts / 2 + tensors)
        assert d_e[rank].experts == 0
        assert d_e[rank].tokens > 0
        assert e_d[rank].tokens == 0
        # every other parameter crosses where the ring leaves the node
        assert (e_d[rank].others > 0) == (rank in (1, 3))
        assert e_d[rank].others == d_e[rank].others
    assert e_d[1].others == pytest.approx(2 * (3 / 4) * 8 * others, rel=1e-2)


def test_tokens_travel_once_each_way_in_forward_and_in_backward():
    """Each chosen expert on another rank costs a row of the hidden size four times."""
    for rank in results(2):
        found = rank["mixtral, ep 2"]
        names = ("experts dispatch", "experts combine", "experts dispatch gradient", "experts combine gradient")
        sent = {name: sum(e.sent for e in found["events"] if e.name == name) for name in names}
        received = {name: sum(e.received for e in found["events"] if e.name == name) for name in names}
        assert sent["experts dispatch"] == received["experts combine"] == sent["experts combine gradient"]
        assert received["experts dispatch"] == sent["experts combine"] == sent["experts dispatch gradient"]
        assert 0 < sent["experts dispatch"] < 4 * 2 * 26 * 64 * 8  # layers, choices, tokens, hidden size, bytes
        assert sum(e.name == "experts dispatch" for e in found["events"]) == 4


def test_refusals_name_what_does_not_fit():
    found = results(4)[0]["refused"]
    assert "has 6 experts, which do not divide by ep 4. Possible: 1, 2, 3, 6" in found["count"]
    assert "LlamaForCausalLM has no experts" in found["dense"]
    assert "Llama4TextExperts" in found["own code"]
    assert "sharded already" in found["twice"]
    with pytest.raises(RewriterError, match="order 'DE'"):
        expert_mesh(1, 1, "DE", "cpu")
