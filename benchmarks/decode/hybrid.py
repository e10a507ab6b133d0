"""Decode steps and prefills of a model of gated delta nets beside a Llama of its size, both with random weights.

    python -m benchmarks.decode.hybrid [--dtypes fp32,bf16] [--rounds 5] [--threads 2] [--json FILE]

The hybrid has Qwen3.5's layers, three gated delta nets to one of attention, and about 120 million parameters. `share`
is bytes of the weights, and of states read and written, × steps per second by the read bandwidth of the same round, as
in `benchmarks.decode.run`. Exits with 1 where the hybrid's share of the compiled step is more than POINTS below the
Llama's, where something is compiled after the first generation, or where tokens differ in fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig

from benchmarks.decode.run import DTYPES, Decode, read_bandwidth, runtime_decode, transformers_decode
from rewriter import api
from rewriter.runtime import Context, StaticCache, load

POINTS = 0.10
PROMPT, TOKENS, PREFILL = 32, 64, 512
SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 32_000, "tie_word_embeddings": True}
MODELS: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(
        intermediate_size=2560, num_attention_heads=12, num_key_value_heads=4, **SIZES
    ),
    "hybrid": Qwen3_5TextConfig(
        intermediate_size=2048, num_attention_heads=6, num_key_value_heads=2, head_dim=128, linear_num_key_heads=6,
        linear_num_value_heads=12, linear_key_head_dim=128, linear_value_head_dim=128, **SIZES,
    ),
}  # fmt: skip


def written(name: str, folder: Path) -> tuple[Path, Path]:
    """The checkpoint, and its conversion for one rank."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name])
    with torch.no_grad():  # at the scale of trained ones: a decay is neither 0 nor 1
        for key, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif key.endswith(("A_log", "dt_bias")):
                parameter.uniform_(-3, 0)
    model.save_pretrained(folder / name)
    output = folder / f"{name}-tp1"
    api.convert(folder / name, "tensor-parallel", tp=1, out=output, options=api.SaveOptions(verify="none", link=True))
    return folder / name, output


def prefill_decode(output: Path, dtype: torch.dtype, how: str) -> Decode:
    """Tokens per second of a prefill, in the form of `runtime_decode`."""
    model = load(output, dtype=dtype, compile=how != "eager")

    @torch.no_grad()
    def prefill(prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        ids, cache = torch.tensor(prompts), StaticCache(model.slots, len(prompts), count, dtype)
        begin = time.perf_counter()
        logits = model(ids, None, Context(cache), logits_to_keep=1)
        return ids.numel() / (time.perf_counter() - begin), logits[:, -1].argmax(-1, keepdim=True).tolist()

    return prefill


def transformers_prefill(model: Path, dtype: torch.dtype) -> Decode:
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)

    @torch.no_grad()
    def prefill(prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        ids = torch.tensor(prompts)
        begin = time.perf_counter()
        logits = theirs(ids, logits_to_keep=1).logits
        return ids.numel() / (time.perf_counter() - begin), logits[:, -1].argmax(-1, keepdim=True).tolist()

    return prefill


def moved(output: Path, dtype: torch.dtype) -> int:
    """Bytes that a step of one row reads and writes: all weights, and states twice."""
    model = load(output, dtype=dtype, compile=False)
    states = StaticCache(model.slots, 1, 1, dtype).states
    return sum(x.nbytes for x in model.parameters()) + 2 * sum(x.nbytes for x in states)


def measure(asked: argparse.Namespace, dtype: str, written: dict[str, tuple[Path, Path]]) -> dict[str, Any]:
    random, torch_dtype = torch.Generator().manual_seed(1), DTYPES[dtype]
    prompt, long = (
        torch.randint(100, SIZES["vocab_size"], (1, n), generator=random).tolist() for n in (PROMPT, PREFILL)
    )
    ways: dict[tuple[str, str, str], Decode] = {}
    for name, (source, output) in written.items():
        ways[name, "decode", "transformers eager"] = transformers_decode(source, torch_dtype, False)
        ways[name, "prefill", "transformers eager"] = transformers_prefill(source, torch_dtype)
        for how in ("eager", "step"):
            ways[name, "decode", how] = runtime_decode(output, torch_dtype, how)
            ways[name, "prefill", how] = prefill_decode(output, torch_dtype, how)

    def run(way: tuple[str, str, str]) -> tuple[float, Any]:
        return ways[way](*((prompt, TOKENS) if way[1] == "decode" else (long, PREFILL)))

    tokens = {way: run(way)[1] for way in ways}  # compiles, and warms up
    before = counters["stats"]["unique_graphs"]
    rates: dict[tuple[str, str, str], list[float]] = {way: [] for way in ways}
    bandwidths = []
    for _ in range(asked.rounds):
        bandwidths.append(read_bandwidth())
        for way in ways:
            rates[way].append(run(way)[0])
    rows = []
    for way, found in rates.items():
        name, phase, how = way
        share = None
        if phase == "decode":
            nbytes = moved(written[name][1], torch_dtype)
            share = statistics.median(rate * nbytes / b for rate, b in zip(found, bandwidths, strict=True))
        equal = tokens[way] == tokens[name, phase, "transformers eager"]
        row = {"model": name, "phase": phase, "how": how, "tokens_per_second": statistics.median(found)}
        rows.append({**row, "rates": found, "share": share, "equal": equal})
    recompiled = counters["stats"]["unique_graphs"] - before
    return {"dtype": dtype, "bandwidths": bandwidths, "rows": rows, "recompiled": recompiled}


def report(found: dict[str, Any]) -> bool:
    """Prints it; whether the goals are met."""
    bandwidths = ", ".join(f"{x / 1e9:.1f}" for x in found["bandwidths"])
    print(f"\n{found['dtype']}: read bandwidth {bandwidths} GB/s; compiled later: {found['recompiled']} graphs")
    shares = {}
    for row in found["rows"]:
        share = "" if row["share"] is None else f"{row['share']:.0%}"
        print(
            f"{row['model']:8} {row['phase']:8} {row['how']:20} {row['tokens_per_second']:9.1f} tokens/s  {share:>5}"
            f"  {'equal' if row['equal'] else 'differ'}"
        )
        shares[row["model"], row["phase"], row["how"]] = row["share"]
    below = shares["Llama", "decode", "step"] - shares["hybrid", "decode", "step"]
    print(f"the hybrid's step is {below * 100:.0f} points below the Llama's (goal {POINTS * 100:.0f})", flush=True)
    equal = found["dtype"] != "fp32" or all(row["equal"] for row in found["rows"])
    return below <= POINTS and equal and not found["recompiled"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found, right = [], True
    with tempfile.TemporaryDirectory(prefix="hybrid-") as scratch:
        checkpoints = {name: written(name, Path(scratch)) for name in MODELS}
        for dtype in asked.dtypes.split(","):
            found.append(measure(asked, dtype, checkpoints))
            right &= report(found[-1])
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
