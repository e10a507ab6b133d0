"""Checks and measures on GPUs what tests can only run on the CPU, and writes the tables as Markdown.

    python -m benchmarks.gpu.run --first --within 420 --json FILE    # what decides about the rest; needs no network
    python -m benchmarks.gpu.run --rest --json FILE                  # the rest
    python -m benchmarks.gpu.run [--json FILE] [--out FILE] [--only SECTION ...] [--within SECONDS]
    python -m benchmarks.gpu.run --page FILE.json       # tables of rows that were kept; --first: some sections
    python -m benchmarks.gpu.run --cpu                  # every line of it at tiny sizes, without a GPU

Each section runs in a process of its own, which is ended after a time, and every row is appended to the file of
`--json` as soon as it is known, one JSON object per line: what hangs or crashes loses the rest of its section.
The sections of `--first`, in this order: environment (versions, clocks, bandwidths), kernels (every Triton kernel
against its specification), decode-step (captured in a CUDA graph beside eager), decode-layers (70B-like layers on a
rank of 8 whose peers are emulated: what ladder hides, and what fetching the next weights does), prefill-layers (the
same of a prompt), rates-by-size (quantized messages of 8 to 256 MiB), serving (the vLLM plugin's operators in a graph).

The others: mixers and mixer-steps (recurrent mixers, their kernels, and decode steps of models of them), hybrid-layers
(decode-layers of a model of gated delta nets), emulated (collectives of one rank whose peers are emulated),
decode-attention and gemv (what a decode step of a 70B model is made of), runtime (distributed attention on NCCL, an
emitted model), merge (the Triton kernel), tiles (attention of a tile, against fp64 and beside the library's), ranks
(one on each GPU with NCCL; a single GPU is shared by four, and messages go through the CPU), decode (16 layers,
compiled segments and two branches too), quantize (kernels of quantized messages in every format), rates (what these
move in a second), split (what tiles of uneven grids cost), rates-compiled (torch.compile beside rates), healing (a real
model, in pieces: see gpu_healing.py; only where --only names it).

Exits with 1 if a row failed, with 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.report import Rows, Scale, tables
from benchmarks.gpu.sections import STACK_SECONDS, Section, compute, put, read, run
from rewriter.common.processes import CUDNN_ATTENTION_LAST, end_with_parent

ROOT = str(Path(__file__).resolve().parents[2])

FIRST = {  # together 400 s
    "environment": Section("benchmarks.gpu.environment:environment", 20),
    "kernels": Section("benchmarks.gpu.kernels:checking", 80),
    "decode-step": Section("benchmarks.gpu.decode_step:steps", 50),
    "decode-layers": Section("benchmarks.gpu.layers:decoding", 100),
    "prefill-layers": Section("benchmarks.gpu.layers:prefilling", 70),
    "rates-by-size": Section("benchmarks.gpu.quantize:rates_by_size", 30),
    "serving": Section("benchmarks.gpu.serving:serving", 50),
}
REST = {
    "mixers": Section("benchmarks.gpu.mixers:mixing", 260),
    "mixer-steps": Section("benchmarks.gpu.mixers:stepping", 200),
    "hybrid-layers": Section("benchmarks.gpu.layers:decoding_hybrid", 200),
    "emulated": Section("benchmarks.gpu.emulated:emulated", 120),
    "decode-attention": Section("benchmarks.gpu.attention:attending", 120),
    "gemv": Section("benchmarks.gpu.gemv:products", 240),
    "runtime": Section("benchmarks.gpu.runtime:runtime", 120),
    "merge": Section("benchmarks.gpu.merge:merging", 120),
    "tiles": Section("benchmarks.gpu.tiles:tiles", 300),
    "ranks": Section("benchmarks.gpu.runtime:on_ranks", 300),
    "decode": Section("benchmarks.gpu.decode:decoding", 520),
    "quantize": Section("benchmarks.gpu.quantize:quantizing", 520),
    "rates": Section("benchmarks.gpu.quantize:rates", 300),
    "split": Section("benchmarks.gpu.tiles:splitting", 180),
    "rates-compiled": Section("benchmarks.gpu.quantize:rates_compiled", 520),
}
CHECKS = FIRST | REST  # what runs where nothing is chosen
SECTIONS = CHECKS | {"healing": Section("benchmarks.gpu.healing:healing", 530)}
LEAST_SECONDS = 15  # of a section that is begun: torch is imported, and a context made
EXIT_SECONDS = 5  # to write the page, and to end
DRY = 4  # times as long: the CPU may be busy with other things


def about(dry: bool) -> dict[str, str]:
    """What every page begins with. This process asks CUDA for nothing: an error of a section leaves it alone."""
    return {
        "Date": time.strftime("%Y-%m-%d"),
        "Device": f"{platform.machine()}, a dry run" if dry else nvidia_smi("name"),
        **({} if dry else {"Driver": nvidia_smi("driver_version")}),
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        **{name: version(name) for name in ("triton", "transformers")},
    }


def nvidia_smi(field: str) -> str:
    """What it answers of the first GPU; without it, what is missing."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer"
    return (ran.stdout.strip() or ran.stderr.strip() or "nvidia-smi says nothing").splitlines()[0]


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def page(records: Sequence[dict[str, Any]], sections: Container[str] | None = None) -> str:
    """Markdown of runs that have rows of `sections`, None for all, each with what it ran on."""
    parts: list[str] = []
    begins = [at for at, record in enumerate(records) if "run" in record]
    for start, end in zip(begins, [*begins[1:], len(records)], strict=True):
        lines = (f"- {name}: {value}\n" for name, value in records[start]["run"].items())
        found = tables(record for record in records[start:end] if sections is None or record.get("section") in sections)
        parts += ["".join(lines), *(table.markdown() for table in found)] if found else []
    return "\n".join(parts)


def measure(given: argparse.Namespace, kept: Path) -> int:
    """Run the sections, one after the other. Returns how many rows failed."""
    start = kept.stat().st_size if kept.exists() else 0
    Rows(kept, "").put({"run": about(given.cpu)})
    variables = {**os.environ, CUDNN_ATTENTION_LAST[0]: os.environ.get(*CUDNN_ATTENTION_LAST)}
    variables |= {"TRITON_INTERPRET": "1"} if given.cpu else {}
    variables["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    for name in given.only:
        left = given.within - STACK_SECONDS - EXIT_SECONDS - age()
        rows, limit = Rows(kept, name), min(SECTIONS[name].seconds * (DRY if given.cpu else 1), left)
        if limit < LEAST_SECONDS:
            put(rows, "all of it", f"not begun: the {given.within:.0f} s are over")
            continue
        command = [sys.executable, sys.argv[0], "--section", name, "--json", str(kept), *["--cpu"] * given.cpu]
        from_here = time.monotonic()
        wrong = run(command, rows, limit, variables)
        found = read(kept, start)
        failed = sum(record.get("failed", False) for record in found if record.get("section") == name)
        seconds = time.monotonic() - from_here
        print(f"{name}: {seconds:.0f} s, {failed} failed{wrong and ': '}{wrong}", file=sys.stderr, flush=True)
        if given.out:  # section by section: a run that is cut off leaves what it has
            given.out.write_text(page(found), encoding="utf-8")
    found = read(kept, start)
    if given.out:
        given.out.write_text(page(found), encoding="utf-8")
    print(page(found))
    return sum(record.get("failed", False) for record in found)


def age() -> float:
    """Seconds since this process began: importing torch is time of the machine, too."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are appended here, each as soon as it is known")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the tables are written here too")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", nargs="+", choices=SECTIONS, default=list(CHECKS), metavar="SECTION")
    chosen.add_argument("--first", dest="only", action="store_const", const=list(FIRST), help="what decides")
    chosen.add_argument("--rest", dest="only", action="store_const", const=list(REST), help="all but that")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS", help="for all sections")
    parser.add_argument("--page", type=Path, metavar="FILE", help="print the tables of kept rows, and run nothing")
    parser.add_argument("--cpu", action="store_true", help="a dry run at tiny sizes; its figures mean nothing")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)  # in this process
    return parser.parse_args()


def main() -> None:
    given = parsed()
    if given.page:
        print(page(read(given.page), given.only))
        return
    if given.section:
        end_with_parent()
        scale = Scale(torch.device("cpu" if given.cpu else "cuda"), given.cpu, Rows(given.json, given.section))
        compute(SECTIONS[given.section], given.section, scale)
        return
    if not given.cpu and not torch.cuda.is_available():
        print(
            "gpu.py: PyTorch finds no CUDA device. --cpu runs everything at tiny sizes, to try the script",
            file=sys.stderr,
        )
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the section that runs ends, too
    with tempfile.TemporaryDirectory() as scratch:
        failed = measure(given, given.json or Path(scratch, "rows.json"))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
