"""Tokens per second of a decode step, and how much of the memory's bandwidth that is: this runtime beside others.

    python examples/real_models.py smollm2-135m-instruct models/smollm2
    python benchmarks/decode.py models/smollm2 [--dtypes fp32,bf16] [--batches 1,8] [--rounds 5] [--json FILE]

Each contestant decodes the same prompts greedily, in turns, and every round measures what two threads can read: a sum
over 512 MB, the best of several. Reported are medians over the rounds; `share` is bytes of the weights × steps per
second by the best bandwidth of all rounds, `by round` the median of each round's share of its own. Contestants are
transformers (eager, and its static cache compiled), this runtime (eager, compiled segments, whole step compiled) and,
with --gguf FILE and `llama-cpp-python` installed, llama.cpp with the same weights in the same precision, at batch 1.
Exits with 1 where something is compiled after the first generation, or tokens differ in fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig, StoppingCriteria

from rewriter import api
from rewriter.runtime import generate
from rewriter.runtime.load import load

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Tokens = list[list[int]]
Decode = Callable[[list[list[int]], int], tuple[float, Tokens]]  # steps per second, and the tokens


def read_bandwidth(times: int = 5) -> float:
    """Bytes per second of a sum over 512 MB, the best of several."""
    x = torch.ones(512 * 2**20 // 4)
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - begin)
    return x.nbytes / best


def rate(times: Sequence[float]) -> float:
    """Steps per second between the first token and the last."""
    return (len(times) - 1) / (times[-1] - times[0])


class Clock(StoppingCriteria):
    """The time of each token; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def transformers_decode(model: Path, dtype: torch.dtype, compiled: bool) -> Decode:
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if compiled:
        config = CompileConfig(fullgraph=True, dynamic=False, mode="default")
        config._compile_all_devices = True
        options |= {"cache_implementation": "static", "compile_config": config}

    def decode(prompts: list[list[int]], count: int) -> tuple[float, Tokens]:
        ids, clock = torch.tensor(prompts), Clock()
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
            stopping_criteria=[clock], **options,
        )  # fmt: skip
        return rate(clock.times), out[:, ids.shape[1] :].tolist()

    return decode


def runtime_decode(output: Path, dtype: torch.dtype, how: str) -> Decode:
    """how: eager, segments or step."""
    model = load(output, dtype=dtype, compile=how != "eager")
    if how == "segments":
        vars(model).pop("compiles_with")  # by which a step knows that it may be compiled as a whole

    def decode(prompts: list[list[int]], count: int) -> tuple[float, Tokens]:
        times: list[float] = []

        def on_token(row: int, token: int) -> bool:
            if row == 0:
                times.append(time.perf_counter())
            return False

        found = generate(model, prompts, count, on_token=on_token)
        return rate(times), found

    return decode


def llama_cpp_decode(gguf: Path, dtype: str, scratch: Path, threads: int) -> Decode:
    import ctypes

    import llama_cpp

    path = scratch / f"{dtype}.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"fp32": llama_cpp.LLAMA_FTYPE_ALL_F32, "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16}[dtype]
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(str(gguf).encode(), str(path).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp cannot write {gguf} as {dtype}")
    model = llama_cpp.Llama(str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def decode(prompts: list[list[int]], count: int) -> tuple[float, Tokens]:
        times, found = [], []
        for token in model.generate(prompts[0], temp=0.0, reset=True):
            times.append(time.perf_counter())
            found.append(token)
            if len(found) == count:
                break
        return rate(times), [found]

    return decode


def contestants(asked: argparse.Namespace, dtype: str, batch: int, output: Path, scratch: Path) -> dict[str, Decode]:
    torch_dtype = DTYPES[dtype]
    found = {
        "transformers eager": transformers_decode(asked.model, torch_dtype, False),
        "transformers static cache, compiled": transformers_decode(asked.model, torch_dtype, True),
        "eager": runtime_decode(output, torch_dtype, "eager"),
        "compiled segments": runtime_decode(output, torch_dtype, "segments"),
        "compiled step": runtime_decode(output, torch_dtype, "step"),
    }
    if asked.gguf is not None and batch == 1:
        found["llama.cpp"] = llama_cpp_decode(asked.gguf, dtype, scratch, asked.threads)
    return found


def measure(asked: argparse.Namespace, dtype: str, batch: int, output: Path, scratch: Path) -> dict[str, Any]:
    random = torch.Generator().manual_seed(batch)
    prompts = torch.randint(100, 40_000, (batch, asked.prompt), generator=random).tolist()
    ways = contestants(asked, dtype, batch, output, scratch)
    tokens = {name: decode(prompts, asked.tokens)[1] for name, decode in ways.items()}  # compiles, and warms up
    before = counters["stats"]["unique_graphs"]
    rows: dict[str, list[float]] = {name: [] for name in ways}
    bandwidths = []
    for _ in range(asked.rounds):
        bandwidths.append(read_bandwidth())
        for name, decode in ways.items():
            rows[name].append(decode(prompts, asked.tokens)[0])
    model = load(output, dtype=DTYPES[dtype])
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    theirs = tokens["transformers eager"]
    return {
        "dtype": dtype, "batch": batch, "weights": nbytes, "bandwidths": bandwidths, "steps_per_second": rows,
        "recompiled": counters["stats"]["unique_graphs"] - before,
        "equal": {name: found == theirs for name, found in tokens.items() if name != "llama.cpp"},
    }  # fmt: skip


def report(found: dict[str, Any]) -> None:
    best, nbytes, batch = max(found["bandwidths"]), found["weights"], found["batch"]
    medians = {name: statistics.median(values) for name, values in found["steps_per_second"].items()}
    print(
        f"\n{found['dtype']}, batch {batch}: {nbytes / 1e6:.0f} MB of weights; read bandwidth {best / 1e9:.1f} GB/s "
        f"(rounds {', '.join(f'{x / 1e9:.1f}' for x in found['bandwidths'])}); compiled after the first generation: "
        f"{found['recompiled']} graphs"
    )
    print(f"{'':36} tokens/s   share  by round  × eager  tokens")
    for name, steps in medians.items():
        by_round = statistics.median(
            x * nbytes / b for x, b in zip(found["steps_per_second"][name], found["bandwidths"], strict=True)
        )
        equal = {True: "equal", False: "differ", None: ""}[found["equal"].get(name)]
        print(
            f"{name:36} {steps * batch:8.1f}  {steps * nbytes / best:6.0%}  {by_round:8.0%}"
            f"  {steps / medians['transformers eager']:7.2f}  {equal}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each is continued by")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found, wrong = [], False
    with tempfile.TemporaryDirectory(prefix="decode-") as scratch:
        output = Path(scratch) / "output"
        api.convert(asked.model, "tensor-parallel", tp=1, out=output, verify="none", link=True)
        for dtype in asked.dtypes.split(","):
            for batch in map(int, asked.batches.split(",")):
                found.append(measure(asked, dtype, batch, output, Path(scratch)))
                report(found[-1])
                wrong |= found[-1]["recompiled"] > 0
                wrong |= dtype == "fp32" and not all(found[-1]["equal"].values())
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
