"""Which versions meet, what is known of each meeting, and the page that says so: docs/reference/versions.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "reference" / "versions.md"

PYTHONS = ("3.11", "3.12")
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
TRANSFORMERS = ("5.17", "5.19", "5.20", "5.23", "5.24")
PINNED = "2.13"  # of torch, in constraints.txt
SMOKE = ("tests/repo/test_smoke.py", "tests/ranks/test_zero_stages.py", "tests/ranks/test_runtime_compiled.py")
"""What runs in each cell, but for the tests marked slow."""

Result = dict[str, Any]
"""outcome: "green", "red" or "absent"; why (unless green), date, commit, source, seconds, the number of `tests` that
passed, and the `versions` found."""


@dataclass(frozen=True)
class Cell:
    """A meeting of versions: minor ones, of which pip takes the newest patch."""

    python: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        return f"py{self.python}-torch{self.torch}-transformers{self.transformers}"


def cells() -> Iterator[Cell]:
    """Every torch with the oldest and the newest transformers, and every transformers with the pinned torch.

    Those of one torch follow each other: they share an environment.
    """
    for python in PYTHONS:
        for torch in TORCHES:
            for transformers in TRANSFORMERS:
                if torch == PINNED or transformers in (TRANSFORMERS[0], TRANSFORMERS[-1]):
                    yield Cell(python, torch, transformers)


def fingerprint() -> str:
    """Of what a cell tests: the package, its requirements and the smoke tests."""
    files = [ROOT / "pyproject.toml", *(ROOT / name for name in SMOKE)]
    files += (p for p in (ROOT / "rewriter").rglob("*") if p.is_file() and p.suffix != ".pyc")
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def results() -> dict[str, Result]:
    """What is known, by the cells' names."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def keep(name: str, result: Result) -> None:
    """Write down a result, and the page anew. An absent interpreter does not replace what was found with it."""
    known = results()
    if result["outcome"] == "absent" and known.get(name, result)["outcome"] != "absent":
        return
    known[name] = result
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(RESULTS)
    PAGE.write_text(page(known), encoding="utf-8")


TEMPLATE = """# Versions

This page lists the versions of Python, torch and transformers that `rewriter` was tried with, and the dates.
`make matrix` installs the package with each set of versions, as pip resolves it that day, runs the smoke tests, and
writes this page from `tools/matrix/results.json`. It skips a set if this source was tried with it before;
`make matrix ARGS=--again` runs all sets.

{summary}

| torch | {columns} |
|---|{rules}|
{grid}

A number is a Python version that passed. Not every set is tried: each torch runs with the oldest and the newest
transformers, and each transformers runs with torch {pinned}, the version of the whole test suite. Empty cells were not
tried.

## Tests of a cell

They use the model that ships, one thread and no GPU: [tests/repo/test_smoke.py](../../tests/repo/test_smoke.py).

- Every module of the package is imported. This finds private names of torch that no longer exist.
- A traced program gives the logits of transformers' eager model, to 10⁻⁵ of the largest logit.
- `rewrite` converts for two ranks, and verifies them. transformers alone loads the checkpoint. Its logits equal those
  of the rewritten program in simulation and of two ranks under torchrun; the two ranks agree to the bit.
- Two steps of `adapt` lower the loss, and two ranks end with the losses of one.
- The bytes and the weights that `predict` counts equal a count by hand.
- The stages of sharded training and the compiled module use private names of torch: all their tests run except the
  slow ones.

On Linux, pip's torch is most often a build for CUDA. The tests import it and run it on CPUs.

## Runs

| Python | torch | transformers | numpy | date | commit | seconds | outcome |
|---|---|---|---|---|---|---:|---|
{runs}
"""


def page(known: dict[str, Result]) -> str:
    """The text of the page."""
    planned = list(cells())
    tried = [cell for cell in planned if known.get(cell.name, {}).get("outcome") in ("green", "red")]
    red = [cell.name for cell in tried if known[cell.name]["outcome"] == "red"]
    summary = f"{len(tried)} of {len(planned)} cells were tried, {len(tried) - len(red)} passed."
    absent = sorted({cell.python for cell in planned if known.get(cell.name, {}).get("outcome") == "absent"})
    if absent:
        summary += f" No interpreter of Python {' and '.join(absent)} was on the machine."
    if red:
        summary += " What failed: " + ", ".join(f"`{name}`" for name in red) + "."
    return TEMPLATE.format(
        summary=summary,
        columns=" | ".join(f"transformers {version}" for version in TRANSFORMERS),
        rules="|".join("---" for _ in TRANSFORMERS),
        grid="\n".join(_row(torch, known) for torch in TORCHES),
        pinned=PINNED,
        runs="\n".join(_run(cell, known[cell.name]) for cell in planned if cell.name in known),
    )


def _row(torch: str, known: dict[str, Result]) -> str:
    marks = {"green": "{}", "red": "**{} fails**", "absent": "{} is absent"}
    row = []
    for transformers in TRANSFORMERS:
        found = ((p, known.get(Cell(p, torch, transformers).name, {}).get("outcome")) for p in PYTHONS)
        row.append(", ".join(marks[outcome].format(python) for python, outcome in found if outcome))
    return f"| {torch} | {' | '.join(row)} |"


def _run(cell: Cell, result: Result) -> str:
    versions = {"python": cell.python, "torch": cell.torch, "transformers": cell.transformers, **result["versions"]}
    named = [versions.get(name, "") for name in ("python", "torch", "transformers", "numpy")]
    outcome = f"{result['outcome']}: {result.get('why')}".replace("|", "\\|")
    if result["outcome"] == "green":
        outcome = f"{result['tests']} tests passed"
    words = [*named, result["date"], result["commit"], f"{result['seconds']:.0f}", outcome]
    return f"| {' | '.join(words)} |"
