"""The verdict on an output and the next command, from the data of the report of a conversion or a fine-tuning."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rewriter.output.manifest import healing
from rewriter.recipes.healed import HEALED

LEAST_AGAIN = 100_000  # tokens of a longer fine-tuning


class Verdict(NamedTuple):
    """`verdict`: one or two sentences; `next`: a command for a shell, empty where there is nothing to run."""

    verdict: str
    next: str = ""


def of_conversion(report: Mapping[str, Any]) -> Verdict:
    """The verdict on the data of a `ConversionReport`."""
    model, kinds = report["model"], {entry["kind"] for entry in report["passes"] if entry.get("fired", True)}
    if report.get("dry_run"):
        changes = f"another function than {model}" if kinds - {"exact"} else f"the same function as {model}"
        return Verdict(f"Nothing was written. The output would compute {changes}.")
    if "timing only" in kinds:
        return Verdict("For timing only: it computes nothing useful.")
    checks = report.get("verification") or {}
    if not kinds - {"exact"}:
        if not any(isinstance(error, float) for error in checks.values()):
            return Verdict(f"Meant to be the same function as {model}; nothing was compared.", verifying(report["out"]))
        return Verdict(f"Same function as {model}.", serving(report["out"]))
    above, tokens = drift_of(checks.get("drift"))
    if above is None:
        return Verdict(
            f"Not yet usable: it computes another function than {model}, and its loss was not measured.",
            healing(report["out"]),
        )
    measured = f"the loss is {apart(above)} the original's on {tokens:,} tokens"
    if above <= HEALED:
        return Verdict(f"Close to {model}: {measured}.", serving(report["out"]))
    return Verdict(f"Not yet usable: {measured}.", healing(report["out"]))


def drift_of(drift: Mapping[str, Any] | None) -> tuple[float | None, int]:
    """(the loss after a rewrite over the original's, less one, the tokens that it was measured on). None without a
    measurement, and for losses that are 0 or not finite."""
    if drift is None:
        return None, 0
    before, after = (math.log(drift[f"perplexity_{side}"] or 1.0) for side in ("before", "after"))
    return above(before, after), drift["tokens"]


def of_adaptation(report: Mapping[str, Any], source: str) -> Verdict:
    """The verdict on the data of an `AdaptReport` of a run on the directory `source`."""
    losses, done = report["losses"], report["adaptation"]
    before, after = losses["before"], losses["after"]
    rise = above(losses["original"], after) if "original" in losses else None
    if rise is None:
        change = f"The loss went from {before:.3g} to {after:.3g}; the original's was not measured."
        return Verdict(change, serving(report["out"]))
    closed = gap_closed(losses)
    share = "" if closed is None else f" {100 * closed:.0f} % of the gap is closed."
    if closed is not None and closed < 0:
        share = f" The gap grew by {-100 * closed:.0f} %."
    if rise <= HEALED:
        tried = "Test it on your tasks before you serve it."
        return Verdict(f"The loss is {apart(rise)} the original's.{share} {tried}", serving(report["out"]))
    tokens = 4 * max(int(done["tokens"]), LEAST_AGAIN // 4)
    return Verdict(
        f"Not healed yet: the loss is {apart(rise)} the original's.{share}",
        healing(source, f"{report['out']}-{tokens}", tokens),
    )


def gap_closed(losses: Mapping[str, float]) -> float | None:
    """(loss before - loss after) / (loss before - the original's), in nats; None where there was no gap."""
    gap = losses["before"] - losses["original"]
    return (losses["before"] - losses["after"]) / gap if gap > 0 and math.isfinite(gap) else None


def above(original: float, loss: float) -> float | None:
    """A loss over the original's, less one; None where the original's is 0 or one of them is not finite."""
    if not (math.isfinite(original) and math.isfinite(loss)) or original <= 0:
        return None
    return loss / original - 1


def apart(rise: float) -> str:
    """ "31 % above", "0.4 % below"."""
    size = 100 * abs(rise)
    return f"{size:.{0 if size >= 9.95 else 1}f} % {'below' if rise < 0 else 'above'}"


def serving(directory: str) -> str:
    """The command that serves an output."""
    return command("serve", directory)


def verifying(directory: str) -> str:
    """The command that checks an output."""
    return command("verify", directory)


def command(*words: str) -> str:
    """`rewrite` with these words, quoted for a shell."""
    return shlex.join(["rewrite", *words])


def replaced(words: Sequence[str], option: str, value: str) -> list[str]:
    """The words of a command with another value of an option."""
    kept: list[str] = []
    skip = False
    for word in words:
        if not (skip or word == option or word.startswith(f"{option}=")):
            kept.append(word)
        skip = word == option and not skip
    return [*kept, option, value]
