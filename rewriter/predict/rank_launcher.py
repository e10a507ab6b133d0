"""Starts real ranks, all of a world or one of an emulated one, and brings back the seconds that they measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rewriter.common.processes import run_ranks
from rewriter.predict.rank_worker import Spec


@dataclass(frozen=True)
class PassSeconds:
    """Of one recipe's passes: medians over repetitions, each as long as its slowest rank takes. The silent ones are
    those whose collectives took no time, None where they were not asked for."""

    prefill: float
    decode: float
    silent_prefill: float | None = None
    silent_decode: float | None = None


def run(spec: Spec, ranks: Sequence[int], timeout: float) -> dict[str, PassSeconds]:
    """Start these ranks of `spec.world`, together, and return what each recipe's passes take.

    Raises RewriterError with the reason of a rank that failed, and after `timeout` seconds. No rank outlives this.
    """
    found = _results(spec, ranks, timeout)
    return {variant.recipe: _together([passes[variant.recipe] for passes in found]) for variant in spec.variants}


def calibrate(spec: Spec, timeout: float) -> tuple[str, float]:
    """The YAML of a fabric that all ranks of `spec.world` measure, and for which share of the time something
    else had their cores (see `calibration.calibrated`). Raises RewriterError as `run` does."""
    found = _results(spec, range(spec.world), timeout)[0]
    return found["fabric"], found["taken"]


def slowest(found: Sequence[PassSeconds]) -> PassSeconds:
    """Of ranks that ran in turn: a pass takes as long as the slowest."""
    largest: dict[str, float] = {}
    for seconds in found:
        for name, value in asdict(seconds).items():
            if value is not None:
                largest[name] = max(value, largest.get(name, value))
    return PassSeconds(**largest)


def _together(ranks: Sequence[Mapping[str, Sequence[float]]]) -> PassSeconds:
    """Of ranks that ran at once: in each repetition, the slowest."""
    return PassSeconds(
        **{
            name.replace(" ", "_"): median(map(max, zip(*(passes[name] for passes in ranks), strict=True)))
            for name in ranks[0]
        }
    )


def _results(spec: Spec, ranks: Sequence[int], timeout: float) -> list[dict[str, Any]]:
    return run_ranks([sys.executable, "-m", "rewriter.predict.rank_worker"], asdict(spec), ranks, timeout=timeout)
