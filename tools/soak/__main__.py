"""The soak's command: kinds in turn by their share of the time, until the hours are over.

PYTHONPATH=tools:tests/support:tests:. python -m soak --hours 1            # what `make soak HOURS=1` runs
PYTHONPATH=tools:tests/support:tests:. python -m soak --repeat kills:17    # a case again
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from soak import shim, tally
from soak.cases import COMMAND, Kind, Outcome, prepared, run_case


def kinds() -> dict[str, Kind]:
    """Every kind by name. Imports torch, transformers and the tests' modules."""
    import conftest  # noqa: F401  # the settings of tests: no network, one thread

    from soak import disks, inputs, kills, options, programs, ranks

    return {module.KIND.name: module.KIND for module in (inputs, options, programs, kills, disks, ranks)}


class Soak:
    """A run of the soak. Its record lies in `state` after every case, so that a run that is killed goes on there."""

    def __init__(self, state: Path, chosen: Sequence[Kind]) -> None:
        self.state, self.kinds = state, {kind.name: kind for kind in chosen}
        self.file = state / "run.json"
        self.places: dict[str, Path] = {}
        self.run: dict[str, Any] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit(), "seconds": 0.0}
        self.run |= {"kinds": {}, "failures": []}
        if self.file.exists():
            begun = json.loads(self.file.read_text())
            if begun["commit"] == self.run["commit"]:
                self.run = begun
            else:
                tally.add(begun)

    def next(self) -> Kind:
        """The kind that is furthest behind its share of the time."""
        spent = {name: self.run["kinds"].get(name, {}).get("seconds", 0.0) for name in self.kinds}
        return min(self.kinds.values(), key=lambda kind: spent[kind.name] / kind.share)

    def step(self, kind: Kind) -> Outcome:
        """The next case of a kind, counted."""
        first = tally.behind(kind.name)
        own = self.run["kinds"].setdefault(kind.name, {"first": first, "behind": first, "seconds": 0.0, "counts": {}})
        begun = time.monotonic()
        place = kind.beside or kind.name
        if place not in self.places:
            self.places[place] = prepared(kind, self.state / place)
        outcome = run_case(kind, own["behind"], self.places[place])
        self._note(kind, own, outcome)
        own["behind"] += 1
        own["counts"] = dict(sorted((Counter(own["counts"]) + outcome.counts).items()))
        own["seconds"] = round(own["seconds"] + time.monotonic() - begun, 1)
        self.run["seconds"] = round(self.run["seconds"] + time.monotonic() - begun, 1)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.run, indent=1))
        partial.replace(self.file)
        return outcome

    def _note(self, kind: Kind, own: dict[str, Any], outcome: Outcome) -> None:
        name = f"{kind.name}:{own['behind']}"
        for failure in outcome.failures:
            whole = failure.replace(str(self.state), "STATE").replace(str(tally.ROOT), ".")
            with (self.state / "failures.log").open("a", encoding="utf-8") as log:
                log.write(f"{COMMAND} {name}\n{whole}\n\n")
            lines = [line for line in whole.splitlines() if line.strip()]
            told = next((line for line in lines if "Error" in line), lines[-1] if lines else "")
            self.run["failures"].append({"case": name, "what": " ".join(told.split())[:200]})

    def finish(self) -> None:
        """Put the run into the tally, and write the page."""
        if self.run["kinds"]:
            tally.add(self.run)
        self.file.unlink(missing_ok=True)


def commit() -> str:
    """The commit that is soaked, in short."""
    words = ["git", "-C", str(tally.ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def soaked(soak: Soak, hours: float) -> None:
    """Cases in turn until so many hours are over, those of an interrupted run included, or Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while soak.run["seconds"] < 3600 * hours:
            told(soak.next(), soak)


def told(kind: Kind, soak: Soak) -> None:
    outcome = soak.step(kind)
    number = soak.run["kinds"][kind.name]["behind"] - 1
    counts = ", ".join(f"{name} {count}" for name, count in outcome.counts.items())
    print(f"{soak.run['seconds'] / 60:6.1f} min  {kind.name}:{number}  {counts}", flush=True)
    for failure in outcome.failures:
        print(f"FAILED {COMMAND} {kind.name}:{number}\n{failure}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where nothing failed, 1 where something did."""
    parser = argparse.ArgumentParser(prog="soak", description="Random cases of many kinds, for hours.")
    parser.add_argument("--hours", type=float, default=1.0, help="how long, over all interruptions (default 1)")
    parser.add_argument("--state", type=Path, default=Path("build/soak"), help="where it works (default build/soak)")
    parser.add_argument("--only", action="append", metavar="KIND", help="this kind; may be given several times")
    parser.add_argument("--cases", type=int, help="so many cases of each kind, without a place in the tally")
    parser.add_argument("--repeat", metavar="KIND:NUMBER", help="run this case again; note if it has been mended")
    options = parser.parse_args(arguments)
    options.state = options.state.resolve()
    options.state.mkdir(parents=True, exist_ok=True)
    known = kinds()
    if options.repeat:
        name, _, number = options.repeat.partition(":")
        outcome = run_case(known[name], int(number), prepared(known[name], options.state / f"{name}-again"))
        print(json.dumps(outcome.counts, indent=1), *outcome.failures, sep="\n")
        if not outcome.failures:
            tally.mend(options.repeat, commit())
        return int(bool(outcome.failures))
    for name in options.only or known:
        if reason := known[name].needs():
            print(f"{name}: left out here: {reason}", flush=True)
    soak = Soak(options.state, [known[name] for name in options.only or known if not known[name].needs()])
    if options.cases is not None:
        for kind in list(soak.kinds.values()) * options.cases:
            told(kind, soak)
        soak.file.unlink()
    else:
        soaked(soak, options.hours)
        soak.finish()
    return int(bool(soak.run["failures"]))


if __name__ == "__main__":
    if (again := shim.variables(tally.ROOT / "build")) is not None:
        os.execve(sys.executable, [sys.executable, "-m", "soak", *sys.argv[1:]], again)
    sys.exit(main())
