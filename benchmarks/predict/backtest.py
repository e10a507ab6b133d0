"""Predictions against times per token that others measured and published (benchmarks/predict/points.yaml).

    python -m benchmarks.predict.backtest                  # all points, and the four pages
    python -m benchmarks.predict.backtest --only h800      # those whose id has it; writes nothing
    python -m benchmarks.predict.backtest --json FILE      # all figures, for tools

No constant is fitted to the points by a program. A server's time per output token is that of a decode step at the mean
context, and of the prefills of the other batch − 1 clients' requests that fall into a request, spread over its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.predict.backtest_points import (
    Design,
    Gain,
    LinkKind,
    Point,
    Published,
    fabric_of,
    read_published,
    traced,
)
from rewriter import api
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.predict.results import Prediction

PAGE = Path(__file__).parents[2] / "docs" / "results" / "backtest.md"
SUMMARY = Path(__file__).parents[2] / "rewriter" / "predict" / "backtest.yaml"
LEFT_OUT = PAGE.parents[1] / "figures" / "backtest-left-out.md"
NVLINK = "NVLink"
POINTS = {NVLINK: "backtest-nvlink.md", "PCIe, RoCE and TCP": "backtest-pcie.md"}  # pages beside LEFT_OUT
HEADER = ("point", "published, ms", "predicted, ms", "error", "interval", "in it")
NEAR = 0.20
MEDIAN, MEDIAN_ELSEWHERE, SHARE, COVERED = 0.08, 0.12, 0.90, (0.70, 0.90)  # goals; elsewhere: not NVLink
GAIN_MEDIAN, GAIN_WORST = 0.05, 0.10


@dataclass(frozen=True)
class Outcome:
    """A point and its prediction. `seconds` per token of each sequence; `low` and `high` bound its interval of 80 %;
    `why` says why there is no prediction, or why it is not counted."""

    point: Point
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    communication: float = 0.0
    why: str = ""

    @property
    def error(self) -> float | None:
        return None if self.seconds is None else self.seconds / self.point.seconds - 1

    @property
    def counted(self) -> bool:
        return self.seconds is not None and not self.why

    @property
    def within(self) -> bool | None:
        if self.low is None or self.high is None:
            return None
        return self.low <= self.point.seconds <= self.high


class Predictions:
    """Predictions by `rewriter.api.predict`, each made once. `what_if`: changes to the delays of all."""

    def __init__(self, what_if: Sequence[str] = ()) -> None:
        self.what_if = what_if
        self.known: dict[tuple[object, ...], tuple[Prediction, ...]] = {}
        self.programs: dict[tuple[str, str], Program] = {}

    def of(self, job: Job, recipes: Sequence[str], batch: int, prompt: int, generate: int) -> tuple[Prediction, ...]:
        """Of each recipe, in order."""
        key = (job, tuple(recipes), batch, prompt, generate)
        if key not in self.known:
            fabric = fabric_of(job.fabric)
            workload = api.Workload(
                tp=job.gpus, batch=batch, prompt=prompt, generate=generate, graphed=job.graphed, compiled=job.compiled,
                served=job.served, attention=job.design.attention, all_logits=job.design.all_logits, cache=job.kv,
            )  # fmt: skip
            cluster = api.Cluster(fabric, tuple(self.what_if), library_of(job, fabric.libraries))
            whole = {"tensor_parallel.vocabulary": False} if job.design.whole_head and job.gpus > 1 else None
            program = self.program(job.model, job.dtype)
            self.known[key] = api.predict(program, recipes, workload, cluster, set=whole).predictions
        return self.known[key]

    def program(self, model: str, dtype: str) -> Program:
        if (model, dtype) not in self.programs:
            self.programs[model, dtype] = traced(model, dtype)
        return self.programs[model, dtype]


USUAL = Design()


@dataclass(frozen=True)
class Job:
    """What runs where. `all_reduce`: nccl, or custom, by the library that `software` names."""

    model: str
    dtype: str
    fabric: str
    gpus: int
    all_reduce: str | None
    software: str = ""
    graphed: bool = True
    compiled: bool = True
    served: bool = False
    kv: Literal["float8"] | None = None
    design: Design = USUAL
    library: str | None = None


def library_of(job: Job, known: Sequence[str]) -> str | None:
    """Whose all-reduce: NCCL's, or of the software's own kernels the nearest that the fabric has (None: its choice)."""
    if job.library is not None:
        return job.library
    if job.all_reduce is None or not known:
        return None
    if job.all_reduce == "nccl":
        return "nccl" if "nccl" in known else None
    named = job.software.lower()
    own = [name for name, said in (("trtllm", "tensorrt"), ("sglang", "sglang"), ("vllm", "vllm")) if said in named]
    return next((name for name in (*own, "vllm") if name in known), None)


def outcome(point: Point, predictions: Predictions) -> Outcome:
    """The prediction of one point: so many decode steps and prefills per token, by what was measured."""
    entry, source = point.entry, point.source
    job = Job(
        entry.model, point.dtype, source.fabric, entry.gpus, point.all_reduce, source.software,
        source.launch == "graphed", source.compiled, source.served or source.measured == "server", source.kv,
        source.design,
    )  # fmt: skip

    def predicted(batch: int, prompt: int, generate: int) -> Prediction:
        return predictions.of(job, [entry.recipe], batch, prompt, generate)[0]

    if source.measured == "prefill":
        try:
            first = predicted(entry.batch, entry.prompt, 1)
        except RewriterError as error:
            return Outcome(point, why=str(error).partition(". ")[0])
        low, high = first.prefill_interval or (None, None)
        return Outcome(point, first.prefill.seconds, low, high, first.prefill.exposed_seconds, entry.not_counted or "")
    context = entry.generate // 2 if source.cache == "paged" else entry.generate - 1
    try:
        step = predicted(entry.batch, entry.prompt + context, 1)
    except RewriterError as error:
        return Outcome(point, why=str(error).partition(". ")[0])
    steps, prefills, first = 1.0, 0.0, step
    if source.measured == "generation":
        together = max(1, min(entry.batch, source.chunk // entry.prompt)) if source.chunk else entry.batch
        first = predicted(together, entry.prompt, entry.generate)
        steps, prefills = (entry.generate - 1) / entry.generate, entry.batch / together / entry.generate
    elif source.measured == "server" and entry.batch > 1:
        first, prefills = predicted(1, entry.prompt, 1), (entry.batch - 1) / entry.generate
    low, high = bounds(step, steps, first, prefills)
    why = entry.not_counted or ""
    seconds = step.seconds_per_token * steps + first.prefill.seconds * prefills
    return Outcome(point, seconds, low, high, step.exposed_communication_seconds_per_token, why)


@dataclass(frozen=True)
class GainOutcome:
    """A gain and its prediction. `saved`: seconds per token by which the recipe is faster."""

    gain: Gain
    predicted: float
    saved: float

    @property
    def difference(self) -> float:
        return self.predicted - self.gain.value


def gain_outcome(gain: Gain, predictions: Predictions) -> GainOutcome:
    """The prediction of one gain, each side on its own machine."""
    over = gain.over

    def side(recipe: str, fabric: str, gpus: int, library: str | None) -> Prediction:
        job = Job(
            gain.model, "bfloat16", fabric, gpus, gain.all_reduce, kv=gain.kv, design=gain.design, library=library
        )
        return predictions.of(job, [recipe], gain.batch, gain.prompt, gain.generate)[0]

    ours = side(gain.recipe, gain.fabric, gain.gpus, gain.library)
    other = side(over.recipe, over.fabric or gain.fabric, over.gpus or gain.gpus, over.library or gain.library)
    if gain.of != "generation":
        before, after = ((p.decode if gain.of == "decode" else p.prefill).seconds for p in (other, ours))
        return GainOutcome(gain, before / after, before - after)
    saved = gain.batch / other.tokens_per_second - gain.batch / ours.tokens_per_second
    return GainOutcome(gain, ours.tokens_per_second / other.tokens_per_second, saved)


def bounds(
    step: Prediction, steps: float, first: Prediction, prefills: float
) -> tuple[float, float] | tuple[None, None]:
    """The interval of 80 % of so many decode steps and prefills, which are off together: kernels are the same."""
    if step.seconds_per_token_interval is None or first.prefill_interval is None:
        return None, None
    pairs = zip(step.seconds_per_token_interval, first.prefill_interval, strict=True)
    low, high = (decode * steps + prefill * prefills for decode, prefill in pairs)
    return low, high


@dataclass(frozen=True)
class Summary:
    """Figures over counted points. `coverage` is None where predictions have no intervals."""

    points: int
    devices: int
    median: float
    share: float
    mean_signed: float
    coverage: float | None

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Summary | None:
        counted = [one for one in outcomes if one.counted]
        errors = [one.error for one in counted if one.error is not None]
        if not errors:
            return None
        inside = [one.within for one in counted if one.within is not None]
        return cls(
            len(errors), len({one.point.fabric.device.name for one in counted}),
            statistics.median(abs(e) for e in errors), sum(abs(e) <= NEAR for e in errors) / len(errors),
            statistics.fmean(errors), sum(inside) / len(inside) if inside else None,
        )  # fmt: skip

    def __str__(self) -> str:
        covered = "no intervals" if self.coverage is None else f"{self.coverage:.0%} within their intervals of 80 %"
        return (
            f"{self.points} points on {self.devices} devices: median |error| {self.median:.1%}, "
            f"{self.share:.0%} within 20 %, mean error {self.mean_signed:+.1%}, {covered}"
        )


def row(one: Outcome) -> list[str]:
    """id, published, predicted, error, interval, whether the truth lies in it, and why it does not count."""
    ms = "—" if one.seconds is None else f"{one.seconds * 1e3:.2f}"
    error = "—" if one.error is None else f"{one.error:+.1%}"
    bounds = "—" if one.low is None or one.high is None else f"{one.low * 1e3:.2f} to {one.high * 1e3:.2f}"
    inside = {None: "—", True: "yes", False: "no"}[one.within]
    return [one.point.entry.id, f"{one.point.seconds * 1e3:.2f}", ms, error, bounds, inside, one.why]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell for cell in line) + " |" for line in lines)


def groups(outcomes: Sequence[Outcome]) -> list[tuple[str, Summary]]:
    """Summaries by fabric, number of GPUs, batch and software."""
    keys = {
        "link": lambda o: o.point.source.link,
        "NVLink": lambda o: "yes" if o.point.source.link == "nvlink" else "no",
        "fabric": lambda o: o.point.source.fabric,
        "measured": lambda o: o.point.source.measured,
        "GPUs": lambda o: str(o.point.entry.gpus),
        "batch": lambda o: "1" if o.point.entry.batch == 1 else "2–16" if o.point.entry.batch <= 16 else "over 16",
        "dtype": lambda o: "8 bits" if o.point.dtype == "float8" else "16 bits",
        "source": lambda o: o.point.source.name,
    }
    found = []
    for what, key in keys.items():
        for value in sorted({key(one) for one in outcomes}):
            summary = Summary.of(one for one in outcomes if key(one) == value)
            if summary is not None:
                found.append((f"{what} {value}", summary))
    return found


def missed(outcomes: Sequence[Outcome], gains: Sequence[GainOutcome]) -> list[str]:
    """The goals that are not reached, each with its figure."""
    said = []
    by_name = dict(groups(outcomes))
    for s, goal, name in (
        (Summary.of(outcomes), MEDIAN, "all points"),
        (by_name.get("NVLink no"), MEDIAN_ELSEWHERE, "points that are not NVLink"),
    ):
        if s is not None and s.median > goal:
            said.append(f"{name}: median {s.median:.1%}, not {goal:.0%}")
        if s is not None and s.share < SHARE:
            said.append(f"{name}: {s.share:.0%} within {NEAR:.0%}, not {SHARE:.0%}")
    for name, s in by_name.items():
        least, most = COVERED
        if name.startswith("link ") and s.coverage is not None and not least <= s.coverage <= most:
            said.append(f"{name}: {s.coverage:.0%} of {s.points} in their intervals, not {least:.0%} to {most:.0%}")
    off = sorted((abs(one.difference), one.gain.id) for one in gains)
    if off and (middle := statistics.median(size for size, _ in off)) > GAIN_MEDIAN:
        said.append(f"gains: median {middle * 100:.1f} points, not {GAIN_MEDIAN * 100:.0f}")
    said += [
        f"gain {name}: {size * 100:.1f} points, not {GAIN_WORST * 100:.0f}" for size, name in off if size > GAIN_WORST
    ]
    return said


def page(outcomes: Sequence[Outcome], gains: Sequence[GainOutcome]) -> str:
    """docs/results/backtest.md."""
    kinds = [
        [name, str(s.points), f"{s.median:.1%}", f"{s.share:.0%}", f"{s.mean_signed:+.1%}",
         "—" if s.coverage is None else f"{s.coverage:.0%}"] for name, s in groups(outcomes)
    ]  # fmt: skip
    of_ladder = sum("ladder-residual" in g.gain.where or "2501.06589" in g.gain.where for g in gains)
    parts = [
        "# Predictions and published measurements",
        "`python -m benchmarks.predict.backtest` writes this page. Its points are public figures measured by others, "
        "each quoted with its source in [points.yaml](../../benchmarks/predict/points.yaml) and "
        "[points_pcie.yaml](../../benchmarks/predict/points_pcie.yaml). No constant is fitted to them by a "
        "program, but two terms that their sources give as ranges (the skew of ranks, the loss of kernels under a "
        "collective) were chosen with these points in sight: this is no held-out test. "
        "Times are per token of each sequence. [How a gain is predicted](../concepts/prediction.md) explains the "
        "predictions; [Left out of the backtest](../figures/backtest-left-out.md) lists the figures that do not count, "
        "with reasons.",
        f"**{Summary.of(outcomes)}.**",
        "An error below 0 means that the prediction is too fast. A *step* is one decode step; a *generation* is a "
        "prefill and its steps. A *server*'s figure is its time per output token, scheduler included: a step at the "
        "mean context, and the prefills of other clients' requests between steps. Its interval also covers differences "
        "between servers beyond their kernels.",
        "Missed goals: " + ("; ".join(missed(outcomes, gains)) or "none") + ".",
        table(["points", "number", "median abs. error", "within 20 %", "mean error", "in intervals"], kinds),
        "## Gains",
        f"The predictions of {len(gains)} published gains are off by "
        f"{statistics.median(abs(g.difference) for g in gains) * 100:.1f} percentage points in the median. "
        f"{of_ladder} of them are from the paper on Ladder Residual and its repository, measured on 2 to 16 H100; "
        "none is of `desync` or `ladder-own-partial`. These gains are not over the best exact choice of an engine: "
        "each is of a recipe over standard tensor parallelism, of one "
        "fabric over another, or of one library's sums over another's, in tokens per second of a whole generation or "
        "of decode steps alone. Gains of Ladder Residual are predicted in the design of its code, which is gpt-fast's: "
        "NCCL, embedding and head whole on every rank, attention without a fused kernel, logits of the whole prompt. "
        "*Saves* is per token.",
        table(
            ["recipe, model, machine", "GPUs", "batch", "of", "published", "predicted", "difference",
             "saves, ms", "predicted"],
            [[str(g.gain), str(g.gain.gpus), str(g.gain.batch), g.gain.of,
              f"{g.gain.value:.3f}", f"{g.predicted:.3f}", f"{g.difference * 100:+.1f}",
              "—" if g.gain.saved is None else f"{g.gain.saved * 1e3:.2f}", f"{g.saved * 1e3:.2f}"] for g in gains],
        ),
        "## Points",
        "Tables of all points: " + ", ".join(f"[{links}](../figures/{file})" for links, file in POINTS.items()) + ".",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def points(links: str, outcomes: Sequence[Outcome]) -> str:
    """A page of points over these links: one of POINTS."""
    parts = [
        f"# Backtest: {links}",
        "`python -m benchmarks.predict.backtest` also writes this page: every point of the "
        "[backtest](../results/backtest.md) over these links, with its source.",
    ]
    for source in dict.fromkeys(one.point.source.name for one in outcomes):
        mine = [one for one in outcomes if one.point.source.name == source and one.counted]
        if mine and (mine[0].point.source.link == "nvlink") is (links == NVLINK):
            s = mine[0].point.source
            what = f"{s.device} (`{s.fabric}`), {s.software}; {s.measured}. {s.where}, {s.date}. {s.notes}"
            parts += [f"**{source}**: {what}", table(HEADER, [row(one)[:6] for one in mine])]
    return "\n\n".join(parts) + "\n"


def summary(outcomes: Sequence[Outcome]) -> str:
    """rewriter/predict/backtest.yaml: the accuracy of predictions by kind of link, which a verdict quotes."""
    found = {kind: Summary.of(one for one in outcomes if one.point.source.link == kind) for kind in get_args(LinkKind)}
    links = {
        kind: [one.point.fabric.narrowest for one in outcomes if one.counted and one.point.source.link == kind]
        for kind in found
    }
    rows = [
        f"{kind}: {{points: {s.points}, median: {s.median:.3f}, within: {s.share:.2f}, covered: {s.coverage or 0:.2f}, "
        f"from: {min(links[kind]):.2e}, to: {max(links[kind]):.2e}}}"
        for kind, s in found.items()
        if s is not None
    ]
    return "# Written by benchmarks/predict/backtest.py.\n" + "\n".join(rows) + "\n"


def left_out(outcomes: Sequence[Outcome], published: Published) -> str:
    """docs/figures/backtest-left-out.md."""
    parts = [
        "# Left out of the backtest",
        "`python -m benchmarks.predict.backtest` also writes this page: public figures that do not count in the "
        "[backtest](../results/backtest.md), with reasons.",
    ]
    if apart := [one for one in outcomes if not one.counted]:
        parts += ["## Not counted", table([*HEADER[:4], "why"], [[*row(one)[:4], one.why] for one in apart])]
    parts += [
        "## Rejected",
        "These figures were read and left out before anything was predicted:",
        table(["figures", "why"], [[one.what, one.why] for one in published.rejected]),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="points whose id has this text")
    parser.add_argument("--what-if", action="append", default=[], help="as rewrite predict's")
    parser.add_argument("--json", type=Path, help="write all figures to FILE")
    options = parser.parse_args()
    published, predictions = read_published(), Predictions(options.what_if)
    outcomes = []
    for point in published.points:
        if options.only in point.entry.id:
            outcomes.append(outcome(point, predictions))
            cells = row(outcomes[-1])
            print(f"{cells[0]:56} {cells[1]:>8} {cells[2]:>8} {cells[3]:>8}  {cells[4]:18} {cells[5]:4} {cells[6]}")
            sys.stdout.flush()
    gains = []
    for gain in published.gains:
        if options.only in gain.id:
            gains.append(found := gain_outcome(gain, predictions))
            print(f"{gain.id:56} {gain.value:8.3f} {found.predicted:8.3f} {found.difference * 100:+8.1f}", flush=True)
    for name, part in groups(outcomes):
        print(f"{name:45} {part}")
    print(Summary.of(outcomes) or "no point was counted")
    if options.json:
        records: list[dict[str, Any]] = [
            {"id": o.point.entry.id, "published": o.point.seconds, "predicted": o.seconds, "low": o.low,
             "high": o.high, "error": o.error, "exposed": o.communication, "why": o.why}
            for o in outcomes
        ]  # fmt: skip
        records += [{"id": one.gain.id, "published": one.gain.value, "predicted": one.predicted} for one in gains]
        options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")
    if not options.only and not options.what_if:
        PAGE.write_text(page(outcomes, gains), encoding="utf-8")
        SUMMARY.write_text(summary(outcomes), encoding="utf-8")
        LEFT_OUT.write_text(left_out(outcomes, published), encoding="utf-8")
        for links, file in POINTS.items():
            LEFT_OUT.with_name(file).write_text(points(links, outcomes), encoding="utf-8")
    for goal in (lacking := missed(outcomes, gains)):
        print(f"missed: {goal}")
    sys.exit(1 if lacking else 0)


if __name__ == "__main__":
    main()
