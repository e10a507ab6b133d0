"""Work of a real rank, under gloo, NCCL or the emulated backend: emitted modules, whose passes are timed.

Prefill of prompts, and decode steps after as many tokens as a generation has in the mean; see `Spec`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import nn
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.device_mesh import init_device_mesh

from rewriter.common.processes import rank_main
from rewriter.fabric import Call, Delay
from rewriter.predict.workload import Workload
from rewriter.runtime.attention.mesh import sequence_mesh
from rewriter.runtime.collectives.small_sums import connect_small_sums
from rewriter.runtime.compiled import compile_segments
from rewriter.runtime.generation.decode_step import DecodeStep, Sampling
from rewriter.runtime.loading import build, fill
from rewriter.runtime.streams import replay_of
from rewriter.weights.references import RankWeights

STEPS = 8  # decode steps timed together


@dataclass(frozen=True)
class Variant:
    """One recipe's module. `weights`: by rank the safetensors file; a rank that has none gets random ones of `dtype`.
    `tp`: ranks that share heads and channels; `grid`: (heads, rows, columns) of those that share tokens."""

    recipe: str
    module: str
    weights: dict[str, str]
    dtype: str
    tp: int
    grid: tuple[int, int, int] | None


@dataclass(frozen=True)
class Spec:
    """Measurements that a rank makes.

    `job`: what is generated. `store`: where real ranks meet, the beginning of a file's path. `emulation`: values of an
    `EmulationConfig`, None where all ranks are real; `silent`: each module is measured once more with emulated
    collectives that take no time. `cores`: the CPU core of each rank, none for free choice. `repetitions`: of each pass
    at least, after two that warm up. `largest`: where it is not 0, collectives of at most these bytes are measured
    instead, and with `messages` messages between ranks; the result is a fabric's YAML.
    """

    variants: tuple[Variant, ...]
    job: Workload
    device: str
    store: str
    emulation: dict[str, Any] | None
    silent: bool
    cores: tuple[int, ...]
    repetitions: int
    largest: int = 0
    messages: bool = False


SPEC = TypeAdapter(Spec)  # from the JSON values of its fields; others are left out


class Silent:
    """A model of delays in which nothing takes any time: what is left is computing and launching."""

    def delay(self, call: Call) -> Delay:
        return Delay(0.0, 0.0, ())


def main(values: dict[str, Any], rank: int) -> dict[str, Any]:
    spec = SPEC.validate_python(values)
    if spec.cores:
        os.sched_setaffinity(0, {spec.cores[rank % len(spec.cores)]})  # before any thread: gloo's own inherit it
        torch.set_num_threads(1)
    device = torch.device(spec.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if spec.largest:
        return _calibrated(spec, rank, device)
    return {v.recipe: _passes(spec, v, rank, device) for v in spec.variants}


def _calibrated(spec: Spec, rank: int, device: torch.device) -> dict[str, Any]:
    from rewriter.predict.calibration import COLLECTIVES, KINDS, calibrated

    _join(spec, 0, rank, device, silent=False)
    try:
        kinds = KINDS if spec.messages else COLLECTIVES
        text, taken = calibrated(Path("this-machine.yaml"), spec.largest, kinds=kinds)
        return {"fabric": text, "taken": taken}
    finally:
        dist.destroy_process_group()


def _passes(spec: Spec, variant: Variant, rank: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each "prefill" and of each "decode" step, and of each "silent prefill" and "silent decode"."""
    passes: dict[str, list[float]] = {}
    for silent in (False, True) if spec.silent else (False,):
        _join(spec, spec.variants.index(variant), rank, device, silent)
        try:
            timed = _measure(spec, variant, rank, device)
        finally:
            dist.destroy_process_group()
        passes |= {f"silent {kind}" if silent else kind: seconds for kind, seconds in timed.items()}
    return passes


def _join(spec: Spec, job: int, rank: int, device: torch.device, silent: bool) -> None:
    """A process group; real ranks of each `job` meet in a separate file."""
    if spec.emulation is not None:
        from rewriter.emulation import EmulationConfig

        options: Any = Silent() if silent else EmulationConfig.of(**spec.emulation)
        dist.init_process_group("emulated", rank=rank, world_size=spec.job.tp, store=HashStore(), pg_options=options)
        return
    store = FileStore(f"{spec.store}-{job}", spec.job.tp)
    backend, only = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, rank=rank, world_size=spec.job.tp, store=store, device_id=only)


@torch.no_grad()
def _measure(spec: Spec, variant: Variant, rank: int, device: torch.device) -> dict[str, list[float]]:
    model, job = _model(spec, variant, rank, device), spec.job
    ids = torch.zeros(job.batch, job.prompt, dtype=torch.int64, device=device)
    step = DecodeStep(model, job.batch, max(job.prompt + job.generate, job.past + STEPS), dist.group.WORLD)
    begin = functools.partial(step.begin, first_valid=None, sampling=Sampling(), seed=0, ends=(), pad=0)
    graphed = job.graphed and device.type == "cuda"
    if graphed:
        compile_segments(model)

    def prefill() -> None:
        step.prefill(ids)

    def steps() -> None:
        for _ in range(STEPS):
            step.run()

    begin(job.prompt)
    first = _timed(replay_of(prefill, device) if graphed else prefill, device)

    def decoded() -> float:
        begin(job.past)
        return _timed(steps, device)()

    first(), decoded()
    seconds: dict[str, list[float]] = {"prefill": [], "decode": []}
    for _ in range(_repetitions(spec.repetitions, first() + decoded(), device)):
        seconds["prefill"].append(first())
        seconds["decode"].append(decoded() / STEPS)
    dist.barrier()
    return seconds


def _repetitions(fewest: int, seconds: float, device: torch.device) -> int:
    """Number of repetitions of passes that take `seconds`, the same on all ranks: for a second, within limits."""
    longest = torch.tensor([seconds], device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return max(fewest, min(10 * fewest, round(1 / float(longest))))


def _timed(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    def timed() -> float:
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return timed


def _model(spec: Spec, variant: Variant, rank: int, device: torch.device) -> nn.Module:
    if variant.grid is None:
        mesh = init_device_mesh(device.type, (spec.job.tp,), mesh_dim_names=("tp",))
    else:
        mesh = sequence_mesh(device.type, variant.grid, tensor_parallel=variant.tp)
    model = build(Path(variant.module), "Model", mesh)
    shard = variant.weights.get(str(rank % variant.tp))
    if shard is None:
        _randomize(model, device, getattr(torch, variant.dtype))
    else:
        fill(model, RankWeights.of_file(Path(shard)), device=device)
    if "tp" in (mesh.mesh_dim_names or ()):
        connect_small_sums(mesh.get_group("tp"), device)
    return model.eval()


def _randomize(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Weights that keep activations finite. Not zeros: chips compute those faster than a model's."""
    torch.manual_seed(0)
    made: dict[int, nn.Parameter] = {}  # a tied weight stays one
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                values = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(0, 0.02)
                made[id(parameter)] = nn.Parameter(values, requires_grad=False)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device))


if __name__ == "__main__":
    rank_main(main)
