"""Is what `rewrite search` finds better than what ships, and than chance?

    python examples/real_models.py smollm2-135m-instruct models/smollm2
    python -m benchmarks.search.run models/smollm2 --tp 3 --fabric pcie-gen4 --loss 1% --state build/search
    python -m benchmarks.search.run examples/tiny-llama --tp 4 --fabric pcie-gen4 --loss 3%

Searches, then predicts every shipped recipe (with its own measurements, as a conversion takes them) and mixes drawn at
random, and measures on the same text those that are predicted to be as fast as the chosen recipe. What is slower is
beaten by it, whatever its rise. Exits with 1 where

- of the others whose loss rises by no more than the budget (of random mixes on held-out text, too, as a search judges),
  a random mix is faster than the chosen recipe, or a shipped recipe as fast;
- the rise of the chosen recipe on held-out text is not within its budget;
- the search takes more than 30 minutes.
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
from rewriter.ir.phases import REWIRED
from rewriter.ir.simulate import simulate
from rewriter.predict.candidates import all_recipes
from rewriter.predict.search.choices import STANDARD, Mix, Part
from rewriter.predict.search.measured import Measurements, effect, prompt_of, rise_of
from rewriter.predict.search.run import Asked, Gains, SearchResult, opened
from rewriter.predict.search.run import search as run
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe
from rewriter.show.search import SearchReport, named, share

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
    for name in (name for name in all_recipes() if name != "upper-bound"):
        try:
            recipe = calibrate(Recipe.load(name), measured.original, measured.ranks)
            seconds = gains.of_recipe(recipe).seconds
        except RewriterError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        if gains.workload.sp != 1 or not any(p.pass_name == "sequence_parallel" for p in recipe.passes):
            found.append(Other(name, seconds, _rise(measured, recipe) if seconds <= slowest else None, ships=True))
    return found


@torch.no_grad()
def _rise(measured: Measurements, recipe: Recipe) -> float:
    """The rise in loss, as a share of the loss, of the program as a whole and all ranks; those that share tokens
    compute what one does."""
    if all(p.effect == "exact" for p in recipe.build()):
        return 0.0
    whole, effects = measured.applied(recipe), []
    weights = other_weights(whole, measured.original, measured.weights)
    for ids in torch.tensor(measured.text.calibration):
        mask, since = prompt_of(whole, len(ids))
        after = simulate(whole, ids[None], weights=weights, rewired=mask.get(REWIRED))[0]
        effects.append(effect(ids[since:], measured.of_original(ids)[0][0, since:], after[since:]))
    return rise_of(effects, measured.rise().loss, measured.text.own).rise


def drawn(measured: Measurements, gains: Gains, found: SearchResult, count: int) -> list[Other]:
    """Those of `count` mixes, drawn from what the search draws from, that are as fast as what was found: few or many
    layers, evenly on a logarithmic scale."""
    draw, mixes = random.Random(0), dict[Mix, float]()
    parts, bases = [option.part for option in found.singles], list(dict.fromkeys(p.mix.base for p in found.points))
    while count:
        mix = _random_mix(draw, parts, measured.original.source.num_layers, draw.choice(bases))
        if (speed := gains.speed(mix)) is None:
            continue
        count -= 1
        if speed.seconds <= found.chosen.speed.seconds:
            mixes[mix] = speed.seconds
    return [Other(named(mix), seconds, _worst(measured, mix, found.measured.budget)) for mix, seconds in mixes.items()]


def _worst(measured: Measurements, mix: Mix, budget: float) -> float:
    """The rise on the calibration text, and where that is within the budget, what a search judges by: the largest of it
    and of both measures on held-out text."""
    if (rise := measured.rise(mix).rise) > budget:
        return rise
    held_out = measured.rise(mix, held_out=True)
    return max(rise, held_out.rise, held_out.seen)


def _random_mix(draw: random.Random, parts: list[Part], layers: int, base: str) -> Mix:
    wanted, taken = round(layers ** draw.random()), list[Part]()
    for part in draw.sample(parts, len(parts)):
        fits = base == STANDARD or not (part.rewrite.bound or part.rewrite.format)
        if fits and sum(len(p.layers) for p in taken) < wanted and not any(part.places & p.places for p in taken):
            taken.append(part)
    return Mix(tuple(taken), base)


def compared(model: str, asked: Asked, count: int, state: Path | None) -> tuple[SearchResult, list[Other], list[str]]:
    """(the search, shipped recipes and random mixes, what does not hold)."""
    began = time.perf_counter()
    found = run(model, asked, state=state)
    minutes, best = (time.perf_counter() - began) / 60, found.chosen.speed.seconds
    measured, gains = opened(model, asked, state)
    others = shipped(measured, gains, best) + drawn(measured, gains, found, count)
    within = [o for o in others if o.rise is not None and o.rise <= asked.budget]
    as_fast = [o.name for o in within if o.seconds < best or (o.ships and o.seconds == best)]
    said = [f"{name} is as fast as the chosen recipe, within the budget" for name in as_fast]
    if found.chosen.held_out is None or found.chosen.worst > asked.budget:
        said.append("the rise on held-out text is not within the budget")
    if minutes > MINUTES:
        said.append(f"the search took {minutes:.0f} minutes")
    return found, others, said


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint directory")
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--sp", type=int, default=None)
    parser.add_argument("--fabric", default="pcie-gen4")
    parser.add_argument("--loss", default="1%")
    parser.add_argument("--random", type=int, default=200, help="mixes drawn at random")
    parser.add_argument("--state", type=Path, default=None, help="directory where measurements are kept")
    options = parser.parse_args(arguments)
    asked = Asked(Workload(tp=options.tp, sp=options.sp), Cluster(options.fabric), parse_share(options.loss))
    found, others, said = compared(options.model, asked, options.random, options.state)
    Console(highlight=False).print(SearchReport(found))
    print("\n| compared with | rise in loss | speedup |\n| --- | --: | --: |")
    for other in sorted((o for o in others if o.ships), key=lambda o: o.seconds):
        rise = "slower" if other.rise is None else share(other.rise)
        print(f"| `{other.name}` | {rise} | {found.standard.seconds / other.seconds:.3f}× |")
    rises = [o.rise for o in others if not o.ships and o.rise is not None]
    print(f"\nrandom mixes as fast: {len(rises)}, {sum(rise <= asked.budget for rise in rises)} of them in the budget")
    print(f"the search: {len(found.points)} mixes measured")
    print(*(f"does not hold: {line}" for line in said), sep="\n")
    return int(bool(said))


if __name__ == "__main__":
    raise SystemExit(main())
