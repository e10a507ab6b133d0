"""The pages docs/results/coverage.md and coverage_reasons.md: `rewrite coverage`, and the variants of every type.

    python tools/docs/coverage_pages.py docs/results [TYPE ...] [--rows FILE]
    python tools/docs/coverage_pages.py docs/results --images [TYPE ...]    # coverage_images.md: types that take images

Without types it tries all, which takes hours (`--rows` continues a run that was stopped), and writes how many the main
job works on into README.md and docs/concepts/limits.md. A variant is a type's small config with one switch thrown that
changes what the forward computes. Switches are found, not listed: booleans, the words that the config's class allows
for a setting (`Literal`), and the activation, as far as the model's code reads them.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import inspect
import json
import os
import re
import shutil
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rewriter.check.coverage import check as coverage
from rewriter.check.coverage import images, pool
from rewriter.check.coverage.configs import require_registered, small_config
from rewriter.check.coverage.report import CHECKS, MAIN_JOB, PARTS, TITLES, Coverage, percent
from rewriter.check.random_model import build_model, random_ids
from rewriter.check.reference_modes import original_logits
from rewriter.common.files import scratch_folder
from rewriter.convert.main_job import main_job
from rewriter.tracing.shrink import text_config

LIMIT = 900.0  # seconds for one type
VARIANT_CHECKS = ("traces", "ladder", "tp2")


@dataclass
class VariedCoverage(Coverage):
    """`variants`: by switch, why not all of `VARIANT_CHECKS` hold that hold for the default, "" where they do."""

    variants: dict[str, str] = field(default_factory=dict)


def check(model_type: str) -> VariedCoverage:
    """The row of a type and of each of its variants."""
    variants: dict[str, str] = {}

    def more(subject: coverage.Subject) -> None:
        main_job(subject)
        _try_variants(subject, variants)

    row = coverage.check(model_type, more)
    return VariedCoverage(**vars(row), variants=variants)


def _try_variants(default: coverage.Subject, variants: dict[str, str]) -> None:
    for number, (name, value) in enumerate(candidates(default.config, default.model)):
        try:
            if not changes_forward(default.model, small_config(default.result.type, {name: value})):
                continue
        except Exception:  # transformers itself cannot do that
            continue
        row = Coverage(default.result.type)
        scratch = default.scratch / f"variant{number}"
        with contextlib.suppress(coverage.Stopped):
            coverage.Subject(row, scratch, {name: value}).run(VARIANT_CHECKS)
        shutil.rmtree(scratch, ignore_errors=True)
        lacking = [n for n in VARIANT_CHECKS if getattr(default.result, n) and not getattr(row, n)]
        label = f"{name}={value}"
        variants[label] = (row.reason or "") if lacking else ""
        default.result.wrong += [f"{label}: {n}" for n in row.wrong]


_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
# Settings that no causal LM is asked for, or that add another model.
_OTHER = ("is_decoder", "is_encoder_decoder", "add_cross_attention", "use_cache", "torchscript", "return_dict")


def candidates(config: PreTrainedConfig, model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """(setting, another value) for every switch of `config` that the code of `model` reads; `text_config.name` names
    one of a config inside."""
    text = text_config(config)
    inner = next((f"{k}." for k, v in config.__dict__.items() if v is text), "") if text is not config else ""
    modules = {sys.modules[kind.__module__] for kind in map(type, model.modules())}
    code = "\n".join(inspect.getsource(m) for m in modules if m.__name__.startswith("transformers.models."))
    allowed = _words(type(text))
    for path, value in _switches(text.to_dict(), inner):
        name = path.rpartition(".")[2]
        if name in _OTHER or not re.search(rf"""config\.{name}\b|config, ["']{name}["']""", code):
            continue
        if isinstance(value, bool):
            yield path, not value
        elif name in _ACTIVATIONS and isinstance(value, str):
            yield path, "gelu" if value in ("silu", "swish") else "silu"
        else:
            yield from ((path, word) for word in allowed.get(name, ()) if word != value)


def _switches(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The settings of a language model, with those of configs inside for its parts (`attn_config.alibi`)."""
    for name, value in sorted(data.items()):
        if isinstance(value, dict):
            if name.startswith(("attn", "attention", "ffn", "mlp", "ssm", "moe")):
                yield from _switches(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _words(kind: type) -> dict[str, tuple[Any, ...]]:
    """The words that a config's class allows, by setting."""
    try:
        hints = typing.get_type_hints(kind)
    except Exception:  # an annotation that only a type checker can read
        return {}
    options = {name: (hint, *typing.get_args(hint)) for name, hint in hints.items()}
    return {
        name: tuple(word for h in kinds if typing.get_origin(h) is typing.Literal for word in typing.get_args(h))
        for name, kinds in options.items()
    }


@torch.no_grad()
def changes_forward(one: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """True if the model of `config` has other parameters than `one`, or gives other logits with the same parameters.

    Raises the error of the model's class if the model cannot be built or run with `config`.
    """
    other, ids = build_model(config), random_ids(config, 21)
    weights = one.state_dict()
    if {n: t.shape for n, t in other.state_dict().items()} != {n: t.shape for n, t in weights.items()}:
        original_logits(other, ids)
        return True
    other.load_state_dict(weights)
    return not torch.allclose(original_logits(other, ids), original_logits(one, ids), rtol=1e-4, atol=1e-5)


# Pages

SAYS = {
    "main_job": "`rewrite MODEL --recipe tensor-parallel --tp 2`, then cached text on two real ranks, alone and padded "
    "at the left, equals transformers' greedy generation",
    "main_job_ladder": "the same with `--recipe ladder`: equals the text of the adapted checkpoint in transformers",
    "builds": "the small config builds",
    "traces": "the traced program equals the unmodified eager model",
    "ladder": "ladder on all layers and on every second layer equals its reference, hooks on that model",
    "tp2": "two ranks, simulated, equal the unmodified model",
    "tp4": "four ranks, simulated, equal it",
    "desync": "desync (2x, mean, P = 2) equals its reference",
    "emitted": "the emitted checkpoint of the ladder loads in transformers and equals the reference",
}
PAGE = """# Coverage

Generated by `tools/docs/coverage_pages.py`, {today}, with {versions}.

**`rewrite MODEL --recipe tensor-parallel --tp 2` works on {working} of {count} types**: default verification, two
real ranks, cached text. With `--recipe ladder` on {laddered}.

The rows are all causal-LM types that transformers registers. Each is tested with its default config, shrunken,
with dropout off and large random weights, in fp32, at 1, 21 and 100 tokens; if rounding decides between experts, other
tokens are compared. ✗ is a refusal: [reasons](coverage_reasons.md) lists its reason and the source line that raises
it. WRONG is a computed result that differs from the expected one.

## Totals of {count} types

| check | types | meaning |
|---|---:|---|
{totals}

{streams} of the types that trace have a residual stream. Wrong: {wrong}.

**split** is the share of the layers' parameters that two ranks share (1 − replicated / total). {much} of the {working}
types split 90 % or more, {little} less than half. Both ranks compute the parts that are not split: this is exact, and
gains nothing.

## Variants

{thrown} switches of {varied} types' configs (booleans, words, the activation) change the computation.
If only one is changed, {kept} of them keep the results of traces, ladder and tp2 of the default config;
[reasons](coverage_reasons.md#variants) lists the others.

## Types

| type | {checks} | blocks |
|---|:-:|:-:|---:|:-:|:-:|:-:|:-:|:-:|:-:|:-:|---:|
{rows}
"""
REASONS = """# Reasons of coverage

Generated by `tools/docs/coverage_pages.py` with [Coverage](coverage.md). For each type: the checks that do not hold,
with the message of `rewrite` or of the library that it calls.

## Checks that do not hold

{reasons}

## Variants

{variants}

## Replicated modules

Tensor parallelism does not split these modules. All ranks compute them, which is exact:

{replicated}
"""
IMAGE_PAGE = """# Coverage of types that take images

Generated by `tools/docs/coverage_pages.py --images`, {today}, with {versions}.

The rows are all image-text types that transformers registers, by the class that their checkpoints name. Each is
tested with its default config, shrunken, with large random weights, in fp32.
**{whole} of {count} types pass every check.** Wrong: {wrong}.

**builds** to **emitted** are the checks of [Coverage](coverage.md), with text. **pixels**: with a random picture
within random text, the emitted ladder agrees with hooks on the source, and its result changes with the picture.

| type | {checks} |
|---|:-:|:-:|:-:|:-:|:-:|:-:|
| **{count}** | {totals} |
{rows}

## Checks that do not hold

{reasons}
"""


def pages(rows: Sequence[Coverage]) -> dict[str, str]:
    """Both pages by file name."""
    versions = {name: number for row in rows for name, number in row.versions.items()}
    varied = [row for row in rows if isinstance(row, VariedCoverage) and row.variants]
    thrown = [(row.type, name, why) for row in varied for name, why in row.variants.items()]
    working = [row for row in rows if row.main_job]
    page = PAGE.format(
        working=len(working),
        laddered=sum(row.main_job_ladder for row in rows),
        much=sum((row.split or 0) >= 0.9 for row in working),
        little=sum((row.split or 0) < 0.5 for row in working),
        today=datetime.date.today().isoformat(),
        versions=" and ".join(f"{name} {number}" for name, number in versions.items()),
        count=len(rows),
        totals="\n".join(f"| {TITLES[n]} | {sum(getattr(row, n) for row in rows)} | {SAYS[n]} |" for n in CHECKS),
        streams=sum(row.stream for row in rows),
        wrong=_wrong(rows),
        thrown=len(thrown),
        varied=len(varied),
        kept=sum(not why for _, _, why in thrown),
        checks=" | ".join([*(TITLES[n] for n in MAIN_JOB), "split", *PARTS]),
        rows="\n".join(map(_line, rows)),
    )
    reasons = REASONS.format(
        reasons=_reasons(rows),
        variants="\n".join(f"- **{kind}**, {_plain(name)}: {_plain(why)}" for kind, name, why in thrown if why),
        replicated="\n".join(f"- **{r.type}**: {_plain('; '.join(r.replicated))}" for r in rows if r.replicated),
    )
    return {"coverage.md": page, "coverage_reasons.md": reasons}


def image_pages(rows: Sequence[Coverage]) -> dict[str, str]:
    """The page of types that take images, by file name."""
    versions = {name: number for row in rows for name, number in row.versions.items()}
    page = IMAGE_PAGE.format(
        today=datetime.date.today().isoformat(),
        versions=" and ".join(f"{name} {number}" for name, number in versions.items()),
        count=len(rows),
        whole=sum(all(getattr(row, name) for name in images.CHECKS) for row in rows),
        wrong=_wrong(rows),
        totals=" | ".join(str(sum(getattr(row, name) for row in rows)) for name in images.CHECKS),
        checks=" | ".join(images.CHECKS),
        rows="\n".join(f"| {row.type} | {' | '.join(_marks(row, images.CHECKS))} |" for row in rows),
        reasons=_reasons(rows),
    )
    return {"coverage_images.md": page}


def _wrong(rows: Sequence[Coverage]) -> str:
    return ", ".join(f"`{row.type}` ({', '.join(row.wrong)})" for row in rows if row.wrong) or "none"


def _reasons(rows: Sequence[Coverage]) -> str:
    return "\n".join(f"- **{row.type}**: {_plain(row.reason)}" for row in rows if row.reason)


def _marks(row: Coverage, checks: Sequence[str]) -> list[str]:
    return ["**WRONG**" if name in row.wrong else "✓" if getattr(row, name) else "✗" for name in checks]


def _line(row: Coverage) -> str:
    marks = _marks(row, CHECKS)
    marks.insert(len(MAIN_JOB), percent(row.split))
    return f"| {row.type} | {' | '.join(marks)} | {row.blocks or '–'} |"


WORKING = re.compile(r"works on \d+ of the \d+ model types")  # in README.md and docs/concepts/limits.md


def write_number(rows: Sequence[Coverage], root: Path) -> None:
    """Say in the documents how many types the main job works on."""
    said = f"works on {sum(row.main_job for row in rows)} of the {len(rows)} model types"
    for name in ("README.md", "docs/concepts/limits.md"):
        text = (root / name).read_text(encoding="utf-8")
        assert WORKING.search(text), f"{name} does not say on how many model types it works"
        (root / name).write_text(WORKING.sub(said, text), encoding="utf-8")


def _plain(text: str) -> str:
    """Text that markdown does not read as markup."""
    for mark, plain in (("*", "\\*"), ("_", "\\_"), ("<", "&lt;"), ("|", "\\|"), ("][", "]\\[")):
        text = text.replace(mark, plain)
    return text


def checked(names: Sequence[str], with_images: bool, kept: Path | None) -> list[Coverage]:
    """The rows of `names`, by type; those that the file `kept` has (JSON lines) are not checked again, others are
    added to it as they become ready."""
    tried, kind = (images.check_images, images.ImageCoverage) if with_images else (check, VariedCoverage)
    known = [kind(**json.loads(line)) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    rows = {row.type: row for row in known if row.type in names}
    waiting = [name for name in names if name not in rows]
    for row in pool.run(waiting, tried, jobs=os.cpu_count() or 1, limit=LIMIT, kind=kind):
        rows[row.type] = row
        if kept:
            with kept.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    return [rows[name] for name in sorted(rows)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--images", action="store_true", help="types that take images")
    parser.add_argument("--rows", type=Path, help="keeps the rows that are done, so that a run can be continued")
    given = parser.parse_args()
    # read when torch and transformers are imported, in the processes that check: as `rewrite coverage` sets them
    with scratch_folder("coverage") as scratch:
        os.environ |= {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        rows = checked(require_registered(given.types, given.images), given.images, given.rows)
    for name, text in (image_pages if given.images else pages)(rows).items():
        Path(given.folder, name).write_text(text, encoding="utf-8")
    if not given.images and not given.types:
        write_number(rows, Path(__file__).resolve().parents[2])
