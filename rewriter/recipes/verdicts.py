"""The verdict on an output and the next command, from the data of the report of a conversion or a fine-tuning."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rewriter.output.manifest import Drift, above, as_argument, gap_closed, healing
from rewriter.recipes.healed import HEALED

LEAST_AGAIN = 100_000  # tokens of a longer fine-tuning
TRY = "Test it on your tasks before you serve it."


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
    checks = report.get("verification") or {}
    if not kinds - {"exact"}:
        if not any(isinstance(error, float) for error in checks.values()):
            return Verdict(f"Meant to be the same function as {model}; nothing was compared.")
        return Verdict(f"Same function as {model}.", serving(report["out"]))
    drift = None if checks.get("drift") is None else Drift.model_validate(checks["drift"])
    if drift is None or drift.rise is None:
        return Verdict(
            f"Not yet usable: it computes another function than {model}, and its loss was not measured.",
            healing(report["out"]),
        )
    measured = f"the loss is {apart(drift.rise)} the original's on {drift.tokens:,} tokens"
    if drift.close:
        return Verdict(f"Close to {model}: {measured}. {TRY}", serving(report["out"]))
    if drift.rise <= HEALED:
        return Verdict(f"Not healed: {measured}, KL {drift.kl:.2g} nats.", healing(report["out"]))
    return Verdict(f"Not yet usable: {measured}.", healing(report["out"]))


def of_adaptation(report: Mapping[str, Any], words: Sequence[str] = ()) -> Verdict:
    """The verdict on the data of an `AdaptReport`. `words`: of the command that made it, after `rewrite`; the next one
    trains longer with the same options."""
    losses = report["losses"]
    before, after = losses["before"], losses["after"]
    if not math.isfinite(after) or after >= before:
        return Verdict(f"Not healed: training took the loss from {before:.3g} to {after:.3g} nats per target.")
    if "original" not in losses:
        change = f"The loss went from {before:.3g} to {after:.3g}; the original's was not measured."
        return Verdict(f"{change} {TRY}", serving(report["out"]))
    rise, closed = above(losses["original"], after), gap_closed(losses)
    share = "" if closed is None else f" {100 * closed:.0f} % of the gap is closed."
    if rise is None:
        return Verdict(f"The loss went from {before:.3g} to {after:.3g}. {TRY}", serving(report["out"]))
    said = f"the loss is {apart(rise)} the original's.{share}"
    if rise <= HEALED:
        return Verdict(f"{said[0].upper()}{said[1:]} {TRY}", serving(report["out"]))
    return Verdict(f"Not healed yet: {said}", _longer(report, words))


def _longer(report: Mapping[str, Any], words: Sequence[str]) -> str:
    """The command that trains again on more tokens, into another directory."""
    tokens = 4 * max(int(report["adaptation"]["tokens"]), LEAST_AGAIN // 4)
    out = f"{report['out'].rstrip('/')}-{tokens}"
    if not words:
        return healing(report["source"], out, tokens)
    kept = [word for word in words if word not in ("--resume", "--json")]
    return command(*replaced(replaced(kept, "--out", out), "--tokens", f"{tokens}"))


def apart(rise: float) -> str:
    """ "31 % above", "0.4 % below"."""
    size = 100 * abs(rise)
    return f"{size:.{0 if size >= 9.95 else 1}f} % {'below' if rise < 0 else 'above'}"


def serving(directory: str) -> str:
    """The command that serves an output."""
    return command("serve", as_argument(directory))


def converting(model: str, recipe: str, tp: int, sp: int) -> list[str]:
    """The words of the command that converts `model` for these ranks."""
    ranks = [word for axis, count in (("--tp", tp), ("--sp", sp)) if count > 1 for word in (axis, f"{count}")]
    return ["rewrite", model, "--recipe", recipe, *ranks]


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
