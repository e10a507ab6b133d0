"""Programs that know nothing of emulation run as they are with one real rank: torch's trainers, all of our runtime."""

from __future__ import annotations

import time

import attention_cases
import expert_parallel_ranks
import pytest
import sequence_decode_ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import zero_comm_hook_ranks
import zero_node_local_ranks
import zero_stage_ranks
import zoo
from attention_cases import Case, ring, ulysses
from attention_cases import attention2d as grid
from emitted_ranks import build
from emulated import Constant, Modelled, job
from programs import program, shards, weights
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree as pytree

from rewriter.emit.module import emit_runtime_module
from rewriter.emulation import EmulationConfig
from rewriter.fabric import SOCKETS
from rewriter.runtime import Context, generate, record_events
from rewriter.runtime.collectives.small_sums import connect_small_sums, small_gather, small_sum_start
from rewriter.runtime.quantized.launch import quantized_all_reduce_start


def assert_finite(found) -> None:
    tensors = [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]
    assert tensors
    assert all(torch.isfinite(x).all() for x in tensors if x.is_floating_point())


# --- the emitted module ---


def forward(group, source, tensors, ties, ids, prompts):
    """Logits, gradients and tokens of an emitted module, with its collectives in order."""
    model = build(source, tensors[group.rank()], ties, group)
    with record_events() as events:
        logits = model(ids, torch.arange(ids.shape[1]).expand(ids.shape), Context())
        logits.square().mean().backward()
        generate(model, prompts, 3)
    return logits.detach(), [p.grad for p in model.parameters()], [(e.kind, e.name, e.bytes, e.ranks) for e in events]


def test_the_emitted_module_runs_unchanged():
    ladder = program("llama", {0, 1}, 2)
    source = emit_runtime_module(ladder)
    vocabulary = zoo.shared("llama").config.vocab_size
    arguments = source, shards(ladder, weights("llama")), dict(ladder.ties), zoo.batch(2, 9, vocabulary), [[1, 2], [3]]
    for rank, (_, gradients, expected) in enumerate(run_ranks(forward, 2, *arguments)):
        with job(2, rank=rank) as model:
            logits, found, events = forward(dist.group.WORLD, *arguments)
        assert_finite([logits, found])
        assert events == expected
        assert len(events) > 10
        assert [x.shape for x in found] == [x.shape for x in gradients]
        assert model.kinds.count("all_reduce") >= sum(kind == "start" for kind, *_ in events)


# --- torch's trainers ---


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def steps(model: nn.Module, count: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(count):
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_ddp_trains_with_one_real_rank_of_four():
    with job(4, rank=2) as model:
        plain = mlp()
        wrapped = nn.parallel.DistributedDataParallel(mlp(), bucket_cap_mb=0.002)
        before = len(model.calls)
        losses = steps(wrapped)
    # uniform ranks: the mean gradient is the own one
    assert losses == pytest.approx(steps(plain))
    reduced = [call.nbytes for call in model.calls[before:] if call.kind == "all_reduce"]
    assert sum(reduced) == 2 * 4 * sum(p.numel() for p in plain.parameters())
    assert len(reduced) > 2  # several buckets


def test_fsdp2_trains_with_one_real_rank_of_four():
    with job(4, rank=1) as model:
        sharded = mlp()
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(sharded)
        assert_finite(torch.tensor(steps(sharded)))
    assert {"all_gather", "reduce_scatter"} == set(model.kinds)


def test_tensor_parallel_layers_of_torch_run():
    with job(4, rank=2) as model:
        mesh = init_device_mesh("cpu", (4,))
        net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        assert net[0].weight.to_local().shape == (4, 8)
        net(torch.ones(2, 8)).sum().backward()
        assert_finite([p.grad.to_local() for p in net.parameters()])
    assert model.kinds.count("all_reduce") == 1


@pytest.mark.slow
def test_inductor_compiles_functional_collectives():
    def f(x):
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        dist.all_reduce(total)
        return total + 1

    with job(4) as model:
        x = torch.arange(4.0)
        assert torch.equal(torch.compile(f, fullgraph=True)(x), 32 * x + 1)
    assert model.kinds == ["all_reduce"] * 2


# --- several real ranks ---


def one_of_two(group, path):
    """A training step, seconds of it, an object and a message, as rank 0 or 5 of 8."""
    rank = (0, 5)[group.rank()]
    dist.destroy_process_group()
    config = Modelled(world_size=8, real=(0, 5), seconds=1e-3)
    store = dist.FileStore(path, 2)
    dist.init_process_group("emulated", rank=rank, world_size=8, store=store, pg_options=config)
    model = nn.parallel.DistributedDataParallel(mlp())
    dist.barrier()
    begun = time.monotonic()
    loss = model(torch.ones(2, 8)).square().mean()
    if rank == 5:
        time.sleep(0.3)  # the slower class
    loss.backward()
    seconds = time.monotonic() - begun
    box = [{"from": rank}]
    dist.broadcast_object_list(box, src=5)
    message = torch.arange(3.0) if rank == 5 else torch.zeros(3)
    dist.send(message, 0) if rank == 5 else dist.recv(message, 5)
    return seconds, box[0], message


def test_several_real_ranks_wait_for_the_slowest(tmp_path):
    found = run_ranks(one_of_two, 2, str(tmp_path / "store"))
    assert all(seconds > 0.3 for seconds, _, _ in found)
    assert [(box, message.tolist()) for _, box, message in found] == [({"from": 5}, [0, 1, 2])] * 2


class Brief(EmulationConfig):
    """In which everything takes half a millisecond, through sockets."""

    def delay_model(self):
        return Constant(5e-4, library=SOCKETS)


def small_sums_of_both(group, path):
    """Seconds of a small sum whose second rank is 0.2 s late, and of a gather; the sum, and how many were gathered."""
    rank = group.rank()
    dist.destroy_process_group()
    config = Brief(world_size=2, real=(0, 1))
    dist.init_process_group("emulated", rank=rank, world_size=2, store=dist.FileStore(path, 2), pg_options=config)
    world = dist.group.WORLD
    assert connect_small_sums(world, torch.device("cpu"))
    with torch.no_grad():
        time.sleep(0.2 * rank)
        begun = time.monotonic()
        small_sum_start(x := torch.ones(64), world).wait()
        parts = small_gather(torch.ones(8), world)
        return time.monotonic() - begun, x[0].item(), len(parts)


def test_small_sums_of_real_ranks_meet(tmp_path):
    (first, *found), (second, *other) = run_ranks(small_sums_of_both, 2, str(tmp_path / "store"))
    assert found == other == [2.0, 2]
    assert first > 0.15
    assert second >= 1e-3


# --- the runtime's own collectives ---


def test_quantized_collectives_run_in_their_threads():
    with job(4, rank=3, model=Constant(1e-3)) as model:
        for place in (dist.group.WORLD, init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))):
            x = torch.randn(1000)
            pending = [quantized_all_reduce_start(x, place, format="int8@32") for _ in range(2)]
            assert_finite([p.work.wait() for p in pending])
    assert model.kinds.count("send") >= 2 * 2 * 3 * 2


ATTENTION = [
    Case(plan, (8, 4), 30, padding=3, documents=(10, 20))
    for plan in (grid(1, 2, 2), grid(2, 1, 2), grid(1, 2, 2, overlap=True), ring(4), ulysses(4))
]
PROGRAMS = {
    "attention over a sequence": (attention_cases.on_rank, ATTENTION),
    "decoding from a dealt cache": (sequence_decode_ranks.decoded, list(sequence_decode_ranks.PLANS.values())[:1]),
    "ZeRO stages": (zero_stage_ranks.everything,),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_runs_on_real_ranks_runs_on_one(name):
    function, *arguments = PROGRAMS[name]
    with job(4, rank=3) as model:
        assert_finite(function(dist.group.WORLD, *arguments))
    assert model.calls


def test_experts_are_dispatched():
    with job(2) as model:
        assert_finite(expert_parallel_ranks.one(dist.group.WORLD, "mixtral, ep 2", None)["loss"])
    assert "send" in model.kinds


@pytest.mark.slow
@pytest.mark.parametrize("cases", [zero_comm_hook_ranks.comm_hook_cases, zero_node_local_ranks.node_local_cases])
def test_zero_comm_hooks_and_node_local_weights(cases):
    with job(zero_comm_hook_ranks.RANKS, rank=1) as model:
        assert_finite(cases(dist.group.WORLD, False))
    assert {"all_gather", "reduce_scatter", "send"} <= set(model.kinds)
