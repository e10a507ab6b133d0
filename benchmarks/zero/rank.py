"""One rank of benchmarks/zero/run.py, which starts it: training steps of a random Llama, timed, or trained on text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.support.link_ranks import main, passed_bytes
from rewriter.common.processes import write_json
from rewriter.runtime import record_events
from rewriter.runtime.collectives.exchange import all_to_all_start, gather_start
from rewriter.training import node_local_optimizer, node_mesh, zero_plus_plus
from rewriter.training.zero.fsdp import DefaultAllGather, DefaultReduceScatter, reduction_factor

RANKS, LOCAL = 4, 2
TOKENS = 64  # of the text


def measure(spec: dict[str, Any], rank: int) -> Any:
    return (steps if spec["mode"] == "steps" else losses)(spec)


def build(spec: dict[str, Any], system: dict[str, Any]) -> tuple[LlamaForCausalLM, torch.optim.Optimizer]:
    """The model, sharded, and its optimizer. `system`: arguments of zero_plus_plus or of node_local_optimizer
    ("node local"), or how plain weights are gathered ("gather")."""
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**spec["sizes"]))
    node_local, nodes = system.get("node local"), node_mesh("cpu", LOCAL)
    mesh = nodes["local"] if node_local else init_device_mesh("cpu", (RANKS,))
    if node_local:
        made = made.bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in [*made.model.layers, made]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        if "gather" in system:
            module.set_custom_all_gather(GATHERS[system["gather"]](nodes))
        if "reduce" in system:
            module.set_custom_reduce_scatter(HierarchicalSum(nodes))
    plus_plus = {key: value for key, value in system.items() if key in ("weights", "gradients", "secondary")}
    if plus_plus:
        zero_plus_plus(made, **plus_plus, node=LOCAL)
    if node_local:
        return made, node_local_optimizer(
            made, nodes, lambda groups: torch.optim.AdamW(groups, lr=spec["lr"]), **node_local
        )
    return made, torch.optim.AdamW(made.parameters(), lr=spec["lr"])


class Direct(DefaultAllGather):
    """Every rank sends its shard to every other one."""

    def __init__(self, nodes: DeviceMesh) -> None:
        self.nodes = nodes

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        found = gather_start([input_tensor], group, "direct").wait()
        output_tensor.view(group.size(), -1).copy_(torch.stack([shard for (shard,) in found]))


class Hierarchical(Direct):
    """A shard goes to one rank of the other node, and there to its neighbours."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        found = gather_start([input_tensor], self.nodes.get_group("node"), "hierarchical", "node").wait()
        mine = torch.stack([shard for (shard,) in found])
        both = gather_start([mine], self.nodes.get_group("local"), "hierarchical", "local").wait()
        output_tensor.view(RANKS // LOCAL, LOCAL, -1).copy_(torch.stack([rows for (rows,) in both], 1))


class HierarchicalSum(DefaultReduceScatter):
    """Inside the node first, so that nodes exchange one sum instead of each rank's part."""

    def __init__(self, nodes: DeviceMesh) -> None:
        self.nodes = nodes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        parts = input_tensor.view(RANKS // LOCAL, LOCAL, -1).transpose(0, 1)  # what each local rank of all nodes gets
        for axis in ("local", "node"):
            whole = all_to_all_start(
                [(part.contiguous(),) for part in parts], self.nodes.get_group(axis), axis, axis=axis
            )
            parts = torch.stack([part for (part,) in whole.wait()]).float().sum(0).to(input_tensor.dtype)
        output_tensor.copy_(parts).mul_(reduction_factor(op, RANKS))


GATHERS = {"direct": Direct, "hierarchical": Hierarchical}


def steps(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Per phase and system: seconds of each step, bytes that came into the node by its interface, those between nodes
    by our own count, and M. Systems take turns. Before a phase, `run.py` sets the link's rate."""
    built = {name: build(spec, system) for name, system in spec["systems"].items()}
    found: list[dict[str, Any]] = []
    for phase in range(spec["phases"]):
        if dist.get_rank() == 0:
            write_json(Path(spec["scratch"], f"ready-{phase}"), found)
            while not Path(spec["scratch"], f"go-{phase}").exists():
                time.sleep(0.02)
        dist.barrier()
        # the first step finds connections that know another rate
        taken = {
            name: [step(spec, *system) for _ in range(1 + spec["repetitions"])][1:] for name, system in built.items()
        }
        found.append({name: {key: [one[key] for one in each] for key in each[0]} for name, each in taken.items()})
    return found


def step(spec: dict[str, Any], made: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    ids = torch.randint(0, spec["sizes"]["vocab_size"], (1, spec["tokens"]))
    before = passed_bytes(spec["interface"], "rx")
    dist.barrier()  # nobody sends before all have read
    begin = time.perf_counter()
    with record_events() as events:
        optimizer.zero_grad()
        made(ids, labels=ids).loss.backward()
        optimizer.step()
    dist.barrier()
    seconds = time.perf_counter() - begin
    arrived = passed_bytes(spec["interface"], "rx") - before
    dist.barrier()
    counted = sum(e.received for e in events if e.kind == "wire" and e.axis == "node")
    parameters = sum(p.numel() for p in made.parameters())
    return {"seconds": seconds, "arrived": arrived, "counted": counted, "m": 2 * parameters}


def losses(spec: dict[str, Any]) -> dict[str, list[float]]:
    """By system: the loss on text that was not seen, every so many steps."""
    return {name: trained(spec, *build(spec, system)) for name, system in spec["systems"].items()}


def trained(spec: dict[str, Any], made: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    unseen = text(torch.Generator().manual_seed(99), 64)
    found = []
    for count in range(1, spec["steps"] + 1):
        ids = text(generator, 4)
        optimizer.zero_grad()
        made(ids, labels=ids).loss.backward()
        optimizer.step()
        if count % spec["every"] == 0:
            with torch.no_grad():
                found.append(float(made(unseen, labels=unseen).loss))
    return found


def text(generator: torch.Generator, rows: int, length: int = 32) -> Tensor:
    """Of a Markov chain with four followers of each token: 0.91 nats each, once the chain is known."""
    table = torch.randint(0, TOKENS, (TOKENS, 4), generator=torch.Generator().manual_seed(1))
    likely = torch.tensor([0.7, 0.15, 0.1, 0.05])
    found = [torch.randint(0, TOKENS, (rows,), generator=generator)]
    for _ in range(length - 1):
        found.append(table[found[-1], torch.multinomial(likely, rows, True, generator=generator)])
    return torch.stack(found, 1)


if __name__ == "__main__":
    main(measure)
