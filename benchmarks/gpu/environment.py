"""Section environment of `run.py`: what is installed, which device it is, and how fast its memory is."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess

import torch

from benchmarks.gpu.report import Row, Scale, copy_rate, read_rate

NEEDED = ("torch", "triton", "transformers", "safetensors", "numpy", "yaml", "pydantic")
# sums over NVLink that torch has beside NCCL's; see the symm_mem page of torch's documentation
SYMMETRIC = (
    "one_shot_all_reduce",
    "one_shot_all_reduce_out",
    "one_shot_all_reduce_copy_out",
    "two_shot_all_reduce_",
    "multimem_all_reduce_",
    "multimem_one_shot_all_reduce",
)
ASKED = (
    "name",
    "driver_version",
    "pstate",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "mig.mode.current",
)


def environment(scale: Scale) -> None:
    table = scale.table("Environment", ("what", "found", "result"))
    for name in NEEDED:
        table.attempt(name, functools.partial(installed, name))
    table.attempt("C compiler", compiler)
    table.add("CPU cores", len(os.sched_getaffinity(0)))
    table.attempt("libraries", functools.partial(libraries, scale))
    table.attempt("symmetric memory", symmetric)
    table.attempt("device", functools.partial(device, scale))
    table.attempt("clocks before", functools.partial(asked, scale))
    for what, rate in (("copy, read and written", copy_rate), ("read", read_rate)):
        table.attempt(what, lambda rate=rate: ((f"{rate(scale) / 1e9:.0f} GB/s",), ""))
    table.attempt("clocks after it", functools.partial(asked, scale))


def installed(name: str) -> Row:
    module = importlib.import_module(name)
    return (getattr(module, "__version__", "no version"),), ""


def compiler() -> Row:
    """Triton compiles a launcher in C for every kernel."""
    found = next((path for name in (os.environ.get("CC"), "gcc", "clang") if name and (path := shutil.which(name))), "")
    return (found or "none",), "" if found else "neither CC, gcc nor clang: Triton cannot launch kernels"


def libraries(scale: Scale) -> Row:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if scale.cuda else "–"
    return (f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}",), ""


def symmetric() -> Row:
    """Which of torch's sums in symmetric memory are there: its interface may change, so it is asked by name."""
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return (f"none: {error}",), ""
    there = [name for name in SYMMETRIC if hasattr(torch.ops.symm_mem, name)]
    return (", ".join(there) or "none",), ""


def device(scale: Scale) -> Row:
    if not scale.cuda:
        return ("CPU",), ""
    about = torch.cuda.get_device_properties(0)
    capability = f"sm_{about.major}{about.minor}"
    cells = f"{about.name}, {capability}, {about.multi_processor_count} multiprocessors, "
    cells += f"{about.total_memory / 2**30:.1f} GiB, {about.L2_cache_size / 2**20:.0f} MiB of L2 cache, "
    cells += f"{torch.cuda.device_count()} of it"
    return (cells,), ""


def asked(scale: Scale) -> Row:
    """What nvidia-smi says of the first GPU, fields that it knows."""
    if not scale.cuda:
        return ("–",), ""
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader", "--id=0"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    values = ran.stdout.strip().split(", ")
    if ran.returncode or len(values) != len(ASKED):
        return (ran.stdout.strip() or ran.stderr.strip(),), ""
    return (", ".join(f"{name} {value}" for name, value in zip(ASKED, values, strict=True)),), ""
