"""Section healing of `run.py`: `rewrite adapt` of a real model, in pieces of a few minutes.

    python examples/real_models.py smollm2-135m-instruct build/gpu/gguf --gguf-parts 2   # where there is a network
    python -m benchmarks.gpu.run --only healing                                              # again, until it says "ok"

The checkpoint is made of the parts in build/gpu/gguf (or is the one in build/gpu/model); the original writes what is
trained on, and the text to measure on. A piece ends after `PIECE` seconds, and the next one goes on from the last
checkpoint. A dry run heals the shipped tiny model, is stopped at its first checkpoint, and goes on.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Row, Scale, Table
from rewriter.convert.save_options import SaveOptions

# `rewrite adapt` needs packages that the other sections do without: what needs them is imported where it is used.

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "gpu"
PIECE = 440.0  # seconds of a section, of which a call of nine minutes has room for the rest
WRITTEN = 8_000_000  # tokens that the original writes, and that are read several times
RUNS = (("ladder-upper-half", 40_000_000), ("ladder", 60_000_000))
EVALUATION = "self:131072"
DRY_TOKENS = 8_192
COLUMNS = (
    "recipe", "tokens", "original", "rewritten", "healed", "above the original", "tokens/s", "result",
)  # fmt: skip


def healing(scale: Scale) -> None:
    """Heals each of RUNS, as far as the time allows, and asks the healed models questions."""
    ends = time.monotonic() + PIECE
    if scale.tiny:
        with tempfile.TemporaryDirectory() as place:
            _heal(scale, ROOT / "examples" / "tiny-llama", Path(place), ends)
        return
    # beside the checkpoints: a run that goes on needs both
    os.environ.setdefault("XDG_CACHE_HOME", str(BUILD / "cache"))
    _heal(scale, checkpoint(BUILD), BUILD, ends)


def _heal(scale: Scale, model: Path, build: Path, ends: float) -> None:
    table = scale.table("Healed by distillation, nats per token of held-out text", COLUMNS)
    for recipe, tokens in scale.pick(RUNS, ((RUNS[0][0], DRY_TOKENS),)):
        out = build / f"{recipe}-healed"
        table.attempt(f"`{recipe}`", functools.partial(healed, scale, model, build / recipe, out, tokens, ends))
        if out.exists() and not scale.tiny:
            _asked(scale, model, out)


def healed(scale: Scale, model: Path, directory: Path, out: Path, tokens: int, ends: float) -> Row:
    """One recipe: wrong where the run was stopped by the end of the piece."""
    from benchmarks.healing.run import trained
    from rewriter.api import convert

    if not directory.exists():
        convert(model, directory.name, out=directory, options=SaveOptions(verify="none"))
    data = [] if scale.tiny else ["--data", f"self:{min(tokens, WRITTEN)}"]
    evaluation = scale.pick(EVALUATION, "self:2048")
    run = functools.partial(trained, directory, out, tokens, [*data, *_saves(scale)], evaluation)
    if scale.tiny:
        found = run(stop=lambda: _last(out) is not None)
        if found is not None or _last(out) is None:
            return ("",) * (len(COLUMNS) - 2), "the run was to be stopped at its first checkpoint, and was not"
        found = run()
    else:
        found = run(stop=lambda: time.monotonic() > ends)
    if found is None:
        last = _last(out)
        where = "before its first checkpoint" if last is None else f"at {last.name}"
        return ("",) * (len(COLUMNS) - 2), f"stopped {where}; the same command goes on"
    original, before, after = (found["losses"][name] for name in ("original", "before", "after"))
    speed = f"{found['tokens_per_second']:,.0f}"
    above = f"{after / original - 1:.1%}"
    return (f"{found['tokens']:,}", f"{original:.3f}", f"{before:.3f}", f"{after:.3f}", above, speed), ""


def _saves(scale: Scale) -> list[str]:
    return ["--set", f"save_steps={scale.pick(100, 2)}"]


def _last(out: Path) -> Path | None:
    """The last checkpoint of an unfinished run."""
    from rewriter.adapt import checkpoints
    from rewriter.adapt.checkpoints import place_of

    return checkpoints.last(place_of(out))


def _asked(scale: Scale, model: Path, out: Path) -> Table:
    from benchmarks.healing.run import QUESTIONS, answers

    table = scale.table(f"Answers of {out.name}", ("question", "original", "healed", "result"))
    for row in zip(QUESTIONS, answers(model), answers(out), strict=True):
        question, *cells = (" ".join(cell.split()).replace("|", "/") for cell in row)
        table.add(question, *cells)
    return table


def checkpoint(build: Path) -> Path:
    """The original in bf16: build/gpu/model, which is made of the parts of a GGUF file where it is not there."""
    model = build / "model"
    if not model.exists():
        sys.path.insert(0, str(ROOT / "examples"))
        real: Any = __import__("real_models")
        build.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=build) as place:
            gguf = Path(place, "model.gguf")
            real.joined(build / "gguf", gguf)
            if not gguf.stat().st_size:
                raise FileNotFoundError(f"no parts in {build / 'gguf'}: examples/real_models.py writes them")
            real.write(gguf, Path(place, "model"))
            os.replace(Path(place, "model"), model)
    return model
