"""Findings of soaks: `tally.json`, one entry per run, and the pages made from it: docs/results/reliability.md, the
summary, and tools/soak/RESULTS.md, the tables by kind, failures and runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TALLY = Path(__file__).with_name("tally.json")
PAGE = ROOT / "docs" / "results" / "reliability.md"
RESULTS = Path(__file__).with_name("RESULTS.md")

Run = dict[str, Any]
"""date, commit, seconds; kinds: {name: {first, behind, seconds, counts}}; failures: [{case, what}], with the commit at
which the case was repeated and passed as `mended`."""

GOALS = (
    ("programs × recipes × ranks, against the independent references", 10_000, "programs", ("",), ""),
    ("safetensors headers", 1_000_000, "inputs", ("headers: ",), ""),
    ("other damaged inputs", 10_000, "inputs", ("",), "headers: "),
    ("commands with nonsensical options", None, "options", ("",), ""),
    ("kills at a system call, then resumed or started over", 200, "kills", ("killed: ",), ""),
    ("two runs in the same place", None, "kills", ("two at once: ",), ""),
    ("a full or failing disk during a write", None, "disks", ("",), ""),
    ("a rank killed, paused or slowed", None, "ranks", ("killed: ", "paused: ", "slowed: "), ""),
    ("a command killed or ended while its ranks run", None, "ranks", ("command ",), ""),
)
"""(what is counted, goal or None, kind, beginnings of the names of its counts, a beginning to leave out)."""

TEMPLATE = """# Reliability

`make soak HOURS=…` tests `rewriter` with random and damaged inputs, programs, kills, disks and ranks. {summary} \
{reached} [Tables](../../tools/soak/RESULTS.md) have the counts by kind, all failures and all runs.

| test | times | goal |
|---|---:|---:|
{goals}

- **Inputs**: readers get safetensors headers, indices, configs, recipes, fabrics, manifests, weight references of \
ranks and JSON Lines, valid or damaged. They read the input, or refuse it with a `RewriterError` that does not blame \
rewriter.
- **Options**: a command gets up to three additional options with nonsensical values. It runs, or explains the error \
in one line; it never changes its inputs.
- **Programs**: random architectures of {families} families and random mixes of layers on 1, 2, 3, 4 and 8 ranks. \
Logits, gradients, a training step, cached text after padded prompts and emitted modules on real ranks agree with P \
copies of transformers' eager model.
- **Kills**: SIGKILL at a random system call that changes a file, in conversions, `adapt` and `predict`. The resumed \
or restarted command gives the files of an undisturbed run, or its refusal says what to delete.
- **Disks**: from a random system call on, the disk is full or fails, once or permanently. The command reports one \
error, leaves no partial output, and later gives the files of an undisturbed run.
- **Ranks**: one rank of `generate`, `adapt` or a verification is killed, paused or slowed, or the command gets \
SIGKILL or SIGTERM. A failing command ends within {bound:.0f} s with one error and leaves no process, and no \
temporary folder unless it was killed.
"""
RESULTS_TEMPLATE = """# Results of soaks

`make soak HOURS=…` adds a run and writes this page and [Reliability](../../docs/results/reliability.md) from \
`tools/soak/tally.json`. An interrupted soak continues.

A case is one random draw, which may test many inputs. It follows from its kind and number. This repeats one: \
`PYTHONPATH=tools:tests/support:tests:. .venv/bin/python -m soak --repeat KIND:NUMBER`.

## Details of the kinds

- **Inputs** are damaged in their values, lines and bytes. [atheris](https://github.com/google/atheris) (libFuzzer) \
guides the damage by coverage: an input that reaches new code is damaged further.
- **Options** include numbers without end, folders and devices instead of files, and words instead of numbers.
- **Programs** are compared by logits, by the gradients of every parameter and by one step along them. The reference \
knows no pass.
- **Kills** strike conversions in five ways. **Disks** fail with ENOSPC or EIO. A **rank** is paused for two seconds.

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
    """Add a run, and write the pages."""
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
    """Write the tally and its pages."""
    TALLY.write_text(json.dumps({"runs": list(known)}, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(known), encoding="utf-8")
    RESULTS.write_text(results(known), encoding="utf-8")


def totals(known: Sequence[Run], kind: str) -> Counter[str]:
    """The counts of a kind over all runs."""
    found: Counter[str] = Counter()
    for run in known:
        found.update(run["kinds"].get(kind, {}).get("counts", {}))
    return found


def tried(known: Sequence[Run], kind: str, begins: tuple[str, ...], but: str) -> int:
    """The number of times that a row of GOALS was tested."""
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

    goals = [
        f"| {what} | {tried(known, kind, begins, but):,} | {f'{goal:,}' if goal else ''} |"
        for what, goal, kind, begins, but in GOALS
    ]
    missed = [what for what, goal, kind, begins, but in GOALS if goal and tried(known, kind, begins, but) < goal]
    count = sum(len(run["failures"]) for run in known)
    left = sum("mended" not in failure for run in known for failure in run["failures"])
    hours, number = sum(run["seconds"] for run in known) / 3600, len(known)
    found = f"{count or 'no'} failure{'s' * (count != 1)}" + (f", {left or 'none'} of them left" if count else "")
    return TEMPLATE.format(
        summary=f"**{hours:.1f} hours of a process in {number} run{'s' * (number != 1)}: {found}.**",
        goals="\n".join(goals),
        reached=f"Goals not reached yet: {'; '.join(missed)}." if missed else "Every goal is reached.",
        families=len(draws.ALL_FAMILIES),
        bound=BOUND,
    )


def results(known: Sequence[Run]) -> str:
    """tools/soak/RESULTS.md of these runs."""
    kinds = [
        f"### {kind.capitalize()}\n\n{counted(totals(known, kind))}"
        for kind in dict.fromkeys(goal[2] for goal in GOALS)
    ]
    failed = Counter(
        f"- `{failure['case']}` at {run['commit']}: {failure['what']}"
        + (f". It passes at {failure['mended']}." if "mended" in failure else "")
        for run in known
        for failure in run["failures"]
    )
    failures = [line if count == 1 else f"{line} ({count} times)" for line, count in failed.items()]
    rows = [
        f"| {run['date']} | {run['commit']} | {run['seconds'] / 3600:.2f} | {_cases(run)} | {len(run['failures'])} |"
        for run in known
    ]
    return RESULTS_TEMPLATE.format(
        kinds="\n\n".join(kinds), failures="\n".join(failures) or "None.", runs="\n".join(rows)
    )
