"""Progress of `rewrite`: one line on a terminal's stderr, nothing in a log."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressLine:
    """Call it with a stage, and while one runs with how much of it is done: `progress("weights", done, total)`.

    `done` and `total` are in the stage's own unit (bytes, layers); a stage without a total shows a spinner. Figures by
    name (`loss=`) are shown after the time that is left. Where stderr is no terminal nothing is written, so that logs
    hold results and errors only.
    """

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (progress.SpinnerColumn(), *progress.Progress.get_default_columns()[:3])
            times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn(), "{task.fields[figures]}")
            self._bars = progress.Progress(*columns, *times, console=Console(stderr=True), transient=True)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: float = 0, total: float | None = None, **figures: float | None) -> None:
        if self._bars is None:
            return
        if stage != self._stage or self._task is None:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._stage, self._task = stage, self._bars.add_task(stage, total=total, figures="")
        known = {name.replace("_", " "): value for name, value in figures.items() if value is not None}
        words = ", ".join(f"{name} {value:,.4g}" for name, value in known.items())
        self._bars.update(self._task, completed=done, total=total, figures=words)
