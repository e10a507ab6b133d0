"""What a conversion costs beside `cp`: a Llama-like checkpoint, copied and cut for 8 ranks, hashed, on the disk.

    python benchmarks/copying.py [--gigabytes 4] [--tp 8] [--rounds 3] [--directory DIR]

Writes random bf16 weights, then alternates `cp` + fsync with `convert_files`, and prints both, their ratio and the
memory. Needs three times the size on one disk; everything is deleted at the end.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from math import prod
from pathlib import Path

from rewriter.common.expressions import Expression, Slice, Tensor
from rewriter.weights import Checkpoint, ShardPlan, convert_files
from rewriter.weights.header import encode_header

HIDDEN, HEADS, FEED_FORWARD, VOCABULARY = 4096, 8, 14336, 32000


def layer(index: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Names of one layer's tensors: shape, and the dimension that ranks divide (None: none)."""
    prefix, key_values = f"model.layers.{index}.", HEADS * 128
    return {
        f"{prefix}input_layernorm.weight": ((HIDDEN,), None),
        f"{prefix}mlp.down_proj.weight": ((HIDDEN, FEED_FORWARD), 1),
        f"{prefix}mlp.gate_proj.weight": ((FEED_FORWARD, HIDDEN), 0),
        f"{prefix}mlp.up_proj.weight": ((FEED_FORWARD, HIDDEN), 0),
        f"{prefix}self_attn.k_proj.weight": ((key_values, HIDDEN), 0),
        f"{prefix}self_attn.o_proj.weight": ((HIDDEN, HIDDEN), 1),
        f"{prefix}self_attn.q_proj.weight": ((HIDDEN, HIDDEN), 0),
        f"{prefix}self_attn.v_proj.weight": ((key_values, HIDDEN), 0),
    }


def make(directory: Path, gigabytes: float) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Write model.safetensors with random bytes of about this size; returns its tensors."""
    tensors: dict[str, tuple[tuple[int, ...], int | None]] = {"model.embed_tokens.weight": ((VOCABULARY, HIDDEN), 0)}
    index = 0
    while sum(2 * prod(shape) for shape, _ in tensors.values()) < gigabytes * 1e9:
        tensors |= layer(index)
        index += 1
    header = encode_header({n: ("BF16", s, 2 * prod(s)) for n, (s, _) in tensors.items()}, {"format": "pt"})
    noise = os.urandom(64 << 20)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(header)
        left = sum(2 * prod(shape) for shape, _ in tensors.values())
        while left:
            left -= file.write(noise[: min(left, len(noise))])
        file.flush()
        os.fsync(file.fileno())
    return tensors


def shard(name: str, shape: tuple[int, ...], dim: int | None, rank: int, tp: int) -> Expression:
    """The rank's part of a tensor."""
    if dim is None:
        return Tensor(name)
    size = shape[dim] // tp
    return Slice(Tensor(name), dim, ((rank * size, rank * size + size),))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        root = Path(name)
        tensors = make(root, options.gigabytes)
        source = root / "model.safetensors"
        ratios = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            subprocess.run(["cp", "--reflink=never", source, root / "plain"], check=True)
            subprocess.run(["sync", root / "plain"], check=True)
            plain = time.perf_counter() - start
            (root / "plain").unlink()
            os.sync()
            out = root / "out"
            out.mkdir()
            start = time.perf_counter()
            checkpoint = Checkpoint.open(root)
            plans = [
                ShardPlan(
                    out / f"rank-{rank}.safetensors",
                    {n: (shard(n, shape, dim, rank, options.tp), None) for n, (shape, dim) in tensors.items()},
                )
                for rank in range(options.tp)
            ]
            convert_files(checkpoint, [(source, out / "model.safetensors")], plans)
            ours = time.perf_counter() - start
            shutil.rmtree(out)
            os.sync()
            ratios.append(ours / plain)
            print(f"cp + fsync {plain:.2f} s, copy + {options.tp} ranks {ours:.2f} s: {ours / plain:.2f}x", flush=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            f"median {statistics.median(ratios):.2f}x for {source.stat().st_size / 1e9:.2f} GB, "
            f"peak resident {peak / 1e9:.2f} GB"
        )


if __name__ == "__main__":
    main()
