"""Is what `rewrite search` finds better than what ships, and than chance?

    python examples/real_models.py smollm2-135m-instruct models/smollm2
    python -m benchmarks.search.run models/smollm2 --tp 3 --fabric pcie-gen4 --loss 1% --state build/search
    python -m benchmarks.search.run examples/tiny-llama --tp 4 --fabric pcie-gen4 --loss 3%

Searches, then predicts every shipped recipe (with its own measurements, as a conversion takes them) and mixes drawn at
random on the same fabric, and measures on the same windows of the same text what is not slower than the chosen recipe.
Exits with 1 where

- the chosen recipe is not faster than every shipped recipe and every random mix whose loss rises by no more than its
  budget;
- the rise of the chosen recipe on held-out text is not within its budget;
- the search takes more than 30 minutes.

The table shows, for each shipped recipe, how fast the front is for as much of a rise. Beyond the budget it may be
slower: a search has no orders of heads and channels (`permute`), which some of them have.

What was measured is kept in --state, so that it goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rewriter.check.drift import other_weights
from rewriter.cli.search import parse_share
from rewriter.common.errors import RewriterError
from rewriter.convert.pass_measurements import calibrate
from rewriter.ir import Program
from rewriter.ir.simulate import load_weights
from rewriter.predict.candidates import all_recipes
from rewriter.predict.search.choices import BY_NAME, FORMATS, Mix, PlacedRewrite, mix_of
from rewriter.predict.search.computed import SCHEDULES, WindowChange, as_computed
from rewriter.predict.search.gains import Gains
from rewriter.predict.search.measurements import Measurements
from rewriter.predict.search.result import SearchResult, rise_of
from rewriter.predict.search.run import Asked, opened
from rewriter.predict.search.run import search as run
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe
from rewriter.show.search import named, share

RANDOM = 200
MINUTES = 30.0


@dataclass(frozen=True)
class Other:
    """Something that a search is compared with: its rise in loss on the calibration text, and its predicted seconds."""

    name: str
    rise: float
    seconds: float


@torch.no_grad()
def shipped(measured: Measurements, gains: Gains, asked: Asked) -> list[Other]:
    """Every shipped recipe that applies and computes something."""
    program, ranks = measured.computed.original, asked.workload.tp
    found, weights = [], load_weights(program, torch.float32)
    for name in all_recipes():
        if name == "upper-bound":
            continue
        try:
            recipe = _calibrated(measured, program, name, ranks)
            seconds = gains.of_recipe(recipe).seconds
        except RewriterError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        if asked.workload.sp == 1 and any(p.pass_name == "sequence_parallel" for p in recipe.passes):
            continue
        found.append(Other(name, _rise(measured, program, recipe, weights), seconds))
        print(f"{name}: {share(found[-1].rise)}", file=sys.stderr, flush=True)
    return found


def _calibrated(measured: Measurements, program: Program, name: str, ranks: int) -> Recipe:
    key = f"benchmark recipe {name}"
    if key not in measured.store.values:
        measured.store.put({key: calibrate(Recipe.load(name), program, ranks).to_yaml()})
    return Recipe.parse(measured.store.values[key])


def _rise(measured: Measurements, program: Program, recipe: Recipe, weights: dict[str, torch.Tensor]) -> float:
    """The rise in loss, as a share of the loss, of all ranks; those that share tokens compute what one does."""
    key = f"benchmark rise {recipe.name}"
    if key not in measured.store.values:
        exact = all(p.effect == "exact" for p in recipe.build())
        changes = [] if exact else _changes(measured, program, recipe, weights)
        measured.store.put({key: [[c.divergence, c.rise, c.tokens, c.predicted] for c in changes]})
    changes = [WindowChange(*change) for change in measured.store.values[key]]
    return rise_of(changes, measured.loss(), measured.text.own).relative if changes else 0.0


def _changes(
    measured: Measurements, program: Program, recipe: Recipe, weights: dict[str, torch.Tensor]
) -> list[WindowChange]:
    disable = [p.pass_name for p in recipe.passes if p.pass_name in SCHEDULES]
    rewritten, _ = apply_recipe(program, recipe, measured.computed.ranks, disable)
    whole = as_computed(rewritten)
    own = other_weights(whole, program, weights)
    return [measured.computed.change_of(whole, own, ids) for ids in measured.text.calibration]


def drawn(measured: Measurements, gains: Gains, bases: list[str], count: int, slowest: float) -> list[Other]:
    """Those of `count` mixes, drawn from what the search draws from, that are predicted to take at most `slowest`
    seconds: few or many layers, evenly on a logarithmic scale. What is slower than the chosen recipe is beaten by it,
    whatever its rise, so it is not measured."""
    draw, mixes = random.Random(0), dict[Mix, float]()
    applicable = measured.applicable()
    while count:
        mix = _random_mix(draw, applicable, measured.computed.layers, draw.choice(bases))
        speed = gains.speed(mix)
        if speed is None:
            continue
        count -= 1
        if speed.seconds <= slowest:
            mixes[mix] = speed.seconds
    rises = measured.rises(list(mixes))
    return [Other(named(mix), rises[mix].relative, seconds) for mix, seconds in mixes.items()]


def _random_mix(draw: random.Random, applicable: list[Mix], layers: int, base: str) -> Mix:
    wanted = round(layers ** draw.random())
    placed: dict[int, PlacedRewrite] = {}
    formats: dict[int, str] = {}
    for mix in draw.sample(applicable, len(applicable)):
        if len(placed) + len(formats) >= wanted:
            break
        if mix.formats and base == Mix.base:
            formats |= dict(mix.formats)
        for placement in mix.placements:
            free = not any(layer in placed for layer in placement.layers)
            if free and (base == Mix.base or not BY_NAME[placement.rewrite].bound):
                placed |= dict.fromkeys(placement.layers, placement)
    return mix_of([*{*placed.values()}], formats, base)


def failures(found: SearchResult, others: list[Other], ships: list[Other], seconds: float) -> list[str]:
    """What does not hold of what a search should be."""
    said = [f"{o.name} is as fast as the chosen recipe, within the budget" for o in _as_fast(found, others, ships)]
    held_out = found.chosen.held_out
    if held_out is None or not max(held_out.relative, held_out.seen / held_out.loss) <= found.budget:
        said.append("the rise on held-out text is not within the budget")
    if seconds > 60 * MINUTES:
        said.append(f"the search took {seconds / 60:.0f} minutes")
    return said


def _as_fast(found: SearchResult, others: list[Other], ships: list[Other]) -> list[Other]:
    """Within the budget: a random mix may be the chosen one, what ships has to be slower."""
    best = found.chosen.speed.seconds
    within = [o for o in [*ships, *others] if o.rise <= found.budget]
    return [o for o in within if o.seconds < best or (o in ships and o.seconds == best)]


def compared(model: str, asked: Asked, count: int, state: Path | None) -> tuple[SearchResult, list[Other], list[str]]:
    """(the search, shipped recipes and random mixes, what does not hold)."""
    began = time.perf_counter()
    found = run(model, asked, state=state)
    seconds = time.perf_counter() - began
    measured, gains = opened(model, asked, state)
    ships = shipped(measured, gains, asked)
    bases = list(dict.fromkeys(p.mix.base for p in found.points))
    others = drawn(measured, gains, bases, count, found.chosen.speed.seconds)
    return found, [*ships, *others], failures(found, others, ships, seconds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint directory")
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--sp", type=int, default=None)
    parser.add_argument("--fabric", default="pcie-gen4")
    parser.add_argument("--loss", default="1%")
    parser.add_argument("--random", type=int, default=RANDOM, help="mixes drawn at random")
    parser.add_argument("--state", type=Path, default=None)
    options = parser.parse_args(arguments)
    asked = Asked(Workload(tp=options.tp, sp=options.sp), Cluster(options.fabric), parse_share(options.loss))
    began, cpu = time.perf_counter(), time.process_time()
    found, others, said = compared(options.model, asked, options.random, options.state)
    _print(found, others)
    print(f"\nall of it: {time.perf_counter() - began:.0f} s, {time.process_time() - cpu:.0f} s of CPU")
    print(f"the search: {found.seconds:.0f} s of CPU, with what was measured before")
    for line in said:
        print(f"does not hold: {line}")
    return int(bool(said))


def _print(found: SearchResult, others: list[Other]) -> None:
    from rich.console import Console

    from rewriter.show.search import SearchReport

    Console(highlight=False).print(SearchReport(found))
    standard = found.standard.seconds
    rows: list[Any] = sorted(others, key=lambda o: o.seconds)
    print("\n| compared with | rise in loss | speedup | the front, for as much |\n| --- | --: | --: | --: |")
    names = set(all_recipes())
    for other in [o for o in rows if o.name in names]:
        best = min(p.speed.seconds for p in found.front if p.rise.relative <= other.rise)
        print(f"| `{other.name}` | {share(other.rise)} | {standard / other.seconds:.3f}× | {standard / best:.3f}× |")
    random_mixes = [o for o in rows if o.name not in names]
    within = [o for o in random_mixes if o.rise <= found.budget]
    print(f"\n{len(random_mixes)} of the random mixes are as fast, {len(within)} of them within the budget", end="")
    print(f"; the fastest is {standard / within[0].seconds:.3f}× as fast: {within[0].name}" if within else "")
    print(f"formats that were searched: {', '.join(FORMATS)}")


if __name__ == "__main__":
    raise SystemExit(main())
