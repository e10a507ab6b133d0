"""Tables of what `gpu.py` finds, and clocks for CPU and GPU."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Row = tuple[tuple[object, ...], str]  # cells, and what is wrong


@dataclass
class Table:
    """Rows of one section; the last column says ok, or what is wrong."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failed: int = 0

    def add(self, *cells: object, wrong: str = "") -> None:
        self.rows.append((*(str(cell) for cell in cells), f"**{wrong}**" if wrong else "ok"))
        self.failed += bool(wrong)

    def attempt(self, first: str, row: Callable[[], Row]) -> None:
        """A row of what `row` returns, (cells, what is wrong); an exception becomes a row as well."""
        try:
            cells, wrong = row()
        except Exception as error:
            traceback.print_exc()
            cells = ("–",) * (len(self.columns) - 2)
            wrong = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"
        self.add(first, *cells, wrong=wrong)

    def markdown(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        cells = ("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)
        return f"## {self.title}\n\n" + "\n".join(cells) + "\n"


@dataclass(frozen=True)
class Scale:
    """Where everything runs, and how big it is."""

    device: torch.device
    tiny: bool

    def pick(self, full: Any, tiny: Any) -> Any:
        return tiny if self.tiny else full

    def seconds(self, call: Callable[[], object], rounds: int = 15) -> float:
        """The median time of a call, after three that are not counted."""
        rounds = self.pick(rounds, 1)
        for _ in range(self.pick(3, 1)):
            call()
        found = []
        for _ in range(rounds):
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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


def compiled(scale: Scale, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` by torch.compile, for each of its shapes. Past torch's limit of graphs of a function it is an error, where
    torch would run eager code; graphs of earlier functions are forgotten, for one may be compiled for every row."""
    torch.compiler.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(call, backend=scale.pick("inductor", "eager"), dynamic=False)


def copy_rate(scale: Scale) -> float:
    """Bytes per second, read and written, of a copy too big for the caches."""
    source = torch.randn(scale.pick(1 << 28, 1 << 12), device=scale.device)
    into = torch.empty_like(source)
    return 2 * source.nbytes / scale.seconds(lambda: into.copy_(source))


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}[dtype]
