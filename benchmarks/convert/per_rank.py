"""What a checkpoint that computes P ranks on one device costs beside the standard model: time and memory.

    python -m benchmarks.convert.per_rank [--rounds 7] [--json]

A random Llama (4 layers of 512, 16 query and 8 key/value heads, fp32) reads 2 × 256 tokens, eager, with one thread.
Times are medians over rounds in which all models take turns; memory is the peak of resident memory above what the model
takes, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

RECIPES = ("desync-2x", "desync-4x", "ladder-own-partial")
RANKS = (2, 4, 8)
BATCH, LENGTH, VOCABULARY = 2, 256, 2048
CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
}


def emit(scratch: Path) -> dict[str, Path]:
    """The standard model and every rewritten one, as directories."""
    from rewriter import rewrite, trace
    from rewriter.emit.huggingface import emit_huggingface

    torch.manual_seed(0)
    source = scratch / "standard"
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(source)
    places = {"standard": source}
    program = trace(source)
    for recipe in RECIPES:
        for ranks in RANKS:
            files = emit_huggingface(rewrite(program, recipe, tp=ranks))
            place = places[f"{recipe} tp={ranks}"] = scratch / f"{recipe}-{ranks}"
            place.mkdir()
            (place / "config.json").write_text(json.dumps(files.config))
            (place / str(files.modeling_name)).write_text(str(files.modeling))
            shutil.copy(source / "model.safetensors", place)
    return places


def load(place: Path) -> PreTrainedModel:
    """The model in `place`, fp32, with SDPA attention."""
    return AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True, dtype=torch.float32)


def step(model: PreTrainedModel, backward: bool) -> None:
    """One pass over the batch; with `backward`, gradients of every parameter."""
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    if not backward:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        return
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def resident(which: str) -> int:
    """Bytes of resident memory of this process: VmRSS now, VmHWM at the peak."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(which))
    return int(line.split()[1]) * 1024


def peak(place: Path, backward: bool) -> int:
    """Bytes that one step needs above the loaded model; for a process of its own."""
    torch.set_num_threads(1)
    model = load(place)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    step(model, backward)
    return resident("VmHWM") - before


def peak_elsewhere(place: Path, backward: bool) -> int:
    words = [
        sys.executable,
        "-m",
        "benchmarks.convert.per_rank",
        "--peak",
        str(place),
        *(["--backward"] if backward else []),
    ]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1])


def times(models: dict[str, PreTrainedModel], backward: bool, rounds: int) -> dict[str, float]:
    """Median seconds of a step per model."""
    taken: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            begin = time.perf_counter()
            step(model, backward)
            if turn:  # the first one warms up
                taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--backward", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak(options.peak, options.backward))
        return 0
    torch.set_num_threads(1)
    table: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        places = emit(Path(scratch))
        models = {name: load(place) for name, place in places.items()}
        for column, backward in (("forward", False), ("training step", True)):
            seconds = times(models, backward, options.rounds)
            for name, place in places.items():
                row = table.setdefault(name, {})
                row[f"{column}, time"] = seconds[name] / seconds["standard"]
                row[f"{column}, memory"] = peak_elsewhere(place, backward)
    for name in reversed(table):
        for column in [c for c in table[name] if c.endswith("memory")]:
            table[name][column] /= table["standard"][column]
    if options.json:
        print(json.dumps(table, indent=2))
        return 0
    columns = list(table["standard"])
    print("| beside the standard model |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns))
    for name, row in table.items():
        print(f"| {name} |", " | ".join(f"{row[c]:.2f} ×" for c in columns), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
