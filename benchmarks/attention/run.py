"""How long one attention layer's forward and backward pass takes on 4 and 16 ranks, by plan and by the links' rate.

    sudo python -m benchmarks.attention.run [--quick] [--json] [--markdown FILE]

Every rank sits in a network namespace of its own; a bridge joins them, and each rank's port is limited in both
directions. The ranks of all plans live as long as the run, and steps of all plans and rates are taken in turns, so
that a busy machine does not favour one of them. Three rates: one at which a ring spends DOMINANCE times as long on its
links as its unlimited step takes ("slow": links dominate), one at which it spends as long ("even"), and no limit
("none": the ranks share this machine's processors, so it is the time of computation and of everything that processors
do for communication). Results are compared with attention in fp64 before anything is timed, and the bytes counted
at the collectives with those that the planner predicts, on every rank, in every step.

Exit code: 0 where all goals (`goals`) are met, 1 otherwise, 2 where it cannot be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.support.link_ranks import variables
from benchmarks.support.namespaces import INTERFACE, Bridge, LinkError
from rewriter.common.errors import RewriterError
from rewriter.common.processes import Processes
from rewriter.ir.ops import SequencePlan
from rewriter.passes.sequence.distributed_attention import AttentionShape, wire_bytes

DOMINANCE = 8.0
RATES = ("slow", "even", "none")
GOAL = 0.55  # of ring's time: Attention2D on 16 ranks, 16:16 heads, slow links
HEADERS = 0.04  # of the bytes counted: TCP, IP and Ethernet headers of jumbo frames, acknowledgements, barriers
TOLERANCE = 1e-4  # of results, relative to the largest
ANSWER_SECONDS = 300.0
HEAD_DIM = 64
HEADS = ((16, 16), (16, 4))
COUNTS = (4, 16)  # ranks
WAYS = {"one": "one", "at once": "three, started together", "in turn": "three, one after another"}
DIRECTIONS = ("sent", "received")


@dataclass(frozen=True)
class Case:
    """A plan for one attention layer: query heads, key/value heads."""

    plan: SequencePlan
    heads: int
    kv_heads: int

    @property
    def ranks(self) -> int:
        return self.plan.ranks

    @property
    def name(self) -> str:
        """As the tables have it."""
        heads, rows, columns = self.plan.grid
        late = ", overlapped" if self.plan.overlap else ""
        if self.plan.kind != "attention2d":
            return {"ring": "ring", "ulysses": "Ulysses"}[self.plan.kind]
        if (heads, columns) == (1, 1):
            return "KV gather"
        if heads == 1:
            return f"2D {rows}×{columns}{late}"
        return f"heads {heads}, " + (f"2D {rows}×{columns}{late}" if columns > 1 else f"KV gather {rows}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.plan.kind,
            "grid": list(self.plan.grid),
            "overlap": self.plan.overlap,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
        }


def plans(ranks: int, kv_heads: int) -> list[SequencePlan]:
    """What is compared on `ranks` ranks: with few key/value heads the best grid is taller than wide, and heads-first
    stops where key/value heads would be repeated."""
    square = round(ranks**0.5)
    grids = [(1, square, square)]
    if ranks == 16:
        grids += [(1, 8, 2)] if kv_heads == 4 else []
        heads_first = [(4, 2, 2), (4, 4, 1)]
    else:
        heads_first = [(2, 2, 1)]
    return [
        SequencePlan("ring", (1, ranks, 1)),
        *(SequencePlan("attention2d", grid, overlap) for grid in grids for overlap in (False, True)),
        SequencePlan("attention2d", (1, ranks, 1)),
        *(SequencePlan("attention2d", grid) for grid in heads_first),
        SequencePlan("ulysses", (ranks, 1, 1)),
    ]


def cases(ranks: int) -> list[Case]:
    return [Case(plan, heads, kv) for heads, kv in HEADS for plan in plans(ranks, kv)]


@dataclass(frozen=True)
class Step:
    """What all ranks did: seconds from the first's begin to the last's end, bytes by direction and rank."""

    seconds: float
    counted: dict[str, list[int]]
    interface: dict[str, list[int]]


@dataclass
class Result:
    """A case's steps by rate, and the bytes that the planner predicts by rank, sent and received alike."""

    case: Case
    predicted: list[int]
    steps: dict[str, list[Step]] = field(default_factory=lambda: {rate: [] for rate in RATES})

    def seconds(self, rate: str) -> float:
        return statistics.median(step.seconds for step in self.steps[rate])

    @property
    def all_steps(self) -> list[Step]:
        return [step for rate in RATES for step in self.steps[rate]]

    @property
    def busiest(self) -> int:
        """Bytes that the rank receives which receives most."""
        return max(self.predicted)

    @property
    def exact(self) -> bool:
        """Whether every rank of every step counted what is predicted."""
        return all(step.counted[way] == self.predicted for step in self.all_steps for way in DIRECTIONS)

    @property
    def overhead(self) -> tuple[float, float]:
        """Least and most that the interfaces of all ranks together passed beyond the bytes counted, as a share of
        those, in a step at the slow rate."""
        shares = [
            sum(step.interface[way]) / sum(step.counted[way]) - 1 for step in self.steps["slow"] for way in DIRECTIONS
        ]
        return min(shares), max(shares)


class Ranks:
    """Processes of rank.py on the first ports of a bridge, which all do what they are told. A context
    manager; on leaving it, the processes are ended."""

    def __init__(self, bridge: Bridge, directory: Path, ranks: int) -> None:
        self.bridge, self.directory, self.ranks = bridge, directory / f"{ranks}-ranks", ranks
        self.cases = cases(ranks)
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.directory.mkdir()
        spec = {
            "directory": str(self.directory.parent),
            "interface": INTERFACE,
            "store": str(self.directory / "store"),
            "ranks": self.ranks,
            "head_dim": HEAD_DIM,
            "cases": [case.as_dict() for case in self.cases],
        }
        path = self.directory / "spec.json"
        path.write_text(json.dumps(spec))
        self.job = Processes(grace=0.0)
        self.job.__enter__()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        for rank in range(self.ranks):
            words = [*self.bridge.inside(rank), sys.executable, "-m", "benchmarks.attention.rank", str(path), str(rank)]
            self.processes.append(self.job.start(f"rank {rank}", words, variables(self.bridge), **pipes))
        return self

    def __exit__(self, *error: Any) -> None:
        self.job.__exit__(*error)

    def told(self, **order: Any) -> list[dict[str, Any]]:
        """Every rank's answer to an order. Raises RewriterError if a rank ends or does not answer."""
        line = json.dumps(order).encode() + b"\n"
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                assert process.stdin is not None
                assert process.stdout is not None
                try:
                    process.stdin.write(line)
                    process.stdin.flush()
                except BrokenPipeError:
                    raise self._failed(rank, order) from None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            answers: dict[int, dict[str, Any]] = {}
            deadline = time.monotonic() + ANSWER_SECONDS
            while len(answers) < self.ranks:
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    raise self._failed(min(set(range(self.ranks)) - set(answers)), order)
                for key, _ in ready:
                    answer = key.fileobj.readline()  # type: ignore[union-attr]  # a rank writes whole lines
                    if not answer:
                        raise self._failed(key.data, order)
                    answers[key.data] = json.loads(answer)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.ranks)]

    def step(self, number: int) -> Step:
        """One step of a case."""
        return _step(self.told(do="attention", case=number))

    def check(self, number: int) -> None:
        """Run a case and compare its results. Raises RewriterError where they are wrong."""
        case = self.cases[number]
        error = max(answer["error"] for answer in self.told(do="check", case=number))
        if not error <= TOLERANCE:
            raise RewriterError(
                f"attention: {case.name} on {case.ranks} ranks, {case.heads}:{case.kv_heads} heads: results are off by "
                f"{error:.1e}, limit {TOLERANCE:.0e}"
            )

    def _failed(self, rank: int, order: dict[str, Any]) -> RewriterError:
        said = self.job.failure(f"rank {rank}", None).details
        return RewriterError(f"attention: rank {rank} of {self.ranks} gave no answer to {order}:\n{said}")


def _step(answers: Sequence[dict[str, Any]]) -> Step:
    def by_rank(name: str) -> dict[str, list[int]]:
        return {way: [answer[name][way] for answer in answers] for way in DIRECTIONS}

    seconds = max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers)
    return Step(seconds, by_rank("counted"), by_rank("interface"))


def prepare(directory: Path, tokens: int) -> None:
    """Write random q, k, v and do of every choice of heads, and the results in fp64, rounded to fp32."""
    generator = torch.Generator().manual_seed(0)
    for heads, kv_heads in HEADS:
        q, do = (torch.randn(1, heads, tokens, HEAD_DIM, generator=generator) for _ in range(2))
        k, v = (torch.randn(1, kv_heads, tokens, HEAD_DIM, generator=generator) for _ in range(2))
        inputs = [x.double().requires_grad_() for x in (q, k, v)]
        o = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=heads != kv_heads)
        found = [o.detach(), *torch.autograd.grad(o, inputs, do.double())]
        results = {name: x.float().contiguous() for name, x in zip(("o", "dq", "dk", "dv"), found, strict=True)}
        save_file({"q": q, "k": k, "v": v, "do": do, **results}, directory / f"{heads}-{kv_heads}.safetensors")


def predicted(case: Case, tokens: int) -> list[int]:
    """Bytes that the planner says each rank sends, and receives, in a step."""
    shape = AttentionShape(case.heads, case.kv_heads, HEAD_DIM, HEAD_DIM, dtype_bytes=4)
    return [wire_bytes(case.plan, shape, tokens, rank).total for rank in range(case.ranks)]


@dataclass
class Exchange:
    """Seconds of one exchange of q, k and v by heads, by way and rate; bytes that each rank sends to each other."""

    tokens: int
    nbytes: int
    seconds: dict[str, dict[str, list[float]]]

    def median(self, way: str, rate: str) -> float:
        return statistics.median(self.seconds[way][rate])


class Bench:
    """All ranks of a run and the rates of their links."""

    def __init__(self, bridge: Bridge, groups: Sequence[Ranks], tokens: int, console: Console) -> None:
        self.bridge, self.groups, self.tokens, self.console = bridge, groups, tokens, console
        self.results = [[Result(case, predicted(case, tokens)) for case in group.cases] for group in groups]
        self.dropped = 0
        self.rates: dict[str, float | None] = {"none": None}

    def calibrate(self) -> None:
        """Check every case, then find the rates."""
        for group, results in zip(self.groups, self.results, strict=True):
            for number in range(len(results)):
                group.check(number)
            self.console.print(f"{group.ranks} ranks: {len(results)} plans compute attention")
        most = self.groups[-1]
        ring = self.results[-1][0]
        unlimited = statistics.median(most.step(0).seconds for _ in range(3))
        even = ring.busiest / unlimited
        self.rates = {"slow": even / DOMINANCE, "even": even, "none": None}
        self.console.print(
            f"ring on {most.ranks} ranks: {unlimited:.2f} s without a limit; limits {self.rates['slow'] / 1e6:.1f} and "
            f"{even / 1e6:.1f} MB/s in each direction of each port"
        )

    def measure(self, rounds: int) -> None:
        """All cases in turns; each round begins with another."""
        for number in range(rounds):
            for rate in RATES:
                self._limit(rate)
                for group, results in zip(self.groups, self.results, strict=True):
                    for turned in range(len(results)):
                        place = (turned + number) % len(results)
                        results[place].steps[rate].append(group.step(place))
            self.console.print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}")
        self._limit("none")

    def exchanges(self, sizes: Sequence[int], rounds: int) -> list[Exchange]:
        """q, k and v of `sizes` local tokens by heads, as Ulysses starts: one message to each rank, or three."""
        heads, most = HEADS[0][0], self.groups[-1]
        found = []
        for tokens in sizes:
            nbytes = 3 * heads // most.ranks * tokens * HEAD_DIM * 4
            exchange = Exchange(tokens, nbytes, {way: {rate: [] for rate in RATES} for way in WAYS})
            times = max(1, 10 // tokens)
            for rate in RATES:
                self._limit(rate)
                for _ in range(rounds):
                    for way in WAYS:
                        order = {"heads": heads, "tokens": tokens, "head_dim": HEAD_DIM, "way": way, "times": times}
                        step = _step(most.told(do="exchange", **order))
                        exchange.seconds[way][rate].append(step.seconds / times)
            found.append(exchange)
        self._limit("none")
        return found

    def _limit(self, rate: str) -> None:
        self.dropped += self.bridge.dropped()
        self.bridge.set_rate(self.rates[rate])


def goals(found: Sequence[Result]) -> dict[str, bool]:
    """What must hold, in words, and whether it does."""
    by_name = {(r.case.ranks, r.case.kv_heads, r.case.name): r for r in found}
    many, few = HEADS[0]  # equally many query and key/value heads
    assert many == few
    ring_16, ring_4 = (by_name[ranks, few, "ring"].seconds("slow") for ranks in (16, 4))
    result = {}
    for late in ("", ", overlapped"):
        here, there = (by_name[p, few, f"2D {s}×{s}{late}"].seconds("slow") for p, s in ((16, 4), (4, 2)))
        ratio = here / ring_16
        result[f"16 ranks, 16:16 heads, slow links: 2D 4×4{late} takes {ratio:.2f} of ring's time, at most {GOAL}"] = (
            ratio <= GOAL
        )
        result[f"from 4 to 16 ranks 2D{late} goes from {there:.2f} to {here:.2f} s: falls"] = here < there
    result[f"from 4 to 16 ranks ring goes from {ring_4:.2f} to {ring_16:.2f} s: does not fall"] = ring_16 >= ring_4
    steps = sum(len(r.all_steps) for r in found)
    result[f"bytes counted on every rank in {steps} steps are those predicted"] = all(r.exact for r in found)
    low, high = min(r.overhead[0] for r in found), max(r.overhead[1] for r in found)
    result[f"interfaces passed {low:.1%} to {high:.1%} more, expected 0 to {HEADERS:.0%}"] = (
        low >= 0 and high <= HEADERS
    )
    return result


def tables(found: Sequence[Result], tokens: int) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) for each number of ranks and heads."""
    header = ["plan", "MB", "counted", "on wire"]
    for rate in RATES:
        header += [f"{rate}, s", "of ring's"]
    for ranks in sorted({r.case.ranks for r in found}):
        for heads, kv_heads in HEADS:
            group = [r for r in found if (r.case.ranks, r.case.kv_heads) == (ranks, kv_heads)]
            ring = group[0]
            rows = []
            for r in group:
                low, high = r.overhead
                row = [r.case.name, f"{r.busiest / 1e6:.2f}", "exactly" if r.exact else "NOT"]
                row.append(f"+{(low + high) / 2:.1%}")
                for rate in RATES:
                    row += [f"{r.seconds(rate):.2f}", f"{r.seconds(rate) / ring.seconds(rate):.2f}"]
                rows.append(row)
            yield f"{ranks} ranks, {heads}:{kv_heads} heads, {tokens} tokens", header, rows


def exchange_table(found: Sequence[Exchange]) -> tuple[str, list[str], list[list[str]]]:
    """What one message instead of three wins."""
    rows = []
    for exchange in found:
        for rate in RATES:
            one, *others = (exchange.median(way, rate) for way in WAYS)
            row = [str(exchange.tokens), f"{exchange.nbytes / 1e3:.1f}", rate, f"{one * 1e3:.2f}"]
            rows.append(row + [f"{other * 1e3:.2f} ({other / one:.2f} ×)" for other in others])
    header = ["local tokens", "KB to each rank", "rate", *(f"{words}, ms" for words in WAYS.values())]
    return "q, k and v by heads on 16 ranks, 16:16 heads: one all-to-all, or three", header, rows


def shown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    result = Table(title=title)
    for number, name in enumerate(header):
        result.add_column(name, justify="right" if number else "left")
    for row in rows:
        result.add_row(*row)
    return result


def as_markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"**{title}**", "", f"| {' | '.join(header)} |", f"| --- {'| ---: ' * (len(header) - 1)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def as_json(bench: Bench, found: Sequence[Result], exchanges: Sequence[Exchange]) -> str:
    return json.dumps(
        {
            "tokens": bench.tokens,
            "rates_bytes_per_second": bench.rates,
            "goals": goals(found),
            "dropped": bench.dropped,
            "cases": [
                {
                    **r.case.as_dict(),
                    "ranks": r.case.ranks,
                    "predicted_bytes": r.predicted,
                    "steps": {rate: [vars(step) for step in r.steps[rate]] for rate in RATES},
                }
                for r in found
            ],
            "exchanges": [vars(exchange) for exchange in exchanges],
        },
        indent=2,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Time of attention over sequence-sharded tokens, by plan.")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each plan at each rate (default 5)")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the whole sequence (default 1024)")
    parser.add_argument("--quick", action="store_true", help="few tokens and one round: does it run? No verdict")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, progress goes to stderr")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to FILE too")
    options = parser.parse_args()
    tokens, rounds = (128, 1) if options.quick else (options.tokens, options.rounds)
    console = Console(stderr=options.json, highlight=False, width=None if sys.stdout.isatty() else 120)
    # So that the namespaces go away when the benchmark is told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="attention-") as name,
            Bridge(max(COUNTS)) as bridge,
            ExitStack() as stack,
        ):
            prepare(Path(name), tokens)
            groups = [stack.enter_context(Ranks(bridge, Path(name), ranks)) for ranks in COUNTS]
            bench = Bench(bridge, groups, tokens, console)
            bench.calibrate()
            bench.measure(rounds)
            exchanges = bench.exchanges((1, 64) if options.quick else (1, 64, 256), rounds)
    except (LinkError, RewriterError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    found = [result for results in bench.results for result in results]
    parts = [*tables(found, tokens), exchange_table(exchanges)]
    if options.markdown:
        options.markdown.write_text("\n\n".join(as_markdown(*part) for part in parts) + "\n")
    if options.json:
        print(as_json(bench, found, exchanges))
    else:
        for part in parts:
            console.print(shown(*part))
        console.print(f"segments dropped at the limits: {bench.dropped}")
    if options.quick:
        return 0
    for words, met in goals(found).items():
        console.print(f"{'met' if met else 'MISSED'}: {words}", style=None if met else "red", markup=False)
    return 0 if all(goals(found).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
