"""Checks and measures on GPUs what tests can only run on the CPU, and writes the tables as Markdown.

    python benchmarks/gpu.py [--out FILE] [--only SECTION ...]      # needs no network
    python benchmarks/gpu.py --cpu                                  # every line of it at tiny sizes, without a GPU

Sections: tiles (attention of a tile, forward and backward, against fp64 and beside the library's attention), merge
(the Triton kernel), quantize (kernels of quantized messages against their specification), rates (what these move in a
second), split (what tiles of uneven grids cost), runtime (distributed attention on NCCL, an emitted model),
ranks (one on each GPU with NCCL; where there is a single GPU, four share it and their messages go through the CPU),
emulated (collectives of one rank whose peers are emulated: durations, and what they take from kernels beside them). A
section or a row that cannot run is reported as such, with the reason. Exits with 1 if a row failed, with 2 where there
is no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_emulated import emulated
from gpu_merge import merging
from gpu_quantize import quantizing, rates
from gpu_report import Scale, Table, copy_rate
from gpu_runtime import on_ranks, runtime
from gpu_tiles import splitting, tiles

SECTIONS: dict[str, Callable[[Scale], Table]] = {
    "tiles": tiles,
    "merge": merging,
    "quantize": quantizing,
    "rates": rates,
    "split": splitting,
    "runtime": runtime,
    "ranks": on_ranks,
    "emulated": emulated,
}


def machine(scale: Scale) -> str:
    """The device, the versions, and how fast it copies: the bound of everything that moves data."""
    about = {
        "Date": time.strftime("%Y-%m-%d"),
        "Device": torch.cuda.get_device_name() if scale.device.type == "cuda" else f"{platform.machine()}, a dry run",
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "Triton": version("triton"),
        "transformers": version("transformers"),
        "Copy": f"{copy_rate(scale) / 1e9:.0f} GB/s read and written",
    }
    return "\n".join(f"- {name}: {value}" for name, value in about.items()) + "\n"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the tables are written here too")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--cpu", action="store_true", help="a dry run at tiny sizes; its figures mean nothing")
    given = parser.parse_args()
    if given.cpu and os.environ.get("TRITON_INTERPRET") != "1":  # read when Triton is imported, as it has been here
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if not given.cpu and not torch.cuda.is_available():
        print(
            "gpu.py: PyTorch finds no CUDA device. --cpu runs everything at tiny sizes, to try the script",
            file=sys.stderr,
        )
        sys.exit(2)
    scale = Scale(torch.device("cpu" if given.cpu else "cuda"), given.cpu)
    report, failed = [machine(scale)], 0
    for name in given.only:
        start = time.monotonic()
        table = Table(name, ("section", "result"))
        try:
            table = SECTIONS[name](scale)
        except Exception as error:
            traceback.print_exc()
            table.add("all of it", wrong=f"{type(error).__name__}: {error}")
        print(f"{name}: {time.monotonic() - start:.0f} s, {table.failed} failed", file=sys.stderr, flush=True)
        report.append(table.markdown())
        failed += table.failed
        if given.out:  # section by section: a run that is cut off leaves what it has
            given.out.write_text("\n".join(report), encoding="utf-8")
    print("\n".join(report))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
