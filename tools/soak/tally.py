"""Findings of soaks: `tally.json`, one entry per run, and docs/results/reliability.md, which is made from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TALLY = Path(__file__).with_name("tally.json")
PAGE = ROOT / "docs" / "results" / "reliability.md"

Run = dict[str, Any]
"""date, commit, seconds; kinds: {name: {first, behind, seconds, counts}}; failures: [{case, what}], with the commit at
which the case was repeated and passed as `mended`."""

GOALS = (
    ("programs × recipes × ranks, against the independent references", 10_000, "programs", ("",), ""),
    ("safetensors headers", 1_000_000, "inputs", ("headers: ",), ""),
    ("other damaged inputs", 10_000, "inputs", ("",), "headers: "),
    ("commands with options that nobody would mean", None, "options", ("",), ""),
    ("kills at a system call, then resumed or started over", 200, "kills", ("killed: ",), ""),
    ("two runs at one place", None, "kills", ("two at once: ",), ""),
    ("a full or failing disk in mid-write", None, "disks", ("",), ""),
    ("a rank killed, paused or slowed", None, "ranks", ("killed: ", "paused: ", "slowed: "), ""),
    ("a command killed or ended while its ranks run", None, "ranks", ("command ",), ""),
)
"""What is counted, how many are the goal, the kind, how the names of its counts begin, and how they do not."""

TEMPLATE = """# Reliability

What random and damaged inputs, programs, kills, disks and ranks have found in `rewriter`. `make soak HOURS=…` adds a
run and writes this page from `tools/soak/tally.json`; an interrupted soak goes on where it was.

{summary} A case is one random draw, which may try many inputs. It follows from its kind and number; to repeat one:
`PYTHONPATH=tools:tests/support:tests:. .venv/bin/python -m soak --repeat KIND:NUMBER`.

| what was tried | times | goal |
|---|---:|---:|
{goals}

{reached}

## What is tried

- **Inputs.** Safetensors headers, indices, configs, recipes, fabrics, manifests, the ranks' weights by reference, and
  JSON Lines: valid ones, damaged in their values, lines and bytes, through the readers that commands use. Each is read,
  or refused with a `RewriterError` that does not call it a fault of rewriter. [atheris](https://github.com/google/atheris)
  (libFuzzer) guides them by coverage: an input that comes to new code is damaged further.
- **Options.** Commands that run, with up to three options more, of values that nobody would mean: numbers without end,
  folders and devices for files, words for numbers. Each runs, or says in one line what is wrong; none changes what it
  was given.
- **Programs.** Random architectures of {families} families, random mixes of layers, P of 1, 2, 3, 4 and 8: logits, the
  gradients of every parameter and a step along them, text with a cache after padded prompts, and emitted modules on
  real ranks. The reference is P copies of transformers' eager model, which know no pass.
- **Kills.** SIGKILL at a random system call that changes a file, of conversions in five ways, `adapt` and `predict`.
  What was killed is resumed, or started over, to the files of an undisturbed run; or the refusal says what to delete.
- **Disks.** From a random system call on, the disk is full (ENOSPC) or fails (EIO), once or for good. The command says
  so in one error, leaves no half output, and afterwards comes to the files of an undisturbed run.
- **Ranks.** Of `generate`, `adapt` and a conversion's verification, one rank is killed, paused for two seconds or
  slowed, or the command itself gets SIGKILL or SIGTERM. It ends within {bound:.0f} s with one error where it fails, and
  leaves no process, and unless it was killed itself no temporary folder.

## By kind

{kinds}

## Failures

{failures}

## Runs

| date | commit | hours | cases | failures |
|---|---|---:|---:|---:|
{runs}
"""


def runs() -> list[Run]:
    """Every run so far, in order."""
    return json.loads(TALLY.read_text(encoding="utf-8"))["runs"] if TALLY.exists() else []


def behind(kind: str) -> int:
    """The number of the first case of a kind that no run has had."""
    return max((run["kinds"][kind]["behind"] for run in runs() if kind in run["kinds"]), default=0)


def add(run: Run) -> None:
    """Put a run after the others, and write the page."""
    keep([*runs(), run])


def mend(case: str, commit: str) -> None:
    """Note that a case which had failed passes at this commit."""
    known = runs()
    failed = [failure for run in known for failure in run["failures"] if failure["case"] == case]
    for failure in failed:
        failure["mended"] = commit
    if failed:
        keep(known)


def keep(known: Sequence[Run]) -> None:
    """Write tally and page."""
    TALLY.write_text(json.dumps({"runs": list(known)}, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(known), encoding="utf-8")


def totals(known: Sequence[Run], kind: str) -> Counter[str]:
    """The counts of a kind over all runs."""
    found: Counter[str] = Counter()
    for run in known:
        found.update(run["kinds"].get(kind, {}).get("counts", {}))
    return found


def tried(known: Sequence[Run], kind: str, begins: tuple[str, ...], but: str) -> int:
    """How often something of GOALS was tried."""
    counts = totals(known, kind)
    return sum(n for name, n in counts.items() if name.startswith(begins) and not (but and name.startswith(but)))


def _cases(run: Run) -> str:
    return f"{sum(k['behind'] - k['first'] for k in run['kinds'].values()):,}" if run["kinds"] else "not recorded"


def counted(counts: Counter[str]) -> str:
    """Counts as a table; `what, variant` and `what: variant` go into the row of `what`, a column per variant, where
    most are such pairs."""
    if not counts:
        return "None yet."
    rows: dict[str, Counter[str]] = {}
    for name, count in sorted(counts.items()):
        mark = next((mark for mark in (": ", ", P=") if mark in name), None)
        what, _, variant = name.partition(mark) if mark else (name, "", "")
        rows.setdefault(what, Counter())[f"P = {variant}" if mark == ", P=" else variant] += count
    columns = sorted({variant for row in rows.values() for variant in row})
    lines = [
        "| | " + " | ".join(column or "in all" for column in columns) + " |",
        "|---" + "|---:" * len(columns) + "|",
    ]
    for what, row in rows.items():
        lines.append(
            f"| {what} | " + " | ".join(f"{row[column]:,}" if column in row else "" for column in columns) + " |"
        )
    return "\n".join(lines)


def page(known: Sequence[Run]) -> str:
    """docs/results/reliability.md of these runs."""
    import draws

    from soak.ranks import BOUND

    goals, kinds = [], []
    for what, goal, kind, begins, but in GOALS:
        goals.append(f"| {what} | {tried(known, kind, begins, but):,} | {f'{goal:,}' if goal else ''} |")
    missed = [what for what, goal, kind, begins, but in GOALS if goal and tried(known, kind, begins, but) < goal]
    for kind in dict.fromkeys(kind for _, _, kind, _, _ in GOALS):
        kinds.append(f"### {kind.capitalize()}\n\n{counted(totals(known, kind))}")
    failed = Counter(
        f"- `{failure['case']}` at {run['commit']}: {failure['what']}"
        + (f". It passes at {failure['mended']}." if "mended" in failure else "")
        for run in known
        for failure in run["failures"]
    )
    failures = [line if count == 1 else f"{line} ({count} times)" for line, count in failed.items()]
    left = sum("mended" not in failure for run in known for failure in run["failures"])
    rows = [
        f"| {run['date']} | {run['commit']} | {run['seconds'] / 3600:.2f} | {_cases(run)} | {len(run['failures'])} |"
        for run in known
    ]
    hours, number = sum(run["seconds"] for run in known) / 3600, len(known)
    count = failed.total()
    told = f"{count or 'no'} failure{'s' * (count != 1)}"
    if count:
        told += f", {left or 'none'} of them left"
    summary = f"**{hours:.1f} hours of a process in {number} run{'s' * (number != 1)}: {told}.**"
    reached = f"Not reached yet: {'; '.join(missed)}." if missed else "Every goal is reached."
    return TEMPLATE.format(
        summary=summary, goals="\n".join(goals), reached=reached, families=len(draws.ALL_FAMILIES), bound=BOUND,
        kinds="\n\n".join(kinds),
        failures="\n".join(failures) or "None.", runs="\n".join(rows),
    )  # fmt: skip
