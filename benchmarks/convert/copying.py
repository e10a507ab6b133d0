"""What a conversion costs beside `cp`: a Llama-like checkpoint, copied and cut for 8 ranks, hashed, on the disk.

    python -m benchmarks.convert.copying [--gigabytes 4] [--tp 8] [--rounds 3] [--directory DIR]

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
from math import inf
from pathlib import Path

from benchmarks.support.random_checkpoint import Sizes, make
from rewriter.weights import Checkpoint, ShardPlan, convert_files
from rewriter.weights.expressions import Expression, Slice, Tensor


def shard(name: str, shape: tuple[int, ...], rank: int, tp: int) -> Expression:
    """The rank's part of a tensor: of outputs, or of inputs where ranks' products are added; norms are whole."""
    if len(shape) == 1:
        return Tensor(name)
    dim = int("o_proj" in name or "down_proj" in name)
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
        make(root, options.gigabytes, Sizes(file_bytes=inf))
        (source,) = Checkpoint.open(root).files
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
                    {n: (shard(n, shape, rank, options.tp), None) for n, shape in checkpoint.shapes.items()},
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
