"""What soaks have found so far: `tally.json`, one entry per run, and docs/RELIABILITY.md, which is made from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TALLY = Path(__file__).with_name("tally.json")
PAGE = ROOT / "docs" / "RELIABILITY.md"

Run = dict[str, Any]
"""date, commit, seconds; kinds: {name: {first, behind, seconds, counts}}; failures: [{case, what}], with the commit at
which the case was repeated and passed as `mended`."""

GOALS = (
    ("programs × recipes × ranks, against the independent references", 10_000, "programs", ("",), ""),
    ("safetensors headers", 1_000_000, "inputs", ("headers: ",), ""),
    ("other damaged inputs", 10_000, "inputs", ("",), "headers: "),
    ("kills at a system call, then resumed or started over", 200, "kills", ("killed: ",), ""),
    ("two runs at one place", None, "kills", ("two at once: ",), ""),
    ("a full or failing disk in mid-write", None, "disks", ("",), ""),
    ("a rank killed, stopped, paused or slowed", None, "ranks", ("killed: ", "stopped: ", "paused: ", "slowed: "), ""),
)
"""What is counted, how many are the goal, the kind, how the names of its counts begin, and how they do not."""

TEMPLATE = """# Reliability

What random and damaged inputs, programs, kills, disks and ranks have found in `rewriter`. `make soak HOURS=…` adds a
run and writes this page from `tests/soak/tally.json`; an interrupted soak goes on where it was.

{summary}

| what was tried | times | goal |
|---|---:|---:|
{goals}

## What is tried

- **Inputs.** Safetensors headers, indices, configs, recipes, fabrics, manifests, the ranks' weights by reference, and
  JSON Lines: valid ones, damaged in their values, lines and bytes, through the readers that commands use. Each is read,
  or refused with a `RewriterError` that does not call it a fault of rewriter. An input that is refused at a new line of
  the code is damaged further.
- **Programs.** Random architectures of {families} families, random mixes of layers, P of 1, 2, 3, 4 and 8: logits, the
  gradients of every parameter and a step along them, text with a cache behind padded prompts, and emitted modules on
  real ranks. The reference is P copies of transformers' eager model, which know no pass.
- **Kills.** SIGKILL at a random system call that changes a file, of conversions in five ways, `adapt` and `predict`.
  What was killed is resumed, or started over, to the files of an undisturbed run; or the refusal says what to delete.
- **Disks.** From a random system call on, the disk is full (ENOSPC) or fails (EIO), once or for good. The command says
  so in one error, leaves no half output, and afterwards comes to the files of an undisturbed run.
- **Ranks.** Of `generate`, `adapt` and a conversion's verification, one rank is killed, stopped, paused for two seconds
  or slowed. The command ends within {bound:.0f} s with one error where it fails, and leaves no process and no temporary
  folder. A rank that stays stopped ends the command after 60 seconds.

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
    """Put a run behind the others, and write the page."""
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


def page(known: Sequence[Run]) -> str:
    """docs/RELIABILITY.md of these runs."""
    import draws

    from soak.ranks import BOUND

    goals, kinds = [], []
    for what, goal, kind, begins, but in GOALS:
        counts = totals(known, kind)
        times = sum(n for name, n in counts.items() if name.startswith(begins) and not (but and name.startswith(but)))
        goals.append(f"| {what} | {times:,} | {f'{goal:,}' if goal else ''} |")
    for kind in dict.fromkeys(kind for _, _, kind, _, _ in GOALS):
        counts = totals(known, kind)
        listed = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
        kinds.append(f"- **{kind}**: {listed or 'none yet'}.")
    failures = [
        f"- `{failure['case']}` at {run['commit']}: {failure['what']}"
        + (f". It passes at {failure['mended']}." if "mended" in failure else "")
        for run in known
        for failure in run["failures"]
    ]
    left = sum("mended" not in failure for run in known for failure in run["failures"])
    rows = [
        f"| {run['date']} | {run['commit']} | {run['seconds'] / 3600:.2f} "
        f"| {sum(k['behind'] - k['first'] for k in run['kinds'].values()):,} | {len(run['failures'])} |"
        for run in known
    ]
    hours, number = sum(run["seconds"] for run in known) / 3600, len(known)
    told = f"{len(failures) or 'no'} failure{'s' * (len(failures) != 1)}"
    if failures:
        told += f", {left or 'none'} of them left"
    summary = (
        f"**{hours:.1f} hours in {number} run{'s' * (number != 1)}: {told}.** Every case follows from its kind and "
        "number; `python -m soak --repeat KIND:NUMBER` repeats one."
    )
    return TEMPLATE.format(
        summary=summary, goals="\n".join(goals), families=len(draws.ALL_FAMILIES), bound=BOUND, kinds="\n".join(kinds),
        failures="\n".join(failures) or "None.", runs="\n".join(rows),
    )  # fmt: skip
