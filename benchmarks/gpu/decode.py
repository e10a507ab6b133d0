"""Section decode of `run.py`: decode steps of 70B-like layers on one rank of eight, whose peers are emulated.

Layers of Llama 3 70B, random bf16 weights, a small vocabulary so that layers are what is timed. A rank reads 213.9 MB
in each layer, which no cache holds. Sums take as long as NCCL's on 8 H100 (`rewriter.fabric`), on the stream where
NCCL's would be. Recipes: standard, ladder, bound (every collective left out), and the ladder in two branches, whose
tokens have to be the ladder's. Times are of the wall clock.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig

from benchmarks.gpu.decode_step import eagerly
from benchmarks.gpu.emulated import RANKS, job
from benchmarks.gpu.report import Row, Scale, Table, read_rate
from rewriter import api
from rewriter.emit.module import emit_runtime_module
from rewriter.fabric import DelayModel, load_fabric
from rewriter.ir import Program
from rewriter.runtime.compiled import compile_segments
from rewriter.runtime.generation.decode_step import DecodeStep, Sampling
from rewriter.runtime.loading import build
from rewriter.tracing import trace

# the package's recipes, and what is set in them
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "standard": ("tensor-parallel", {}),
    "ladder": ("ladder", {}),
    "bound": ("upper-bound", {}),
    "ladder, two branches": ("ladder", {"overlap.branches": 2}),
}
LADDERS = ("ladder", "ladder, two branches")
PREFETCH = "standard, next weights into L2"
ALIKE = {"ladder, two branches": "ladder", PREFETCH: "standard"}
PAST = 1024  # tokens in the cache
COLUMNS = (
    "recipe, step",
    "ms per token",
    "µs per layer",
    "of reading",
    "host µs per step",
    "kernels per step",
    "tokens that differ",
    "result",
)


@dataclass(frozen=True)
class Size:
    """Of Llama 3 70B, but for layers and vocabulary."""

    hidden: int = 8192
    feed_forward: int = 28672
    heads: int = 64
    kv_heads: int = 8
    layers: int = 16
    vocabulary: int = 8192


@dataclass
class Bench:
    """What all rows share. `seconds`: of a token, by (recipe, step). `tokens`: of the eager step, by recipe. `batch`:
    rows that are generated together."""

    scale: Scale
    size: Size
    programs: dict[str, Program]
    rate: float
    directory: Path
    seconds: dict[tuple[str, str], float]
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    batch: int = 1
    timed_together: int = 48

    @property
    def past(self) -> int:
        return int(self.scale.pick(PAST, 8))

    @property
    def steps(self) -> int:
        return int(self.scale.pick(self.timed_together, 2))


def decoding(scale: Scale) -> None:
    size = scale.pick(Size(), Size(64, 128, 16, 8, 3, 64))
    rate = read_rate(scale)
    table = scale.table(
        f"Decode steps, rank 0 of {RANKS}, peers emulated, {size.layers} layers of Llama 3 70B, bf16, batch 1, "
        f"{scale.pick(PAST, 8)} tokens in the cache; reading moves {rate / 1e9:.0f} GB/s",
        COLUMNS,
    )
    with tempfile.TemporaryDirectory() as scratch, job(delays()):
        bench = Bench(scale, size, programs(size), rate, Path(scratch), {})
        for step in ("captured", "captured, compiled"):
            for recipe in RECIPES:
                recipe_rows(bench, table, recipe, step)
        for ladder in LADDERS:
            for step in ("eager", "captured", "captured, compiled"):
                table.attempt(f"{ladder} beside standard, {step}", functools.partial(gain_row, bench, ladder, step))


def config(size: Size) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def programs(size: Size) -> dict[str, Program]:
    """By recipe, on RANKS ranks; from a configuration, without weights."""
    traced = trace(config(size))
    return {recipe: rewritten(traced, recipe) for recipe in RECIPES}


def rewritten(traced: Program, recipe: str) -> Program:
    name, options = RECIPES[recipe]
    return api.rewrite(traced, name, tp=RANKS, set=options)


def delays() -> DelayModel:
    """NCCL's on 8 H100 with NVLink, from CUDA graphs."""
    return load_fabric("h100-nvlink").delay_model("nccl", graphed=True)


def recipe_rows(bench: Bench, table: Table, recipe: str, step: str) -> None:
    """Rows of one model: `step`, and before "captured" eager."""
    models: list[nn.Module] = []

    def made() -> nn.Module:
        if not models:
            models.append(model_of(bench, recipe))
            if "compiled" in step:
                torch._dynamo.config.fail_on_recompile_limit_hit = True
                compile_segments(models[0], backend=bench.scale.pick("inductor", "eager"))
        return models[0]

    for how in ("eager", step) if step == "captured" else (step,):
        table.attempt(f"{recipe}, {how}", lambda how=how: decode_row(bench, made(), recipe, how))
    models.clear()
    torch.compiler.reset()
    if bench.scale.cuda:
        torch.cuda.empty_cache()


def model_of(bench: Bench, recipe: str) -> nn.Module:
    """The emitted module with random weights, on the device."""
    path = bench.directory / f"{recipe}.py"
    path.write_text(emit_runtime_module(bench.programs[recipe]), encoding="utf-8")
    return built(bench.scale, path)


def built(scale: Scale, path: Path) -> nn.Module:
    mesh = init_device_mesh(scale.device.type, (RANKS,), mesh_dim_names=("tp",))
    return randomized(build(path, "Model", mesh), scale.device).eval()


def randomized(model: nn.Module, device: torch.device) -> nn.Module:
    """Weights that keep activations finite, norms' near 1. Not zeros: a GPU computes those faster than a model's."""
    random = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for name, x in module.named_parameters(recurse=False):
            values = torch.empty(x.shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=random)
            setattr(module, name, nn.Parameter(values + (x.dim() == 1), requires_grad=False))
        for name, x in module.named_buffers(recurse=False):
            setattr(module, name, x.to(device))
    return model


def decode_row(bench: Bench, model: nn.Module, recipe: str, how: str) -> Row:
    """A captured step has to give the eager step's tokens, or, where its recipe has none yet, those of the recipe that
    computes the same (ALIKE). Compiled segments round otherwise."""
    scale, expected = bench.scale, None
    like = recipe if how != "eager" and recipe in bench.tokens else ALIKE.get(recipe, recipe)
    if "compiled" not in how:
        expected = bench.tokens.get(like)
    step = DecodeStep(model, bench.batch, bench.past + bench.steps + 2, dist.group.WORLD)
    begin(bench, step)
    if how == "eager":
        eagerly(step)
    else:
        step.run()
    timed(bench, step)
    rounds = scale.pick(5 if how != "eager" else 1, 1)  # eager ones wait for Python
    tokens = step.produced[: bench.steps].T.tolist()
    seconds = statistics.median(timed(bench, step) for _ in range(rounds)) / bench.steps
    bench.seconds[recipe, how] = seconds
    begin(bench, step)
    host = statistics.median(scale.host_seconds(step.run) for _ in range(scale.pick(20, 1)))
    kernels = len(scale.kernels(step.run))
    differ = int((torch.tensor(expected) != torch.tensor(tokens)).sum()) if expected else 0
    compared = str(differ) if expected else "–"
    if how == "eager":
        bench.tokens[recipe] = tokens
    wrong = [f"{differ} tokens differ from {'the eager step' if like == recipe else like}'s"] if differ else []
    if not step.how.startswith(wanted := named(scale, how)):
        wrong.append(f"{step.how}, expected {wanted}")
    if step.broken.any():
        wrong.append("logits are NaN")
    share = read_bytes(model) / seconds / bench.rate
    cells = f"{seconds * 1e3:.3f}", f"{seconds / bench.size.layers * 1e6:.1f}", f"{share:.0%}"
    return (*cells, f"{host * 1e6:.0f}", kernels or "–", compared), ", ".join(wrong)


def named(scale: Scale, how: str) -> str:
    """How `DecodeStep.how` begins. A CPU captures nothing."""
    if how == "eager":
        return "eager: events" if scale.cuda else "eager"
    if scale.cuda:
        return "captured"
    return "compiled segments" if "compiled" in how else "eager"


def begin(bench: Bench, step: DecodeStep) -> None:
    """As after a prompt of `past` tokens, always the same ones."""
    step.begin(bench.past, None, Sampling(), 0, (), 0)
    random = torch.Generator(bench.scale.device).manual_seed(1)
    for memory in (*step.cache.keys, *step.cache.values):
        memory.normal_(generator=random)
    step.choice.zero_()


def timed(bench: Bench, step: DecodeStep) -> float:
    """Seconds of the wall clock of `bench.steps` steps, without what begins them."""
    begin(bench, step)
    bench.scale.synchronize()
    start = time.perf_counter()
    for _ in range(bench.steps):
        step.run()
    bench.scale.synchronize()
    return time.perf_counter() - start


def read_bytes(model: nn.Module) -> int:
    """Bytes of the weights that a step reads: all but the table of embeddings, its own, of which it reads a row."""
    (table,) = (x for name, x in model.named_parameters() if "embed" in name)
    return sum(x.nbytes for x in model.parameters()) - table.nbytes


def gain_row(bench: Bench, ladder: str, step: str) -> Row:
    return (hidden(bench.seconds, ladder, step), "–", "–", "–", "–", "–"), ""


def hidden(seconds: dict[tuple[str, str], float], recipe: str, step: str) -> str:
    """How much of what communication costs `recipe` hides: (standard − recipe) / (standard − bound)."""
    compared = ("standard", recipe, "bound")
    if missing := [name for name in compared if (name, step) not in seconds]:
        raise ValueError(f"no time of {', '.join(missing)}")
    standard, rewired, bound = (seconds[name, step] for name in compared)
    exposed = standard - bound
    text = f"hides {(standard - rewired) / exposed:.0%}" if exposed > 0 else "nothing is exposed"
    return f"{text} of {exposed * 1e3:.3f} ms"
