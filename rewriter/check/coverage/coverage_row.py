"""What is known of one type: which comparisons hold, and for the others the reason and the line that stopped them."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from rewriter.common.errors import RewriterError

# In the order in which they are made; a reason is named after its check.
CHECKS = ("builds", "traces", "ladder", "tp2", "tp4", "desync", "emitted")
VARIANT_CHECKS = ("traces", "ladder", "tp2")


@dataclass
class Coverage:
    """The row of one type.

    `stream`: it has a residual stream, of `blocks` blocks. `reductions`: all-reduces of the layers on two ranks, none
    where no layer can be split. `replicated`: what ranks compute alike instead of sharing it, with the reason.
    `reasons`: by check, why it does not hold. `wrong`: checks whose result was computed and is not the expected one,
    in contrast to those that were refused. `variants`: by switch of the config that changes the forward, why not all
    of `VARIANT_CHECKS` hold that hold for the default, "" where they do. `versions`: of the libraries that it was found
    with.
    """

    type: str
    builds: bool = False
    traces: bool = False
    ladder: bool = False
    tp2: bool = False
    tp4: bool = False
    desync: bool = False
    emitted: bool = False
    stream: bool = False
    blocks: int = 0
    reductions: int = 0
    replicated: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    variants: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    versions: dict[str, str] = field(
        default_factory=lambda: {name: version(name) for name in ("transformers", "torch")}
    )

    @property
    def reason(self) -> str | None:
        """Every distinct reason with the checks that it stopped; None when all checks hold."""
        by_text: dict[str, list[str]] = {}
        for check, text in self.reasons.items():
            by_text.setdefault(text, []).append(check)
        return "; ".join(f"{', '.join(checks)}: {text}" for text, checks in by_text.items()) or None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "reason": self.reason}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; of an earlier version's, which knew no variants, too."""
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data or f.name != "variants"})


def explain(error: BaseException) -> str:
    """What went wrong in one line, and where: the source line of the first cause, in transformers where it is there."""
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
