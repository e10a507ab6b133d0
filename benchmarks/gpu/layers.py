"""Sections decode-layers, hybrid-layers and prefill-layers of `run.py`: few layers of Llama 3 70B, or of Qwen3.5 27B,
on one rank of eight, whose peers are emulated: how much of its sums each recipe hides, at two batches of generated
tokens and in a prompt.

Beside standard, which waits for each sum, ladder, and bound (no sums): ladder in two branches, its MLP beside its
attention; and `PREFETCH`: standard, exact, while each sum travels the next weights are read into the L2 cache.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen3_5TextConfig

from benchmarks.gpu.decode import (
    COLUMNS,
    LADDERS,
    PREFETCH,
    Bench,
    Size,
    config,
    decode_row,
    delays,
    hidden,
    model_of,
    rewritten,
)
from benchmarks.gpu.emulated import RANKS, Constant, job
from benchmarks.gpu.report import Row, Scale, Table, read_rate
from rewriter.fabric import Delay
from rewriter.runtime.collectives.differentiable import all_reduce_start, all_reduce_wait
from rewriter.runtime.compiled import compile_segments
from rewriter.runtime.context import Context, positions
from rewriter.tracing import trace

RECIPES = ("standard", "ladder", "bound")
TWO_BRANCHES = LADDERS[1]
BATCHES = (1, 64)
LAYERS = 8
STEPS = 16
HOW = ("eager", "captured", "captured, compiled")
PROMPT = 4096  # tokens: a sum of their hidden states moves 64 MiB
CHUNK = 8192  # bytes that one instruction asks for
LINK = 25e9  # bytes per second and direction of a PCIe 4.0 link of 16 lanes, about what NCCL reaches on one


def size(scale: Scale) -> Size:
    return scale.pick(replace(Size(), layers=LAYERS), Size(64, 128, 16, 8, 4, 64))


HYBRID = {
    "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48,
}  # fmt: skip
TINY_HYBRID = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16, "linear_num_key_heads": 8,
    "linear_num_value_heads": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


def hybrid(size: Size) -> Qwen3_5TextConfig:
    """Qwen3.5 27B's sizes but for layers and vocabulary: three gated delta nets to one layer of attention."""
    sizes = HYBRID if size.hidden == Size.hidden else TINY_HYBRID
    more = {"num_key_value_heads": 4, "num_hidden_layers": size.layers, "vocab_size": size.vocabulary}
    return Qwen3_5TextConfig(**sizes, **more, dtype="bfloat16")


def programs(scale: Scale, of: Callable[[Size], PreTrainedConfig] = config) -> dict[str, Any]:
    traced = trace(of(size(scale)))
    found = {recipe: rewritten(traced, recipe) for recipe in (*RECIPES, TWO_BRANCHES)}
    return found | {PREFETCH: found["standard"]}


def decoding(scale: Scale) -> None:
    decode_rows(scale, "Llama 3 70B", programs(scale), (TWO_BRANCHES, PREFETCH))


def decoding_hybrid(scale: Scale) -> None:
    decode_rows(scale, "Qwen3.5 27B", programs(scale, hybrid), ())


def decode_rows(scale: Scale, name: str, made: dict[str, Any], more: tuple[str, ...]) -> None:
    """Rows of RECIPES, and of `more` where steps are captured."""
    rate = read_rate(scale)
    with tempfile.TemporaryDirectory() as scratch, job(delays()):
        benches = {
            batch: Bench(scale, size(scale), made, rate, Path(scratch), {}, batch=batch, timed_together=STEPS)
            for batch in scale.pick(BATCHES, (1, 2))
        }
        table = scale.table(
            f"Decode steps, rank 0 of {RANKS}, peers emulated, {size(scale).layers} layers of {name}, bf16, "
            f"{benches[1].past} tokens in the cache; reading moves {rate / 1e9:.0f} GB/s",
            COLUMNS,
        )
        models: dict[str, nn.Module] = {}
        for how in HOW:
            for recipe in RECIPES if how == "eager" else (*RECIPES, *more):
                step_rows(table, benches, models, recipe, how)
            for batch, bench in benches.items():
                for recipe in ("ladder", *more) if how != "eager" else ():
                    row = functools.partial(hidden, bench.seconds, recipe, how)
                    table.attempt(f"{recipe}, {how}, batch {batch}", lambda row=row: ((row(), *"–" * 5), ""))


def step_rows(table: Table, benches: dict[int, Bench], models: dict[str, nn.Module], recipe: str, how: str) -> None:
    """Rows of one recipe for every batch. `models` are made when they are first needed."""

    def row(bench: Bench) -> Row:
        if recipe not in models:
            models[recipe] = model_of(bench, recipe)
            if recipe == PREFETCH:
                prefetching(models[recipe])
        if "compiled" in how and "compiles_with" not in vars(models[recipe]):
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            compile_segments(models[recipe], backend=bench.scale.pick("inductor", "eager"))
        return decode_row(bench, models[recipe], recipe, how)

    for batch, bench in benches.items():
        table.attempt(f"{recipe}, {how}, batch {batch}", functools.partial(row, bench))


def prefetching(model: nn.Module) -> None:
    """Let `model`, whose attention and MLP are summed one after the other, read the next block's weights into the L2
    cache while a sum travels: its module's `all_reduce` is replaced."""
    layers: Any = model.get_submodule("model.layers")
    blocks = [block for layer in layers for block in (layer.self_attn, layer.mlp)]
    # sums of a step: the embedding's, then each block's; behind the last one come the final norm and the head
    following = [[x for x in block.parameters() if x.dim() == 2] for block in blocks]
    vars(sys.modules[type(model).__module__])["all_reduce"] = Prefetching(following)


class Prefetching:
    """`all_reduce`, beside which the weights `following[i]` of the i-th sum are fetched, half an L2 cache of them."""

    def __init__(self, following: list[list[Tensor]]) -> None:
        self.following, self.calls = following, 0
        self.stream: torch.cuda.Stream | None = None
        self.fetched: torch.cuda.Event | None = None

    def __call__(self, x: Tensor, group: Any, name: str = "", **options: Any) -> Tensor:
        at = self.calls % (len(self.following) + 1)
        self.calls += 1
        if not x.is_cuda:
            return all_reduce_wait(all_reduce_start(x, group, name, **options))
        current = torch.cuda.current_stream()
        if self.fetched is not None:
            current.wait_event(self.fetched)  # long past; a graph may not leave a stream behind
            self.fetched = None
        pending = all_reduce_start(x, group, name, **options)
        if at < len(self.following):
            if self.stream is None:
                self.stream = torch.cuda.Stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                fetch(self.following[at], torch.cuda.get_device_properties(x.device).L2_cache_size // 2)
                self.fetched = torch.cuda.Event()
                self.fetched.record()
        return all_reduce_wait(pending)


def fetch(weights: list[Tensor], most: int) -> None:
    """Ask for the first `most` bytes of `weights`, in order, to be read into the L2 cache."""
    for weight in weights:
        chunks = min(weight.nbytes, most) // CHUNK
        most -= chunks * CHUNK
        if chunks:
            _prefetch_kernel()[(-(-chunks // 32),)](weight, chunks, CHUNK=CHUNK, num_warps=1)


@functools.cache
def _prefetch_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def prefetch(weight, chunks, CHUNK: tl.constexpr):
        i = tl.program_id(0) * 32 + tl.arange(0, 32)
        # lanes without a chunk ask for the last one again
        at = weight.to(tl.int64) + tl.minimum(i, chunks - 1).to(tl.int64) * CHUNK
        tl.inline_asm_elementwise(
            "{ cp.async.bulk.prefetch.L2.global [$1], 8192; mov.u32 $0, 0; }",
            "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    return prefetch


@dataclass(frozen=True)
class Ring:
    """Sums of n bytes as a ring over links of `LINK` bytes per second takes them, on 24 blocks that read and write the
    memory as often as NCCL's do."""

    def delay(self, call: Any) -> Delay:
        seconds = 2 * (RANKS - 1) / RANKS * call.nbytes / LINK
        return Delay(seconds, seconds, ("link",), blocks=24, memory_bytes=4 * call.nbytes)


def prefilling(scale: Scale) -> None:
    """A prompt, its segments compiled; sums as long as NCCL's over NVLink, as half a layer, and as over PCIe."""
    made, tokens = programs(scale), scale.pick(PROMPT, 16)
    with tempfile.TemporaryDirectory() as scratch, job(Constant(0.0)) as engines:
        bench = Bench(scale, size(scale), made, 1.0, Path(scratch), {})
        table = scale.table(
            f"A prompt of {tokens} tokens, rank 0 of {RANKS}, peers emulated, {size(scale).layers} layers of Llama 3 "
            "70B, bf16, compiled segments; each sum moves 64 MiB",
            ("recipe, sums", "µs per layer", "of what sums cost", "result"),
        )
        models = {recipe: model_of(bench, recipe) for recipe in ("bound", "standard", *LADDERS)}
        for model in models.values():
            compile_segments(model, backend=scale.pick("inductor", "eager"))
        bound = scale.seconds(functools.partial(prompt, scale, models["bound"], tokens), 7) / size(scale).layers
        table.add("bound, none", f"{bound * 1e6:.0f}", "–")
        lasting = {
            "NVLink": delays(),
            "as long as half a layer": Constant(bound / 2, 24, 4 * (64 << 20)),
            "PCIe 4.0": Ring(),
        }
        for how, lasts in lasting.items():
            engines.change(lasts)
            found: dict[tuple[str, str], float] = {("bound", ""): bound}
            for recipe in ("standard", *LADDERS):
                row = functools.partial(prompt_row, scale, models[recipe], tokens, recipe, found)
                table.attempt(f"{recipe}, {how}", row)


def prompt(scale: Scale, model: nn.Module, tokens: int) -> Tensor:
    ids = torch.arange(tokens, device=scale.device)[None] % 64
    with torch.no_grad():
        logits: Tensor = model(ids, positions(tokens, None, 1, scale.device), Context(), logits_to_keep=1)
    return logits


def prompt_row(scale: Scale, model: nn.Module, tokens: int, recipe: str, found: dict[tuple[str, str], float]) -> Row:
    if prompt(scale, model, tokens).isnan().any():
        return ("–", "–"), "logits are NaN"
    seconds = scale.seconds(functools.partial(prompt, scale, model, tokens), 7) / size(scale).layers
    found[recipe, ""] = seconds
    share = "–" if recipe == "standard" else hidden(found, recipe, "") + " a layer"
    return (f"{seconds * 1e6:.0f}", share), ""
