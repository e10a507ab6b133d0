"""Kernels of a section of `run.py`, compiled in many processes before it runs.

Triton compiles a kernel in seconds and one after the other, and keeps it on the disk: the more than 200 of quantized
messages would take ten minutes. Each process runs some of a section's rows and forgets what they find. What one of them
cannot compile, the section tries again, and says so.

    python -m benchmarks.gpu.compile MODULE PART PARTS [--cpu]     # rows PART, PART + PARTS, ... of MODULE.cases()
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import time

import torch

from benchmarks.gpu.report import Scale

PROCESSES = 16  # each has a context of CUDA, some 500 MB
SECONDS = 240.0


def compiled_beforehand(scale: Scale, module: str, count: int) -> None:
    """Run the `count` cases of `module` in processes, a core for each, and end those that take longer than SECONDS."""
    parts = min(PROCESSES, len(os.sched_getaffinity(0)), count) if not scale.tiny else 1
    command = [sys.executable, "-m", "benchmarks.gpu.compile", module]
    begun = time.monotonic()
    running = [
        subprocess.Popen([*command, str(part), str(parts), *["--cpu"] * scale.tiny], stdout=sys.stderr.fileno())
        for part in range(parts)
    ]
    try:
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, SECONDS - (time.monotonic() - begun)))
    finally:
        for process in running:
            process.kill()  # nothing, where it has ended
    ended = sum(process.poll() == 0 for process in running)
    took = time.monotonic() - begun
    print(f"compiled beforehand in {took:.0f} s: {ended} of {parts} processes did all", file=sys.stderr, flush=True)


def main() -> None:
    from rewriter.common.processes import end_with_parent

    end_with_parent()
    module, part, parts, dry = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "--cpu" in sys.argv
    scale = Scale(torch.device("cpu" if dry else "cuda"), dry)
    torch.set_num_threads(1)
    for case in importlib.import_module(module).cases()[part::parts][: 1 if dry else None]:
        try:
            case.run(scale)
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
