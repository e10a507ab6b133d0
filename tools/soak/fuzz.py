"""A reader of damaged inputs, guided by the coverage of rewriter's code: atheris, which runs libFuzzer for Python."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Mapping, Set
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NoReturn

from soak.cases import Outcome, in_process, keep

LONGEST = 100_000  # bytes of an input
OWN = 0.85  # of the damage is the reader's own, which keeps to the grammar of its file; the rest is libFuzzer's
Damage = Callable[[random.Random, bytes], bytes]


def missing() -> str:
    """Why this machine cannot fuzz, else nothing."""
    return "" if find_spec("atheris") else "it needs atheris (Linux, x86-64: pip install atheris)"


def fuzzed(
    place: Path, examples: Mapping[str, bytes], damage: Damage, one: Callable[[bytes, Outcome], None],
    runs: int, seed: int, limit: float,
) -> Outcome:  # fmt: skip
    """What `one` notes of so many inputs, damaged from `examples` and from inputs that came to new code.

    libFuzzer ends its process, so it has one of its own; what the machine draws follows from `seed` alone.
    """
    corpus = place / "corpus"
    corpus.mkdir()
    for name, data in examples.items():
        (corpus / name).write_bytes(data)
    file = place / "fuzzed"

    def work() -> NoReturn:
        instrument(modules_of(lambda: [one(data, Outcome()) for data in examples.values()]))
        _fuzz(corpus, damage, one, runs, seed, file)

    found = in_process(work, file, limit)
    return found if isinstance(found, Outcome) else Outcome(failures=[found])


def instrument(modules: Set[str]) -> None:
    """Count the branches of every function of these modules, in this process."""
    import atheris

    gc.unfreeze()  # what is frozen is not listed
    found = [each for each in gc.get_objects() if type(each) is FunctionType and each.__module__ in modules]
    for each in sorted(found, key=lambda f: (f.__module__, f.__qualname__, f.__code__.co_firstlineno)):
        atheris.instrument_func(each)


def modules_of(work: Callable[[], object]) -> set[str]:
    """The modules of rewriter whose functions `work` calls."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if (name := str(frame.f_globals.get("__name__"))).startswith("rewriter."):
            found.add(name)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def _fuzz(
    corpus: Path, damage: Damage, one: Callable[[bytes, Outcome], None], runs: int, seed: int, file: Path
) -> NoReturn:
    import atheris

    outcome, count = Outcome(), 0

    def test(data: bytes) -> None:
        nonlocal count
        one(data, outcome)
        count += 1
        if count == runs:
            keep(outcome, file)
            os._exit(0)

    def mutate(data: bytes, most: int, number: int) -> Any:
        draw = random.Random(number)
        return damage(draw, data)[:most] if draw.random() < OWN else atheris.Mutate(data, most)

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # libFuzzer's account of its progress
    options = {"seed": seed, "max_len": LONGEST, "rss_limit_mb": 0, "artifact_prefix": f"{corpus.parent}/"}
    options |= {"mutate_depth": 2}  # of five damages in a row, hardly anything is still read
    words = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup(["soak", *words, str(corpus)], test, custom_mutator=mutate)
    atheris.Fuzz()
    raise AssertionError("libFuzzer ends its process")
