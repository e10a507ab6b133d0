"""A step of a job takes as long as that of its slowest class of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rewriter.common.errors import RewriterError


@dataclass(frozen=True)
class JobStep:
    """Of all ranks. `seconds`: its duration; `rank`: the representative of the class that took it."""

    seconds: float
    rank: int


def slowest(steps: Mapping[int, Sequence[float]]) -> tuple[JobStep, ...]:
    """Steps of a job from those of its classes: {representative: seconds of each step}.

    For representatives that ran in turn, each with the rest of the world emulated: what they would have waited for each
    other is the difference to the slowest (NeuronaBox, arXiv 2405.02969, section 2.3). Those that run together wait
    themselves: their steps are equal but for noise.

    Raises RewriterError unless all classes have equally many steps.
    """
    counts = {rank: len(seconds) for rank, seconds in steps.items()}
    if not counts or len(set(counts.values())) > 1:
        raise RewriterError(f"slowest: steps by representative {counts}, expected equally many of each")
    count = next(iter(counts.values()))
    ranks = [max(steps, key=lambda rank: (steps[rank][index], -rank)) for index in range(count)]
    return tuple(JobStep(float(steps[rank][index]), rank) for index, rank in enumerate(ranks))
