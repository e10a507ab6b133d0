"""What converting a checkpoint costs beside copying it: `rewriter.convert` for 8 ranks against `cp` and fsync.

    python benchmarks/convert.py [--gigabytes 4] [--rounds 5] [--dir DIR] [--json]

Writes a Llama of random bf16 weights in several safetensors files, then alternates `cp` to a fresh directory, with
every file on the disk at the end, and a conversion (recipe ladder-upper-half, tp 8, no verification) in a process of
its own, Python's start, imports and tracing included. After every conversion it recomputes hashes of the manifest and
compares parts of ranks' tensors with the source. Exit code: 1 if the median of the ratios is above 1.5, if a conversion
had more than 1.5 GB resident, or if a file is not what it should be. DIR needs four times the size; everything written
there is deleted at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rewriter.common.processes import environment
from rewriter.weights.header import encode_header

RATIO_LIMIT = 1.5
RESIDENT_LIMIT = 1.5e9
TP = 8
RECIPE = "ladder-upper-half"
FILE_BYTES = 1e9  # of one safetensors file, about
HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD, VOCABULARY = 4096, 14336, 32, 8, 128, 32000
# Rows of the whole tensor that ranks divide (0), or its columns (1).
SAMPLES = {"model.layers.0.self_attn.k_proj.weight": 0, "model.layers.{last}.mlp.down_proj.weight": 1}

CONVERT = "import sys; from rewriter.api import convert; convert(*sys.argv[1:3], out=sys.argv[3], tp=%d, verify='none')"


@dataclass(frozen=True)
class Round:
    """Seconds of one copy and one conversion, and the conversion's peak resident bytes."""

    copy: float
    convert: float
    resident: int

    @property
    def ratio(self) -> float:
        return self.convert / self.copy


def layer_shapes(index: int) -> dict[str, tuple[int, ...]]:
    """One decoder layer's tensors."""
    prefix = f"model.layers.{index}."
    return {
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        f"{prefix}mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    }


def make(directory: Path, gigabytes: float) -> int:
    """Write config.json, weights and index of a Llama of about this size; returns its number of layers."""
    outside = {"lm_head.weight": (VOCABULARY, HIDDEN), "model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    shapes: dict[str, tuple[int, ...]] = {**outside, "model.norm.weight": (HIDDEN,)}
    layers = 0
    while layers < 2 or sum(map(nbytes, shapes.values())) < gigabytes * 1e9:
        shapes |= layer_shapes(layers)
        layers += 1
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(map(nbytes, groups[-1].values())) + nbytes(shape) > FILE_BYTES:
            groups.append({})
        groups[-1][name] = shape
    index = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        index |= dict.fromkeys(group, file)
        write_random(directory / file, group)
    total = sum(map(nbytes, shapes.values()))
    table = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(table))
    (directory / "config.json").write_text(json.dumps(config(layers)))
    os.sync()
    return layers


def config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }


def nbytes(shape: tuple[int, ...]) -> int:
    return 2 * prod(shape)


def write_random(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of random bf16 bit patterns without infinities and NaNs, no two pieces of it alike."""
    with path.open("wb") as file:
        file.write(encode_header({n: ("BF16", s, nbytes(s)) for n, s in tensors.items()}, {"format": "pt"}))
        left = sum(map(nbytes, tensors.values()))
        while left:
            # The exponent's highest bit cleared: every value is finite.
            noise = bytearray(os.urandom(min(left, 64 << 20)))
            noise[1::2] = noise[1::2].translate(bytes(b & 0xBF for b in range(256)))
            left -= file.write(noise)


def timed_copy(source: Path, out: Path) -> float:
    """Seconds for `cp` of every file and fsync of each."""
    begin = time.perf_counter()
    # A copy that shares its blocks would cost nothing and say nothing about the disk.
    subprocess.run(["cp", "--recursive", "--reflink=never", str(source), str(out)], check=True)
    subprocess.run(["sync", *map(str, [*sorted(out.iterdir()), out])], check=True)
    return time.perf_counter() - begin


def timed_convert(source: Path, out: Path) -> tuple[float, int]:
    """(seconds, peak resident bytes) of a conversion in a process of its own, from its start to its end."""
    command = [sys.executable, "-c", CONVERT % TP, str(source), RECIPE, str(out)]
    begin = time.perf_counter()
    process = subprocess.Popen(command, env=environment())
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        process.wait()
        raise
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the conversion ended with exit code {process.returncode}")
    return seconds, usage.ru_maxrss * 1024


def faults(source: Path, out: Path, layers: int, number: int) -> Iterator[str]:
    """What is wrong with an output: hashes of a sample of files, another in every round, and ranks' parts."""
    from safetensors import safe_open

    manifest = json.loads((out / "rewrite.json").read_text())
    weights = sorted(name for name in manifest["files"] if name.endswith(".safetensors"))
    copied = [name for name in weights if "/" not in name]
    ranks = [name for name in weights if name.startswith("runtime/")]
    if len(ranks) != TP or not copied:
        yield f"the manifest lists {len(copied)} weight files and {len(ranks)} rank files, expected {TP} of these"
        return
    for name in ["config.json", copied[number % len(copied)], ranks[number % TP]]:
        with (out / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest["files"][name]:
                yield f"{name} does not have the hash that the manifest says"
    rank = number % TP
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    for template, dim in SAMPLES.items():
        name = template.format(last=layers - 1)
        with safe_open(source / index[name], "pt") as whole, safe_open(out / ranks[rank], "pt") as part:
            view, found = whole.get_slice(name), part.get_tensor(name)
            size = view.get_shape()[dim] // TP
            cut = slice(rank * size, (rank + 1) * size)
            expected = view[cut] if dim == 0 else view[:, cut]
            if found.shape != expected.shape or not found.equal(expected):
                yield f"{name} of rank {rank} is not its part of the source's"


def measure(root: Path, gigabytes: float, rounds: int, console: Console) -> tuple[list[Round], list[str]]:
    """Alternate copies and conversions; also returns everything that was wrong with an output."""
    source, copied, converted = root / "source", root / "copied", root / "converted"
    source.mkdir()
    layers = make(source, gigabytes)
    found: list[Round] = []
    wrong: list[str] = []
    for number in range(rounds):
        copy = timed_copy(source, copied)
        shutil.rmtree(copied)
        os.sync()
        seconds, resident = timed_convert(source, converted)
        wrong += faults(source, converted, layers, number)
        shutil.rmtree(converted)
        os.sync()
        found.append(Round(copy, seconds, resident))
        console.print(
            f"round {number + 1}: cp + fsync {copy:.2f} s, convert {seconds:.2f} s: {seconds / copy:.2f}×, "
            f"{resident / 1e9:.2f} GB resident"
        )
    return found, wrong


def table(rounds: list[Round]) -> Table:
    """What a person reads."""
    shown = Table(title=f"conversion, recipe {RECIPE}, tp {TP}, beside a copy")
    for column in ("", "median", "range", "limit"):
        shown.add_column(column, justify="right" if column else "left")
    rows = (
        ("cp + fsync, s", [r.copy for r in rounds], ""),
        ("convert, s", [r.convert for r in rounds], ""),
        ("ratio", [r.ratio for r in rounds], f"{RATIO_LIMIT}"),
        ("resident, GB", [r.resident / 1e9 for r in rounds], f"{RESIDENT_LIMIT / 1e9}"),
    )
    for name, values, limit in rows:
        shown.add_row(name, f"{statistics.median(values):.2f}", f"{min(values):.2f} – {max(values):.2f}", limit)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description="What converting a checkpoint costs beside copying it.")
    parser.add_argument("--gigabytes", type=float, default=4, help="size of the checkpoint (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="copies and conversions (default 5)")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the system's temporary files)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, progress goes to stderr")
    options = parser.parse_args()
    console = Console(stderr=options.json, highlight=False)
    with tempfile.TemporaryDirectory(prefix="convert-", dir=options.dir) as name:
        rounds, wrong = measure(Path(name), options.gigabytes, options.rounds, console)
    ratio = statistics.median(r.ratio for r in rounds)
    resident = max(r.resident for r in rounds)
    if ratio > RATIO_LIMIT:
        wrong.append(f"{ratio:.2f} times the time of a copy, limit {RATIO_LIMIT}")
    if resident > RESIDENT_LIMIT:
        wrong.append(f"{resident / 1e9:.2f} GB resident, limit {RESIDENT_LIMIT / 1e9}")
    if options.json:
        rows = [{**asdict(r), "ratio": r.ratio} for r in rounds]
        print(json.dumps({"ratio": ratio, "resident": resident, "rounds": rows, "faults": wrong}, indent=2))
    else:
        console.print(table(rounds))
    for fault in wrong:
        console.print(f"FAILED: {fault}", style="red")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
