"""Is what `rewrite search` finds better than what ships, and than chance?

    python examples/real_models.py smollm2-135m-instruct models/smollm2
    python -m benchmarks.search.run models/smollm2 --tp 3 --fabric pcie-gen4 --loss 1% --state build/search
    python -m benchmarks.search.run examples/tiny-llama --tp 4 --fabric pcie-gen4 --loss 3%

Searches, then predicts every shipped recipe (with its own measurements, as a conversion takes them) and mixes drawn at
random, and measures on the same text those that are predicted to be as fast as the chosen recipe. What is slower is
beaten by it, whatever its rise. Exits with 1 where

- of the others whose loss rises by no more than the budget, a random mix is faster than the chosen recipe, or a shipped
  recipe as fast;
- the rise of the chosen recipe on held-out text is not within its budget;
- the search takes more than 30 minutes.

What was measured is kept in --state, so that it goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from rewriter.check.drift import other_weights
from rewriter.cli.search import parse_share
from rewriter.common.errors import RewriterError
from rewriter.convert.pass_measurements import calibrate
from rewriter.ir.phases import prompt_phase
from rewriter.ir.simulate import load_weights, simulate
from rewriter.predict.candidates import all_recipes
from rewriter.predict.search.choices import STANDARD, Mix, Part
from rewriter.predict.search.computed import SCHEDULES, WindowChange, as_computed, change, rewired
from rewriter.predict.search.gains import Gains
from rewriter.predict.search.measurements import Measurements
from rewriter.predict.search.result import SearchResult, rise_of
from rewriter.predict.search.run import Asked, opened
from rewriter.predict.search.run import search as run
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe
from rewriter.show.search import SearchReport, named, share

RANDOM = 200
MINUTES = 30.0


@dataclass(frozen=True)
class Other:
    """Something that a search is compared with: its predicted seconds, and its rise in loss on the calibration text as
    a share of the loss; None where it was not measured, being slower than the chosen recipe."""

    name: str
    seconds: float
    rise: float | None
    ships: bool = False


def shipped(measured: Measurements, gains: Gains, slowest: float) -> list[Other]:
    """Every shipped recipe that applies and computes something; measured, where it takes at most `slowest` seconds."""
    found = []
    for name in all_recipes():
        if name == "upper-bound":
            continue
        try:
            recipe = _calibrated(measured, name)
            seconds = gains.of_recipe(recipe).seconds
        except RewriterError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        if gains.workload.sp != 1 or not any(p.pass_name == "sequence_parallel" for p in recipe.passes):
            found.append(Other(name, seconds, _rise(measured, recipe) if seconds <= slowest else None, ships=True))
    return found


def _calibrated(measured: Measurements, name: str) -> Recipe:
    key, computed = f"benchmark recipe {name}", measured.computed
    if key not in measured.store.values:
        measured.store.put({key: calibrate(Recipe.load(name), computed.original, computed.ranks).to_yaml()})
    return Recipe.parse(measured.store.values[key])


def _rise(measured: Measurements, recipe: Recipe) -> float:
    """The rise in loss, as a share of the loss, of all ranks; those that share tokens compute what one does."""
    if all(p.effect == "exact" for p in recipe.build()):
        return 0.0
    key = f"benchmark rise {recipe.name}"
    if key not in measured.store.values:
        measured.store.put({key: _changes(measured, recipe)})
    changes = [WindowChange(*of_window) for of_window in measured.store.values[key]]
    return rise_of(changes, measured.loss(), measured.text.own).relative


@torch.no_grad()
def _changes(measured: Measurements, recipe: Recipe) -> list[WindowChange]:
    """Of the program as a whole, in each window."""
    program, full = measured.computed.original, load_weights(measured.computed.original, torch.float32)
    whole = as_computed(apply_recipe(program, recipe, measured.computed.ranks, SCHEDULES)[0])
    weights = other_weights(whole, program, full)
    changes = []
    for ids in measured.text.calibration:
        tokens, since = rewired(prompt_phase(whole), len(ids))
        logits = simulate(whole, ids[None], weights=weights, rewired=tokens)[0]
        old = simulate(program, ids[None], weights=full)[0].float().log_softmax(-1)
        changes.append(change(ids, old, logits, since))
    return changes


def drawn(measured: Measurements, gains: Gains, found: SearchResult, count: int) -> list[Other]:
    """Those of `count` mixes, drawn from what the search draws from, that are as fast as what was found: few or many
    layers, evenly on a logarithmic scale."""
    draw, mixes = random.Random(0), dict[Mix, float]()
    parts, bases = [option.part for option in found.singles], list(dict.fromkeys(p.mix.base for p in found.points))
    while count:
        mix = _random_mix(draw, parts, measured.computed.layers, draw.choice(bases))
        if (speed := gains.speed(mix)) is None:
            continue
        count -= 1
        if speed.seconds <= found.chosen.speed.seconds:
            mixes[mix] = speed.seconds
    rises = measured.rises(list(mixes))
    return [Other(named(mix), seconds, rises[mix].relative) for mix, seconds in mixes.items()]


def _random_mix(draw: random.Random, parts: list[Part], layers: int, base: str) -> Mix:
    wanted, taken = round(layers ** draw.random()), list[Part]()
    for part in draw.sample(parts, len(parts)):
        fits = base == STANDARD or not (part.rewrite.bound or part.rewrite.format)
        if fits and sum(len(p.layers) for p in taken) < wanted and not any(part.excludes(other) for other in taken):
            taken.append(part)
    return Mix(tuple(taken), base)


def failures(found: SearchResult, others: list[Other], seconds: float) -> list[str]:
    """What does not hold of what a search should be."""
    best, within = found.chosen.speed.seconds, _within(found, others)
    as_fast = [o.name for o in within if o.seconds < best or (o.ships and o.seconds == best)]
    said = [f"{name} is as fast as the chosen recipe, within the budget" for name in as_fast]
    if found.chosen.held_out is None or found.chosen.worst > found.budget:
        said.append("the rise on held-out text is not within the budget")
    if seconds > 60 * MINUTES:
        said.append(f"the search took {seconds / 60:.0f} minutes")
    return said


def _within(found: SearchResult, others: list[Other]) -> list[Other]:
    return [o for o in others if o.rise is not None and o.rise <= found.budget]


def compared(model: str, asked: Asked, count: int, state: Path | None) -> tuple[SearchResult, list[Other], list[str]]:
    """(the search, shipped recipes and random mixes, what does not hold)."""
    began = time.perf_counter()
    found = run(model, asked, state=state)
    seconds = time.perf_counter() - began
    measured, gains = opened(model, asked, state)
    others = shipped(measured, gains, found.chosen.speed.seconds) + drawn(measured, gains, found, count)
    return found, others, failures(found, others, seconds)


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
    found, others, said = compared(options.model, asked, options.random, options.state)
    _print(found, others)
    for line in said:
        print(f"does not hold: {line}")
    return int(bool(said))


def _print(found: SearchResult, others: list[Other]) -> None:
    Console(highlight=False).print(SearchReport(found))
    standard = found.standard.seconds
    print("\n| compared with | rise in loss | speedup |\n| --- | --: | --: |")
    for other in sorted((o for o in others if o.ships), key=lambda o: o.seconds):
        rise = "slower" if other.rise is None else share(other.rise)
        print(f"| `{other.name}` | {rise} | {standard / other.seconds:.3f}× |")
    within = [o for o in _within(found, others) if not o.ships]
    print(f"\nrandom mixes as fast: {sum(not o.ships for o in others)}, {len(within)} of them within the budget")
    print(f"the search: {found.seconds:.0f} s of CPU, {len(found.points)} mixes measured")


if __name__ == "__main__":
    raise SystemExit(main())
