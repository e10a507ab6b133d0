"""Section mixers of `run.py`: recurrent mixers over a sequence, beside their specification and the kernels of packages,
and decode steps of models of them in a CUDA graph.

Sequences are computed in two calls, the second from the state that the first left. Sizes are those of a layer of
Qwen3-Next (delta rule), Kimi Linear (with a decay of each key channel), Nemotron-H (Mamba 2), Falcon-Mamba (Mamba 1)
and RecurrentGemma (RG-LRU). Packages that are installed are used as in the runtime; rows say whether they were.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

import rewriter.runtime as runtime
from benchmarks.gpu.decode import randomized, read_bytes
from benchmarks.gpu.decode_step import begin, eagerly, generated
from benchmarks.gpu.report import Row, Scale, read_rate, short
from benchmarks.gpu.tiles import factors
from rewriter.emit.module import emit_runtime_module
from rewriter.ir import ops
from rewriter.runtime import Context, StateSpec, StaticCache
from rewriter.runtime.compiled import compile_segments
from rewriter.runtime.generation.decode_step import DecodeStep, Sampling
from rewriter.runtime.loading import build
from rewriter.runtime.mixers import kernels
from rewriter.tracing import trace

TOKENS, TIMED = 640, 4096  # beside the specification, a loop over tokens; of what is timed
# of the errors of the specification: chunks are summed in another order, and kernels of packages round their operands
MOST = 4.0, 3.0
VOCABULARY = 8192
_LIKE = {"hidden_size": 2048, "vocab_size": VOCABULARY, "num_hidden_layers": 12, "tie_word_embeddings": False}
_TINY = {"hidden_size": 64, "vocab_size": 256, "num_hidden_layers": 4}
# of decode steps: (class of transformers, what is set of its default configuration at full size, and in a dry run)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama": (
        "LlamaConfig",
        {"intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
        {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "Qwen3.5": (
        "Qwen3_5TextConfig",
        {"intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256},
        {
            "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "Mamba 2": (
        "Mamba2Config",
        {"num_heads": 64, "head_dim": 64, "n_groups": 1, "state_size": 128, "num_hidden_layers": 24},
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A call of the mixer `name` for a batch of one; `shapes` of its tensors, S where tokens are."""

    what: str
    name: str
    shapes: tuple[tuple[Any, ...], ...]
    state: StateSpec
    decays: int | None  # the argument that has to be at most 0
    tokens: int = 1  # the dimension of tokens in what it returns
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self, length: int, device: torch.device) -> list[Tensor]:
        """In fp64, normal; decays and rates between −1 and 0, or 0 and 1."""
        random = torch.Generator().manual_seed(length)
        sizes = ([length if n == "S" else n for n in shape] for shape in self.shapes)
        made = [torch.randn(size, generator=random, dtype=torch.float64) for size in sizes]
        if self.decays is not None:
            made[self.decays] = -made[self.decays].sigmoid()
        if self.name == "delta_rule":
            made[4] = made[4].sigmoid()
        return [x.to(device) for x in made]

    def part(self, inputs: list[Tensor], start: int, length: int) -> list[Tensor]:
        at = [shape.index("S") if "S" in shape else None for shape in self.shapes]
        return [x if dim is None else x.narrow(dim, start, length) for x, dim in zip(inputs, at, strict=True)]

    def run(self, inputs: list[Tensor], ctx: Context | None) -> Tensor:
        of = ops if ctx is None else runtime
        found: Tensor = getattr(of, self.name)(*inputs, ctx, slot=0, **self.options)
        return found

    def in_two_calls(self, inputs: list[Tensor], length: int, dtype: torch.dtype) -> Tensor:
        device = inputs[0].device
        cache, first = StaticCache([self.state], 1, length, dtype, device), length * 5 // 8
        contexts = Context(cache), Context(cache, torch.tensor(first, device=device))
        parts = self.part(inputs, 0, first), self.part(inputs, first, length - first)
        return torch.cat([self.run(x, ctx) for x, ctx in zip(parts, contexts, strict=True)], self.tokens)


def cases(scale: Scale) -> Iterator[Case]:
    heads, groups, size, channels = scale.pick((32, 16, 128, 8192), (4, 2, 8, 16))
    B, S = 1, "S"
    for what, g in (("delta rule", (B, S, heads)), ("delta rule, decays per key channel", (B, S, heads, size))):
        shapes = ((B, S, groups, size), (B, S, groups, size), (B, S, heads, size), g, (B, S, heads))
        state = StateSpec((heads, size, size), True)
        yield Case(what, "delta_rule", shapes, state, 3, options={"l2norm": True, "scale": size**-0.5})
    n, p = scale.pick((128, 64), (4, 8))
    yield Case(
        "Mamba 2", "state_space",
        ((B, S, heads, p), (B, S, heads), (heads,), (B, S, 8 if heads > 8 else 2, n), (B, S, 8 if heads > 8 else 2, n),
         (heads,), (heads,)),
        StateSpec((heads, p, n), True), 2, options={"softplus": True, "limit": (0.0, float("inf"))},
    )  # fmt: skip
    yield Case(
        "Mamba 1", "selective_scan",
        ((B, channels, S), (B, channels, S), (channels, 16), (B, 16, S), (B, 16, S), (channels,), (B, channels, S),
         (channels,)),
        StateSpec((channels, 16), True), 2, 2, {"softplus": True},
    )  # fmt: skip
    yield Case("RG-LRU", "linear_scan", ((B, S, channels), (B, S, channels)), StateSpec((channels,), True), 1)
    yield Case(
        "convolution", "causal_conv", ((B, channels, S), (channels, 4), (channels,)), StateSpec((channels, 3), False),
        None, 2, {"activation": "silu"},
    )  # fmt: skip


def mixing(scale: Scale) -> None:
    length, timed = scale.pick(TOKENS, 24), scale.pick(TIMED, 32)
    errors = scale.table(
        f"Mixers over {length} tokens in two calls: errors against fp64, beside the specification in the same dtype",
        ("mixer", "dtype", "by", "greatest error of o and gradients", "× greatest", "× typical", "result"),
    )
    times = scale.table(
        f"Mixers over {timed} tokens, bf16: time of a call", ("mixer ", "by ", "ms", "ms, plain form", "result")
    )
    for case in cases(scale):
        for dtype in (torch.float32, torch.bfloat16):
            errors.attempt(case.what, functools.partial(error_row, scale, case, length, dtype))
        times.attempt(case.what, functools.partial(time_row, scale, case, timed))


def used(call: Callable[[], Tensor]) -> tuple[Tensor, str]:
    """(what `call` returns, the package whose kernel computed it)."""
    found: list[str] = []
    lookup = kernels._kernel

    def kernel(module: str, *rest: Any) -> Any:
        got = lookup(module, *rest)
        found.extend([module.partition(".")[0]] * (got is not None))
        return got

    with mock.patch.object(kernels, "_kernel", kernel):
        return call(), found[0] if found else "rewriter"


def error_row(scale: Scale, case: Case, length: int, dtype: torch.dtype) -> Row:
    """Outputs of two calls, and gradients of one, which are those of the plain form."""
    rounded = [x.to(dtype) for x in case.inputs(length, scale.device)]
    exact_in = [x.double() for x in rounded]
    with torch.no_grad():
        exact, beside = case.run(exact_in, None), case.run(rounded, None)
        found, by = used(lambda: case.in_two_calls(rounded, length, dtype))
    short_length = scale.pick(200, 24)
    grads = [
        gradients(case, case.part(inputs, 0, short_length), ctx)
        for inputs, ctx in ((rounded, Context()), (rounded, None), (exact_in, None))
    ]
    cells, wrong = factors([found, grads[0]], [beside, grads[1]], [exact, grads[2]], MOST)
    return (short(dtype), by, *cells), wrong


def gradients(case: Case, inputs: list[Tensor], ctx: Context | None) -> Tensor:
    """Of the sum of what it returns times fixed numbers, in all that it is given, as one vector."""
    given = [x.detach().clone().requires_grad_() for x in inputs]
    out = case.run(given, ctx)
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(out.shape, generator=random, dtype=torch.float64).to(out.device, out.dtype)
    found = torch.autograd.grad(out, given, weights)
    return torch.cat([x.double().flatten() / x.double().abs().max() for x in found])


def time_row(scale: Scale, case: Case, length: int) -> Row:
    inputs = [x.bfloat16() for x in case.inputs(length, scale.device)]
    with torch.no_grad():
        _, by = used(lambda: case.run(inputs, Context()))
        seconds = scale.seconds(lambda: case.run(inputs, Context()), 5)
        with mock.patch.object(kernels, "runs_kernels", return_value=False):
            plain = scale.seconds(lambda: case.run(inputs, Context()), 5)
    return (by, f"{seconds * 1e3:.3f}", f"{plain * 1e3:.3f}"), ""


def stepping(scale: Scale) -> None:
    rate = read_rate(scale)
    table = scale.table(
        f"Decode steps of models with random bf16 weights on one device; reading moves {rate / 1e9:.0f} GB/s",
        ("model", "step", "ms per token", "of reading", "weights, MB", "kernels per step", "that differ", "result"),
    )
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODELS:
            kept: dict[str, Any] = {}
            for how in ("eager", "captured", "captured, compiled"):
                table.attempt(name, functools.partial(step_row, scale, name, how, Path(scratch), rate, kept))
            kept.clear()
            torch.compiler.reset()
            if scale.cuda:
                torch.cuda.empty_cache()


def model_of(scale: Scale, name: str, directory: Path) -> nn.Module:
    cls, full, tiny = MODELS[name]
    sizes = {**_LIKE, **full} if not scale.tiny else {**_TINY, **tiny}
    config = getattr(transformers, cls)(**sizes, dtype="bfloat16")
    path = directory / f"{name.replace(' ', '').replace('.', '')}.py"
    path.write_text(emit_runtime_module(trace(config)), encoding="utf-8")
    model = randomized(build(path, "Model", None), scale.device).eval()
    for key, x in model.named_parameters():
        if key.endswith(("A_log", "dt_bias")):  # as trained ones: a decay is neither 0 nor 1
            x.data.uniform_(-3, 0)
    return model


def step_row(scale: Scale, name: str, how: str, directory: Path, rate: float, kept: dict[str, Any]) -> Row:
    """Three prompts, padded; then the time of steps of one row."""
    if "model" not in kept:
        kept["model"] = model_of(scale, name, directory)
    model, count, lengths = kept["model"], scale.pick(48, 3), (3, 17, 9)
    if "compiled" in how:
        compile_segments(model, backend=scale.pick("inductor", "eager"))
    step = DecodeStep(model, len(lengths), max(lengths) + count + 1)
    found = []
    for again in range(2):
        begin(scale, step, lengths, Sampling())
        if how == "eager" and not again:
            eagerly(step)
            begin(scale, step, lengths, Sampling())
        found.append(generated(step, count))
    expected = kept.setdefault("tokens", found[0]) if "compiled" not in how else found[0]
    differ = sum(int((torch.tensor(x) != torch.tensor(expected)).sum()) for x in found)
    wrong = [f"{differ} tokens differ"] if differ else []
    if len({tuple(row) for row in found[0]}) == 1:
        wrong.append("all prompts are continued alike")
    if scale.cuda and not step.how.startswith("eager" if how == "eager" else "captured"):
        wrong.append(f"{step.how}, expected {how}")
    seconds, kernel_count = seconds_of(scale, DecodeStep(model, 1, 1024), how == "eager")
    share = (read_bytes(model) + 2 * sum(x.nbytes for x in step.cache.states)) / seconds / rate
    cells = f"{seconds * 1e3:.3f}", f"{share:.0%}", f"{sum(x.nbytes for x in model.parameters()) / 1e6:.0f}"
    return (how, *cells, kernel_count or "–", differ), ", ".join(wrong)


def seconds_of(scale: Scale, step: DecodeStep, eager: bool) -> tuple[float, int]:
    """(seconds of a step of one row by the wall clock, kernels of it)."""
    steps, prompt, found = scale.pick(64, 2), (scale.pick(256, 8),), []
    for warm in (True, *[False] * scale.pick(3, 1)):
        begin(scale, step, prompt, Sampling())
        if warm and eager:
            eagerly(step)
        scale.synchronize()
        start = time.perf_counter()
        for _ in range(3 if warm else steps):
            step.run()
        scale.synchronize()
        if not warm:
            found.append((time.perf_counter() - start) / steps)
    return statistics.median(found), len(scale.kernels(step.run))
