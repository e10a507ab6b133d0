"""Rows of what `run.py` finds, each in a file as soon as it is known, tables of them, and clocks for CPU and GPU."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from rewriter.runtime.streams import replay_of

Row = tuple[tuple[object, ...], str]  # cells, and what is wrong

LOST = 86  # a section's exit status where CUDA has an error that stays: nothing runs in that process any more
SLEEP_CYCLES = 2_000_000  # about 1 ms: what a GPU does at least before what is timed is in its queue
MOST_CYCLES = 200_000_000
CYCLES_PER_SECOND = 2e9  # of the fastest clock


@dataclass(frozen=True)
class Rows:
    """Rows of `section`, each appended to the file `path` at once, as one JSON object per line."""

    path: Path
    section: str

    def write(self, title: str, cells: dict[str, str], failed: bool) -> None:
        self.put({"section": self.section, "title": title, "cells": cells, "failed": failed})

    def put(self, values: dict[str, Any]) -> None:
        """One line, by one write: a process that is killed leaves it whole or not at all."""
        line = json.dumps({**values, "at": round(time.time(), 3)}, ensure_ascii=False) + "\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(line.encode())


@dataclass
class Table:
    """Rows of one section; the last column says ok, or what is wrong. With `kept` each row is written at once."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failed: int = 0
    kept: Rows | None = None

    def add(self, *cells: object, wrong: str = "") -> None:
        self.rows.append((*(str(cell) for cell in cells), f"**{wrong}**" if wrong else "ok"))
        self.failed += bool(wrong)
        if self.kept is not None:
            result = {self.columns[-1]: wrong or "ok"}
            known = dict(zip(self.columns, map(str, cells), strict=False))
            self.kept.write(self.title, known | result, bool(wrong))

    def attempt(self, first: str, row: Callable[[], Row]) -> None:
        """A row of what `row` returns, (cells, what is wrong); an exception becomes a row as well. Where it leaves
        CUDA with an error that stays, the process ends with status LOST."""
        try:
            cells, wrong = row()
        except Exception as error:
            traceback.print_exc()
            self.add(first, *("–",) * (len(self.columns) - 2), wrong=named(error))
            if self.kept is not None and is_lost():
                leave(LOST)
            return
        self.add(first, *cells, wrong=wrong)

    def markdown(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        cells = ("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)
        return f"## {self.title}\n\n" + "\n".join(cells) + "\n"


def named(error: BaseException) -> str:
    """An exception as a cell: its class and its first line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160] if text else ''}"


def is_lost() -> bool:
    """Whether CUDA has an error that stays, such as an illegal address."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def leave(status: int) -> NoReturn:
    """End without waiting for anything."""
    os._exit(status)


def tables(records: Iterable[dict[str, Any]]) -> list[Table]:
    """Rows as they stand in a file, put together by section, title and columns."""
    found: dict[tuple[str, ...], Table] = {}
    for record in records:
        if "cells" not in record:
            continue
        cells: dict[str, str] = record["cells"]
        table = found.setdefault((record["section"], record["title"], *cells), Table(record["title"], tuple(cells)))
        *values, result = cells.values()
        table.add(*values, wrong=result if record["failed"] else "")
    return list(found.values())


@dataclass(frozen=True)
class Scale:
    """Where everything runs, how big it is, and where rows are kept."""

    device: torch.device
    tiny: bool
    kept: Rows | None = None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, full: Any, tiny: Any) -> Any:
        return tiny if self.tiny else full

    def table(self, title: str, columns: tuple[str, ...]) -> Table:
        """A table whose rows are kept. Columns have different names: they are keys of a JSON object."""
        assert len(set(columns)) == len(columns), columns
        return Table(title, columns, kept=self.kept)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], rounds: int = 15) -> float:
        """The median time of a call, after three that are not counted.

        On a GPU between two events. In front of the first is a kernel that only passes time, twice as long as the host
        needs for the call, so that the GPU finds all of it in its queue and never waits for Python.
        """
        rounds, host = self.pick(rounds, 1), 0.0
        for _ in range(self.pick(3, 1)):
            host = self.host_seconds(call)
        cycles = min(MOST_CYCLES, max(SLEEP_CYCLES, int(2 * host * CYCLES_PER_SECOND)))
        found = []
        for _ in range(rounds):
            if self.cuda:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(cycles)
                begin.record()
                call()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) / 1e3)
            else:
                start = time.perf_counter()
                call()
                found.append(time.perf_counter() - start)
        return statistics.median(found)

    def host_seconds(self, call: Callable[[], object]) -> float:
        """What Python takes for a call: on a GPU it does not wait for what the call started."""
        self.synchronize()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def graph(self, call: Callable[[], object]) -> Callable[[], object]:
        """`call` as a CUDA graph, captured on the stream on which it warmed up; without a GPU as it is."""
        if not self.cuda:
            return call
        return replay_of(call, torch.device("cuda"))

    def kernels(self, call: Callable[[], object]) -> list[str]:
        """Names of the kernels that a call runs, replayed ones too, by torch's profiler; none without a GPU."""
        if not self.cuda:
            return []
        call()
        torch.cuda.synchronize()
        both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=both) as profile:
            call()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "trace.json")
            profile.export_chrome_trace(str(path))
            return kernel_names(json.loads(path.read_text(encoding="utf-8", errors="replace")))


def kernel_names(trace: dict[str, Any]) -> list[str]:
    """Of a profiler's trace; ranges of `record_function` also lie on the GPU's lanes, and are none."""
    return [event["name"] for event in trace["traceEvents"] if event.get("cat") == "kernel"]


def compiled(scale: Scale, call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`call` by torch.compile, for each of its shapes, with TorchInductor's `options`. Past torch's limit of graphs of
    a function it is an error, where torch would run eager code; graphs of earlier functions are forgotten, for one may
    be compiled for every row."""
    torch.compiler.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if scale.tiny:
        return torch.compile(call, backend="eager", dynamic=False)
    return torch.compile(call, dynamic=False, options=options or None)


def copy_rate(scale: Scale) -> float:
    """Bytes per second, read and written, of a copy too big for the caches."""
    source = torch.randn(scale.pick(1 << 28, 1 << 12), device=scale.device)
    into = torch.empty_like(source)
    return 2 * source.nbytes / scale.seconds(lambda: into.copy_(source))


def read_rate(scale: Scale) -> float:
    """Bytes per second of reading alone: a reduction of a tensor too big for the caches, the faster of two."""
    source = torch.randn(scale.pick(1 << 28, 1 << 12), device=scale.device)
    return source.nbytes / min(scale.seconds(source.sum), scale.seconds(source.amax))


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}[dtype]
