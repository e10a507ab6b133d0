"""The log of a run: one JSON line per logged step, TensorBoard where it is installed, and progress."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rewriter.adapt.run import Run

METRICS = "metrics.jsonl"
_KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss")


class Metrics(TrainerCallback):
    """Writes what is logged to `metrics.jsonl`; on rank 0 alone.

    A line has the step, the tokens seen until then, and what the Trainer logs, with the loss of the step, its parts and
    the tokens per second since the line before; `parts` gives those of the last step. When a run is resumed, lines
    after the checkpoint are dropped.
    """

    def __init__(self, run: Run, parts: Callable[[], Mapping[str, float]]) -> None:
        self.run, self.parts, self.path = run, parts, run.place / METRICS
        self.tokens_per_step = run.sizes.batch * run.data.length
        self._last = (0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        kept = [line for line in lines if _step(line) <= state.global_step]
        self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._last = (state.global_step, time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logged = {name: value for name, value in (logs or {}).items() if name in _KEPT}
        if not logged:
            return
        if "loss" in logged:
            # of the step, not the Trainer's mean since the last line: that is another one after an interruption
            logged |= self.parts()
            now, (step, then) = time.perf_counter(), self._last
            if state.global_step > step:
                logged["tokens_per_second"] = round((state.global_step - step) * self.tokens_per_step / (now - then), 1)
                self._last = (state.global_step, now)
            speed = logged.get("tokens_per_second")
            self.run.context.progress(
                "training", state.global_step, state.max_steps, loss=logged["loss"], tokens_per_second=speed
            )
        entry: dict[str, Any] = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step}
        entry |= {name: value if math.isfinite(value) else str(value) for name, value in logged.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, in order."""
    return [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # the line that was being written when the run was killed


def tensorboard(run: Path, step: int) -> list[TrainerCallback]:
    """The Trainer's callback for TensorBoard, which writes below the run's directory; none where it is missing.

    A run that goes on after `step` hides what was written past it before.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return []
    from transformers.integrations import TensorBoardCallback

    place = run / "tensorboard"
    # A file's name begins with the second, and TensorBoard reads files in the order of their names: within one second
    # process ids would decide. A clock that was set back is not awaited.
    seconds = [path.name.split(".")[3] for path in place.glob("events.out.tfevents.*")]
    last = max((int(second) for second in seconds if second.isdecimal()), default=0)
    if last <= time.time() < last + 1:
        time.sleep(last + 1 - time.time())
    return [TensorBoardCallback(SummaryWriter(str(place), purge_step=step + 1))]


@contextmanager
def told_where_it_is_awaited() -> Iterator[None]:
    """A thread that keeps its exception for the one that waits for it, as TensorBoard's writer does, prints no
    traceback: the next event raises it."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if getattr(args.thread, "exception", None) is not args.exc_value:
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
