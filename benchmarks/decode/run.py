"""Tokens per second of a decode step, and how much of the memory's bandwidth that is: this runtime beside others.

    python examples/real_models.py smollm2-135m-instruct models/smollm2
    python -m benchmarks.decode.run models/smollm2 [--dtypes fp32,bf16] [--batches 1,8] [--rounds 5] [--json FILE]
    python -m benchmarks.decode.run models/smollm2 --command [--dtypes fp32,bf16] [--rounds 5] [--json FILE]

Each contestant decodes the same prompts greedily, in turns, and every round measures what two threads can read: a sum
over 512 MB, the best of several. Reported are medians over the rounds; `share` is bytes of the weights × steps per
second by the best bandwidth of all rounds, `by round` the median of each round's share of its own. Contestants are
transformers (eager, and its static cache compiled), this runtime (eager, compiled segments, whole step compiled) and,
with --gguf FILE and `llama-cpp-python` installed, llama.cpp with the same weights in the same precision, at batch 1.
Exits with 1 where something is compiled after the first generation, or tokens differ in fp32.

With --command the contestant is `rewrite generate` as users run it, with a cache of its own: a run that has the decode
step compiled meanwhile, and once that is done runs in turns with transformers' eager generation of as many tokens after
the same prompt. Exits with 1 where the median of the rounds' ratios is above RATIO, a first token took longer than
FIRST_TOKEN seconds from where ranks begin to load the model, or tokens differ in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, StoppingCriteria

from rewriter import api
from rewriter.runtime import generate
from rewriter.runtime.loading import load

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RATIO, FIRST_TOKEN = 0.55, 4.0
PROMPT = "The three most important inventions of the nineteenth century were"
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
    model = load(output, dtype=dtype, compile=how != "eager")  # False: without what is in the user's cache
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


def by_command(asked: argparse.Namespace, dtype: str, scratch: Path) -> dict[str, Any]:
    """Seconds per token of `rewrite generate` and of transformers, in turns."""
    output, cache = scratch / f"output-{dtype}", scratch / f"cache-{dtype}"
    api.convert(asked.model, "tensor-parallel", tp=1, out=output, options=api.SaveOptions(verify="none", dtype=dtype))
    words = [sys.executable, "-m", "rewriter.cli", "generate", str(output), "--prompt", PROMPT, "--json"]
    words += ["--max-new-tokens", str(asked.tokens)]
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": str(asked.threads)}

    def run() -> dict[str, Any]:
        ran = subprocess.run(words, env=variables, check=True, capture_output=True, text=True)
        sys.stderr.write(ran.stderr)
        found: dict[str, Any] = json.loads(ran.stdout)
        return found

    first, begin = run(), time.perf_counter()
    while list(cache.rglob("*.spec.json")):
        if failed := list(cache.rglob("*.failed")):
            raise SystemExit(failed[0].read_text(encoding="utf-8"))
        time.sleep(1)
    compiled = time.perf_counter() - begin
    theirs = transformers_decode(asked.model, DTYPES[dtype], False)
    prompt = AutoTokenizer.from_pretrained(asked.model)(PROMPT).input_ids
    theirs([prompt], 8)
    rows: list[dict[str, Any]] = []
    for _ in range(asked.rounds + 1):  # the first of these is the second run of the command
        steps, tokens = theirs([prompt], asked.tokens)
        ours = run()
        rows.append(
            {
                "transformers": 1 / steps, "command": ours["seconds_per_token"],
                "first_token": ours["seconds_to_first_token"], "equal": ours["tokens"] == tokens[0],
            }
        )  # fmt: skip
    return {"dtype": dtype, "first_run": first, "compiled_after": compiled, "rounds": rows}


def report_command(found: dict[str, Any]) -> bool:
    """Prints it; whether the goals are met."""
    ratios = [row["command"] / row["transformers"] for row in found["rounds"]]
    ratio, slowest = statistics.median(ratios), max(row["first_token"] for row in found["rounds"])
    equal = all(row["equal"] for row in found["rounds"])
    print(
        f"\n{found['dtype']}: first run {found['first_run']['seconds_per_token'] * 1e3:.1f} ms a token, compiled "
        f"{found['compiled_after']:.0f} s after it ended; tokens {'equal' if equal else 'differ'}"
    )
    print("run  transformers, ms  rewrite generate, ms  ratio  first token, s")
    for number, (row, own) in enumerate(zip(found["rounds"], ratios, strict=True), 2):
        print(
            f"{number:3}  {row['transformers'] * 1e3:16.1f}  {row['command'] * 1e3:20.1f}  {own:5.2f}"
            f"  {row['first_token']:14.2f}"
        )
    print(
        f"median ratio {ratio:.2f} (goal {RATIO}), slowest first token {slowest:.2f} s (goal {FIRST_TOKEN})", flush=True
    )
    return ratio <= RATIO and slowest <= FIRST_TOKEN and (equal or found["dtype"] != "fp32")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, help="tokens that each is continued by: 64, with --command 100")
    parser.add_argument("--command", action="store_true", help="measure `rewrite generate` as users run it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    asked.tokens = asked.tokens or (100 if asked.command else 64)
    torch.set_num_threads(asked.threads)
    found, wrong = [], False
    with tempfile.TemporaryDirectory(prefix="decode-") as scratch:
        for dtype in asked.dtypes.split(",") if asked.command else ():
            found.append(by_command(asked, dtype, Path(scratch)))
            wrong |= not report_command(found[-1])
        if asked.command:
            return finished(asked, found, wrong)
        output = Path(scratch) / "output"
        api.convert(asked.model, "tensor-parallel", tp=1, out=output, options=api.SaveOptions(verify="none", link=True))
        for dtype in asked.dtypes.split(","):
            for batch in map(int, asked.batches.split(",")):
                found.append(measure(asked, dtype, batch, output, Path(scratch)))
                report(found[-1])
                wrong |= found[-1]["recompiled"] > 0
                wrong |= dtype == "fp32" and not all(found[-1]["equal"].values())
    return finished(asked, found, wrong)


def finished(asked: argparse.Namespace, found: list[dict[str, Any]], wrong: bool) -> int:
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
