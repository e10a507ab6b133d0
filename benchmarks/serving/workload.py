"""Prompts that both engines of benchmarks/serving/run.py decode, and their protocol: see `Contestant` there."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SEQUENCES, PROMPT, STEPS = 16, 16, 16
Tokens = list[list[int]]


@dataclass(frozen=True)
class Asked:
    directory: str
    ranks: int
    compiled: bool
    questions: int  # file descriptors: a delay in seconds per line,
    answers: int  # {"seconds": per step, "tokens": of each sequence}


def asked() -> Asked:
    """What the command line says."""
    directory, ranks, how, questions, answers = sys.argv[1:6]
    return Asked(directory, int(ranks), how == "compiled", int(questions), int(answers))


def prompts() -> Tokens:
    return [[3 + 7 * i + j for j in range(PROMPT)] for i in range(SEQUENCES)]


def serve(given: Asked, tokens: Tokens, run: Callable[[float], tuple[float, Tokens]]) -> None:
    """Say the `tokens`, then run at every delay that is asked for."""
    write(given, tokens)
    with os.fdopen(given.questions) as questions:
        for line in questions:
            seconds, made = run(float(line))
            write(given, {"seconds": seconds, "tokens": made})


def write(given: Asked, value: Any) -> None:
    os.write(given.answers, (json.dumps(value) + "\n").encode())


class Late:
    """A sum that is there so long after its begin, at the earliest: as over a link that takes `delay` seconds."""

    def __init__(self, work: Any, delay: float) -> None:
        self.work, self.due = work, time.perf_counter() + delay

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))
