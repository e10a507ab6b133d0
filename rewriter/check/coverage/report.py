"""The rows of `rewrite coverage`, each of one type.

A row has the comparisons that hold, and for the others the reason and the line that stopped them.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape

from rewriter.common.errors import RewriterError
from rewriter.common.tables import FittingTable

# The main job, `rewrite MODEL --recipe NAME --tp 2` with text from two ranks, by the recipe.
MAIN_JOB = {"main_job": "tensor-parallel", "main_job_ladder": "ladder"}
# What it consists of, in the order in which it is checked.
PARTS = ("builds", "traces", "ladder", "tp2", "tp4", "desync", "emitted")
CHECKS = (*MAIN_JOB, *PARTS)  # a reason is named after its check
TITLES = {"main_job": "main job", "main_job_ladder": "main job, ladder"} | {name: name for name in (*PARTS, "pixels")}


@dataclass
class Coverage:
    """The row of one type.

    `split`: the share of the layers' parameters that two ranks share, the others being on both; None where it is not
    known. `stream`: it has a residual stream, of `blocks` blocks. `reductions`: all-reduces of the layers on two ranks,
    none where no layer can be split. `replicated`: what every rank computes in full instead of sharing it, with the
    reason.
    `reasons`: by check, why it does not hold. `wrong`: checks whose result was computed and is not the expected one,
    in contrast to those that were refused. `versions`: those of the libraries.
    """

    type: str
    main_job: bool = False
    main_job_ladder: bool = False
    builds: bool = False
    traces: bool = False
    ladder: bool = False
    tp2: bool = False
    tp4: bool = False
    desync: bool = False
    emitted: bool = False
    split: float | None = None
    stream: bool = False
    blocks: int = 0
    reductions: int = 0
    replicated: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    versions: dict[str, str] = field(
        default_factory=lambda: {name: version(name) for name in ("transformers", "torch")}
    )

    @property
    def reason(self) -> str | None:
        """Every distinct reason with the checks that it stopped; None when all checks hold."""
        by_text: dict[str, list[str]] = {}
        for check in sorted(self.reasons, key=list(TITLES).index):
            by_text.setdefault(self.reasons[check], []).append(TITLES[check])
        return "; ".join(f"{', '.join(names)}: {text}" for text, names in by_text.items()) or None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "reason": self.reason}


def explain(error: BaseException) -> str:
    """An error in one line, with the source line of its first cause, in transformers where it is there."""
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, RewriterError):
        text = f"{type(error).__name__}: {text}"
    cause = error
    while (earlier := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)) is not None:
        cause = earlier
    place = _place(cause)
    return f"{text:.600}" + (f" ({place})" if place else "")


def _place(error: BaseException) -> str | None:
    """file:line of the innermost frame in a model's code, else in transformers, else in this compiler."""
    frames = [(Path(f.filename).as_posix(), f.lineno) for f in reversed(traceback.extract_tb(error.__traceback__))]
    for package, shown in (
        ("/transformers/models/", ""),
        ("/transformers/", "transformers/"),
        ("/rewriter/", "rewriter/"),
    ):
        for path, line in frames:
            if package in path and "/check/coverage/" not in path:
                return f"{shown}{path.rpartition(package)[2]}:{line}"
    return None


def table(rows: Sequence[Coverage], checks: Sequence[str] = CHECKS) -> RenderableType:
    """One line per type: a mark per check, what two ranks share (after the main job, where that is checked) and the
    blocks of its residual stream; totals; below it the reasons."""
    main = sum(name in MAIN_JOB for name in checks)
    columns = ["type", *checks[:main], *["split"] * bool(main), *checks[main:], "blocks"]
    rows_shown = []
    for row in rows:
        marks = {
            name: "[bold red]WRONG[/]" if name in row.wrong else "[green]yes[/]" if getattr(row, name) else "[dim]–[/]"
            for name in checks
        }
        about = {"type": escape(row.type), "split": percent(row.split), "blocks": str(row.blocks or "–")}
        rows_shown.append(about | marks)
    totals = {name: str(sum(getattr(row, name) for row in rows)) for name in checks}
    rows_shown.append({"type": f"[bold]{len(rows)}[/]"} | totals)
    headers = {name: TITLES.get(name, name).replace(" ", "\n") for name in checks}
    look = {"numbers": ["split", "blocks"], "header_style": "dim", "padding": (0, 1, 0, 0)}
    shown = FittingTable(columns, rows_shown, ("blocks", "split"), {}, None, headers, look=look)
    reasons = [f"[bold]{escape(row.type)}[/]: {escape(row.reason)}" for row in rows if row.reason]
    return Group(shown, "", *reasons)


def percent(share: float | None) -> str:
    """A share in percent; 99 % is not 100 %."""
    return "–" if share is None else f"{int(share * 100 + 1e-9)} %"
