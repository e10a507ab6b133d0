"""What Ladder Residual wins over a slow link: 2 ranks of emitted modules, eager and with compiled segments.

    sudo python -m benchmarks.overlap.run [--phase prefill|decode] [--quick] [--json]

`prefill` is a pass over a prompt, `decode` a step of `DecodeStep` for a batch of sequences.

The two ranks sit in network namespaces of their own, each on one core. A rate-limited link joins them: in decode, whose
messages are small, a switch whose ports let no burst through; in prefill a cable, whose frames cost these two cores as
little as a network card's. Per mode the rate is chosen so that communication takes about as long as computation
(standard ≈ 2 × bound). A launch starts both ranks anew and times the variants in turns: `standard` (recipe tensor-
parallel), `ladder` (recipe ladder) and `bound` (recipe upper-bound: no communication, meaningless output). The logits
of the first two are compared with `rewriter.simulate` in every launch. Reported is the share of the possible gain that
the ladder won, (standard − ladder) / (standard − bound), as the median over launches. Exit code: 0 at 80 % or more in
every mode (decode: 60 %), 1 below it, 2 where it cannot be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import LlamaConfig

import rewriter as rw
from benchmarks.support.link_ranks import launch
from benchmarks.support.namespaces import Bridge, Link, LinkError, Network
from rewriter.common.errors import RewriterError
from rewriter.emit.module import emit_runtime_module
from rewriter.ir import Program
from rewriter.ir.simulate import Simulator

GOALS = {"prefill": 0.80, "decode": 0.60}
TOLERANCE = 1e-4  # of logits, relative to the largest
RECIPES = {"standard": "tensor-parallel", "ladder": "ladder", "bound": "upper-bound"}
CHECKED = ("standard", "ladder")
MODES = {"eager": False, "compiled": True}  # whether the segments between collectives are
UNLIMITED = 2e9
LAUNCH_SECONDS = 300.0


@dataclass(frozen=True)
class Size:
    """The model and the prompt. Blocks long against a network round trip, attention and MLP about equally long."""

    hidden: int = 1024
    feed_forward: int = 2048
    heads: int = 16
    kv_heads: int = 8
    layers: int = 12
    vocabulary: int = 4096
    tokens: int = 512
    sequences: int = 32  # of a decode step

    def bytes(self, phase: str) -> int:
        """What each rank sends, and receives, in one forward pass: with two ranks, every summed tensor's size once."""
        return (2 * self.layers + 1) * (self.tokens if phase == "prefill" else self.sequences) * self.hidden * 4


@dataclass(frozen=True)
class Launch:
    """One start of both ranks: median seconds by variant, of the slower rank."""

    seconds: dict[str, float]
    errors: dict[str, float]
    dropped: int

    @property
    def share(self) -> float:
        """How much of the gain that no communication would bring, the ladder brings."""
        s = self.seconds
        return (s["standard"] - s["ladder"]) / (s["standard"] - s["bound"])


@dataclass(frozen=True)
class Result:
    """A mode's launches at one rate (bytes per second)."""

    mode: str
    rate: float
    launches: list[Launch]

    def median(self, variant: str) -> float:
        return statistics.median(launch.seconds[variant] for launch in self.launches)

    @property
    def share(self) -> float:
        return statistics.median(launch.share for launch in self.launches)


class Bench:
    """Emitted modules, their shards and expected outputs in a directory, and launches of two ranks on them."""

    def __init__(self, directory: Path, link: Network, size: Size, repetitions: int, phase: str) -> None:
        self.directory, self.link, self.size = directory, link, size
        self.repetitions, self.phase = repetitions, phase
        self.cores = sorted(os.sched_getaffinity(0))[:2]
        if len(self.cores) < 2:
            raise RewriterError("overlap: it needs two cores, one for each rank; this process may use one")

    def prepare(self) -> None:
        """Write every variant's module and shards, and what standard and ladder must compute."""
        program = rw.trace(config(self.size))
        full = weights(program)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, self.size.vocabulary, (1, self.size.tokens), generator=generator)
        expected = {"input_ids": ids}
        for variant, recipe in RECIPES.items():
            sharded = rw.rewrite(program, recipe, tp=2)
            write_module(self.directory, variant, sharded, full)
            if variant in CHECKED:
                with torch.inference_mode():
                    expected[variant] = rw.simulate(sharded, ids, weights=full).contiguous()
        difference = (expected["ladder"] - expected["standard"]).abs().max() / expected["standard"].abs().max()
        if difference < 1e-2:  # else a ladder that computes the standard model would pass
            raise RewriterError(f"overlap: ladder and standard differ by {difference:.1e} only, expected at least 1e-2")
        save_file(expected, self.directory / "expected.safetensors")

    def launch(self, mode: str, variants: Sequence[str]) -> Launch:
        """Start both ranks, time `variants` in turns, check their outputs. Raises RewriterError if a rank fails."""
        spec = {
            "directory": str(self.directory),
            "cores": self.cores,
            "variants": list(variants),
            "compile": MODES[mode],
            "warm_up": 2,
            "repetitions": self.repetitions,
            "phase": self.phase,
            "sequences": self.size.sequences,
        }
        # later launches find what the first compiled
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        results = launch(self.link, "benchmarks.overlap.rank", spec, 2, timeout=LAUNCH_SECONDS, **cache)
        errors = {v: max(r["errors"][v] for r in results) for v in variants if v in CHECKED}
        for variant, error in errors.items():
            if not error <= TOLERANCE:
                raise RewriterError(f"overlap: {variant}, {mode}: logits are off by {error:.1e}, limit {TOLERANCE:.0e}")
        # A pass is over when its slower rank is done.
        seconds = {v: statistics.median(map(max, *(r["seconds"][v] for r in results))) for v in variants}
        return Launch(seconds, errors, self.link.dropped())

    def calibrate(self, mode: str) -> float:
        """Set and return the rate, in bytes per second, at which communication takes as long as computation."""
        self.link.set_rate(UNLIMITED)
        compute = self.launch(mode, ["bound"]).seconds["bound"]  # also compiles
        rate = self.size.bytes(self.phase) / compute
        for _ in range(3):
            self.link.set_rate(rate)
            seconds = self.launch(mode, ["standard", "bound"]).seconds
            ratio = seconds["standard"] / seconds["bound"] - 1
            if abs(ratio - 1) < 0.07:
                break
            rate *= ratio
        return rate


def network(phase: str) -> Network:
    """What joins the two ranks."""
    return Link() if phase == "prefill" else Bridge(2)


def write_module(directory: Path, variant: str, sharded: Program, full: Mapping[str, torch.Tensor]) -> None:
    """`VARIANT.py`, the emitted module, and `VARIANT-RANK.safetensors`, its weights, for every rank."""
    (directory / f"{variant}.py").write_text(emit_runtime_module(sharded))
    simulator = Simulator(sharded, full)
    values = {name: simulator.parameter(name) for name in sharded.parameters}
    for rank in range(sharded.mesh["tp"]):
        shard = {name: value[rank].contiguous() for name, value in values.items()}
        save_file(shard, directory / f"{variant}-{rank}.safetensors")


def config(size: Size) -> LlamaConfig:
    """A Llama of this size."""
    return LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.tokens,
        tie_word_embeddings=False,
    )


def weights(program: Program) -> dict[str, torch.Tensor]:
    """Random fp32 weights by runtime name, such that every block adds to the stream as much as it finds there."""
    generator = torch.Generator().manual_seed(0)
    result = {}
    for name, parameter in program.parameters.items():
        noise = torch.randn(parameter.shape, generator=generator)
        result[name] = 1 + 0.1 * noise if noise.dim() == 1 else noise / noise.shape[-1] ** 0.5
    return result


def measure(bench: Bench, launches: int, console: Console) -> list[Result]:
    """Calibrate each mode, then launch them in turns."""
    rates = {}
    for mode in MODES:
        rates[mode] = bench.calibrate(mode)
        console.print(f"{mode}: link limited to {rates[mode] / 1e6:.1f} MB/s in each direction")
    found: dict[str, list[Launch]] = {mode: [] for mode in MODES}
    for number in range(launches):
        for mode, rate in rates.items():
            bench.link.set_rate(rate)
            # The order of variants turns, so that none is always the first after a start.
            names = list(RECIPES)
            turned = names[number % len(names) :] + names[: number % len(names)]
            launch = bench.launch(mode, turned)
            found[mode].append(launch)
            console.print(f"launch {number + 1}, {mode}: {described(launch.seconds)}, share won {launch.share:.0%}")
    return [Result(mode, rates[mode], found[mode]) for mode in MODES]


def described(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds[name] * 1e3:.0f} ms" for name in RECIPES)


def table(results: Sequence[Result], phase: str) -> Table:
    """What a person reads."""
    shown = Table(title=f"{phase} on 2 ranks: medians in ms, link in MB/s, speed-up of ladder over standard")
    shown.add_column("mode")
    for column in ("link", *RECIPES, "speed-up", "share won", "range"):
        shown.add_column(column, justify="right")
    for result in results:
        shares = [launch.share for launch in result.launches]
        standard, ladder, bound = (result.median(v) for v in RECIPES)
        shown.add_row(
            result.mode,
            f"{result.rate / 1e6:.1f}",
            *(f"{x * 1e3:.0f}" for x in (standard, ladder, bound)),
            f"{standard / ladder:.2f}×",
            f"{result.share:.0%}",
            f"{min(shares):.0%} – {max(shares):.0%}",
        )
    return shown


def as_json(size: Size, results: Sequence[Result], goal: float) -> str:
    modes = [
        {
            "mode": r.mode,
            "rate_bytes_per_second": r.rate,
            "seconds": {v: r.median(v) for v in RECIPES},
            "share_won": r.share,
            "launches": [{**asdict(launch), "share_won": launch.share} for launch in r.launches],
        }
        for r in results
    ]
    return json.dumps({"size": asdict(size), "goal": goal, "modes": modes}, indent=2)


def main() -> int:
    parser = argparse.ArgumentParser(description="What Ladder Residual wins over a slow link.")
    parser.add_argument("--launches", type=int, default=7, help="starts of both ranks per mode (default 7)")
    parser.add_argument("--repetitions", type=int, default=3, help="timed passes of a variant per launch (default 3)")
    parser.add_argument("--phase", choices=("prefill", "decode"), default="prefill")
    parser.add_argument("--quick", action="store_true", help="a small model and one launch: does it run? No verdict")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, progress goes to stderr")
    options = parser.parse_args()
    size = Size(hidden=256, feed_forward=512, heads=4, kv_heads=2, layers=4, tokens=256) if options.quick else Size()
    goal = GOALS[options.phase]
    launches = 1 if options.quick else options.launches
    console = Console(stderr=options.json, highlight=False)
    # So that the namespaces go away when the benchmark is told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(2)
    try:
        with tempfile.TemporaryDirectory(prefix="overlap-") as name, network(options.phase) as link:
            bench = Bench(Path(name), link, size, options.repetitions, options.phase)
            bench.prepare()
            results = measure(bench, launches, console)
    except (LinkError, RewriterError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    if options.json:
        print(as_json(size, results, goal))
    else:
        console.print(table(results, options.phase))
        worst = max(max(launch.errors.values()) for result in results for launch in result.launches)
        console.print(f"standard and ladder equal rewriter.simulate to {worst:.0e}; the bound's output means nothing")
    if options.quick:
        return 0
    lacking = [r.mode for r in results if r.share < goal]
    if lacking:
        console.print(f"below the goal of {goal:.0%}: {', '.join(lacking)}", style="red")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
