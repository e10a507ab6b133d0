"""Needs of a run of `rewrite adapt` on GPUs: steps, bytes of each GPU, and hours. Nothing here was run on GPUs.

    python -m benchmarks.healing.budget llama-3.1-8b --nodes 2 --gpus 8 --fabric h100-2x8-ib --length 4096 \
        --tokens 33000000 --tokens 3000000000

Bytes are counted: fp32 weights, gradients and Adam's two moments of the student, and fp32 weights of the teacher, each
over the ranks that share it (N parameters, G GPUs of a node, W in all). Activations and gathered layers are not in it.

    --zero 3, plus-plus    (4 + 4 + 8 + 4) N / W
    --zero node-local      (4 + 4) N / G + (4 + 4 + 8) N / W

Hours are predicted: forward passes of a row by the kernels of the fabric's device (`rewrite predict --tp 1 --eager
--all-logits`), four of them per row: the student's, two for its backward, and the teacher's; five if activations are
computed again. Messages between GPUs, the optimizer's step and reading data are not in it, so a run takes longer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.predict.backtest_points import read_models, traced
from rewriter import Cluster, Workload, api
from rewriter.adapt.schedule import Budget
from rewriter.fabric import load_fabric

FORWARDS, CHECKPOINTED = 4, 5
SHARDED = ("3", "plus-plus", "node-local")


@dataclass(frozen=True)
class Job:
    """`nodes` of `gpus` that train a model of `parameters` and `width`, in rows of `length` tokens."""

    parameters: int
    width: int
    nodes: int
    gpus: int
    length: int

    @property
    def world(self) -> int:
        return self.nodes * self.gpus

    def state(self, zero: str) -> float:
        """Bytes of weights, gradients, optimizer and teacher on each GPU."""
        if zero == "node-local":
            return self.parameters * (8 / self.gpus + 16 / self.world)
        return self.parameters * 20 / self.world

    @property
    def loading(self) -> int:
        """Bytes of the whole model in fp32: on each GPU, and on the CPU for each process, before it is sharded."""
        return 4 * self.parameters

    def step(self, tokens: int) -> int:
        """Tokens of an optimizer step of a run of `tokens`."""
        return Budget(tokens).rows(self.length, self.world) * self.length

    def hours(self, tokens: int, forward: float, forwards: int = FORWARDS) -> float:
        """`forward`: seconds of the forward pass of a row on one GPU."""
        return tokens / self.length / self.world * forwards * forward / 3600


def parameters(model: str) -> tuple[int, int]:
    """Parameters and width of a model of benchmarks/predict/models.yaml."""
    fields = dict(read_models()[model])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in made.parameters()), int(config.hidden_size)


def forward_seconds(model: str, length: int, fabric: str) -> float:
    """The predicted forward pass of a row on one GPU, logits of every token included."""
    workload = Workload(tp=1, prompt=length, generate=1, graphed=False, all_logits=True)
    found = api.predict(traced(model, "bfloat16"), ["tensor-parallel"], workload, Cluster(fabric))
    return found.predictions[0].prefill.seconds


def table(job: Job, forward: float, tokens: Sequence[int], memory: float) -> str:
    """The printed lines. `memory`: bytes of a GPU."""

    def needs(size: float) -> str:
        return f"{size / 1e9:.1f} GB on each GPU" + (f", which has {memory / 1e9:.0f}" if size > memory else "")

    said = [
        f"{job.parameters / 1e9:.2f}e9 parameters, {job.nodes} nodes of {job.gpus} GPUs, rows of {job.length:,} tokens",
        f"loading: {needs(job.loading)}; {job.loading * job.gpus / 1e9:.0f} GB of memory in a node",
        *(f"state, --zero {zero}: {needs(job.state(zero))}" for zero in SHARDED),
        f"a forward pass of a row, predicted: {forward * 1e3:.0f} ms",
    ]
    for count in tokens:
        step, rate = job.step(count), Budget(count, job.width).rate
        hours = [job.hours(count, forward, forwards) for forwards in (FORWARDS, CHECKPOINTED)]
        said.append(
            f"{count:,} tokens: {max(1, count // step):,} steps of {step:,} tokens, learning rate {rate:g}; "
            f"predicted: {hours[0]:.2f} h, with gradient_checkpointing {hours[1]:.2f} h"
        )
    return "\n".join(said)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name of benchmarks/predict/models.yaml")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=8, help="of a node")
    parser.add_argument("--fabric", default="h100-2x8-ib")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--tokens", type=int, action="append", required=True)
    given = parser.parse_args(arguments)
    job = Job(*parameters(given.model), given.nodes, given.gpus, given.length)
    memory = load_fabric(given.fabric).device.memory
    print(table(job, forward_seconds(given.model, given.length, given.fabric), given.tokens, memory))


if __name__ == "__main__":
    main()
