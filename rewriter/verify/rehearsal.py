"""The rehearsal: the whole conversion of a shrunken copy of the model, everything it gives compared.

It runs before anything is written, in seconds, on a model of the same kind that is small enough to be compared
everywhere (see `shrink`). Its weights are random and large, so that a block that reads the wrong value shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from rewriter.errors import RewriterError, VerificationError
from rewriter.passes.base import Pass, single_device
from rewriter.program import Program
from rewriter.selection import resolve
from rewriter.trace import trace
from rewriter.verify import outside
from rewriter.verify.compare import DIFFERENT, EXACT, RANKS, Verification, relative_error
from rewriter.verify.drift import context_length
from rewriter.verify.random_model import random_ids, random_model
from rewriter.verify.reference import ladder_reference
from rewriter.verify.shrink import depth, representatives, shrink
from rewriter.verify.simulate import simulate
from rewriter.verify.stream import decoder_layers

LENGTHS = (1, 21, 100)
# Starting this many ranks of a tiny model takes about half a minute on two cores; beyond it `simulate` has to do.
MOST_RANKS = 8

Write = Callable[[Program, Path], None]
"""Writes the output directory of a program, unverified: what the rehearsal loads and compares."""


@torch.no_grad()
@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """The rehearsal's own files are no progress of the user's conversion."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def rehearse(
    config: PreTrainedConfig,
    passes: Sequence[Pass],
    ranks: int = 1,
    *,
    write: Write | None = None,
    trust_remote_code: bool = False,
    progress: Callable[..., None] = lambda *_: None,
) -> Verification:
    """Convert a shrunken copy of the model of `config` by `passes` for `ranks` ranks and compare everything.

    Compared, in fp32: the replay of the trace at three lengths with the unmodified eager model; the passes on one
    device with that model (exact ones) or an independent reference (ladder), which itself must differ from the
    original; the simulated ranks with one device; and, given `write`, the emitted checkpoint and the sharded module on
    real ranks. Raises VerificationError for the first that differs, RewriterError when the model cannot be rehearsed.
    Nothing stays behind.
    """
    result = Verification()
    selections = [set(resolve(p.layers, depth(config))) for p in passes if hasattr(p, "layers")]
    kept = representatives(config, selections)
    mapped = [_on(kept, p, depth(config)) for p in passes]
    small = shrink(config, kept, ranks)
    with tempfile.TemporaryDirectory(prefix="rewriter-rehearsal-") as scratch:
        directory = Path(scratch, "model")
        progress("rehearsal: building")
        model, reference = _telling_model(small, mapped, trust_remote_code)
        with _no_progress_bar():
            model.save_pretrained(directory)
        progress("rehearsal: tracing")
        traced = trace(directory, trust_remote_code=trust_remote_code)
        for length in test_lengths(small):
            ids = random_ids(small, length)
            result.require("trace = original model", simulate(traced, ids), model(ids, use_cache=False).logits, EXACT)
        program = _apply(traced, mapped, ranks)
        single = single_device(program)
        batches = [random_ids(small, length) for length in test_lengths(small)]
        expected = [simulate(single, ids) for ids in batches]
        name = "original model" if reference is None else "its reference"
        for ids, logits in zip(batches, expected, strict=True):
            result.require(f"rewritten = {name}", logits, reference_logits(model, reference, ids), EXACT)
        if ranks > 1:
            progress(f"rehearsal: simulating {ranks} ranks")
            for ids, logits in zip(batches, expected, strict=True):
                result.require(f"{ranks} simulated ranks = 1 device", simulate(program, ids), logits, RANKS)
        if write is not None:
            progress("rehearsal: emitting")
            out = Path(scratch, "out")
            write(program, out)
            compare_emitted(result, out, ranks, batches, expected, progress=progress)
    return result


def compare_emitted(
    result: Verification,
    out: Path,
    ranks: int,
    batches: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    *,
    limit: float = EXACT,
    prefix: str = "",
    progress: Callable[..., None] = lambda *_: None,
) -> None:
    """Compare what a written directory computes, in other processes, with `expected`; adds to `result` or raises."""
    sharded = (out / "runtime" / f"tp{ranks}" / "module.py").is_file()
    if sharded and ranks > MOST_RANKS:
        result.notes.append(f"{ranks} ranks are simulated only: more than {MOST_RANKS} processes are not started here")
        sharded = False
    progress("loading what was emitted")
    single, parallel = outside.emitted_logits(out, ranks if sharded else None, batches)
    for logits, wanted in zip(single, expected, strict=True):
        result.require(f"{prefix}adapted checkpoint = rewritten", logits, wanted, limit)
    for logits, wanted in zip(parallel, expected, strict=False):
        name = f"{prefix}sharded module on {ranks} rank{'s' * (ranks > 1)} = rewritten"
        result.require(name, logits, wanted, max(limit, RANKS))


def test_lengths(config: PreTrainedConfig) -> list[int]:
    """The lengths to compare at: those that the model has positions for."""
    return [length for length in LENGTHS if length <= context_length(config.to_dict())]


def reference_layers(passes: Sequence[Pass], count: int) -> set[int] | None:
    """The layers that the ladder passes select; None when every pass is exact.

    Raises RewriterError for an approximating pass that has no independent reference.
    """
    layers: set[int] = set()
    approximating = [p for p in passes if p.kind == "approximating"]
    for p in approximating:
        if p.name != "ladder":
            raise RewriterError(f"{p.name}: no independent reference to verify it with. Use --verify none")
        layers |= set(resolve(p.layers, count))  # type: ignore[attr-defined]
    return layers if approximating else None


@torch.no_grad()
def reference_logits(model: PreTrainedModel, layers: set[int] | None, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, vocabulary] of the unmodified model, or of its ladder on `layers`."""
    with contextlib.nullcontext() if layers is None else ladder_reference(model, layers):
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _on(kept: Sequence[int], rewrite: Pass, count: int) -> Pass:
    """The same pass on the kept layers: it selects the places of the layers that it selects in the real model."""
    if not hasattr(rewrite, "layers"):
        return rewrite
    chosen = set(resolve(rewrite.layers, count))
    places = [place for place, layer in enumerate(kept) if layer in chosen]
    return dataclasses.replace(rewrite, layers=places)  # type: ignore[type-var]


def _apply(program: Program, passes: Sequence[Pass], ranks: int) -> Program:
    if ranks > 1:
        program = program.with_(mesh={"tp": ranks}, origin=program)
    for rewrite in passes:
        program = rewrite.apply(program)
    return program


def _telling_model(
    config: PreTrainedConfig, passes: Sequence[Pass], trust_remote_code: bool
) -> tuple[PreTrainedModel, set[int] | None]:
    """(a random model whose reference differs visibly from it, the layers of that reference)."""
    for strength in (1.0, 2.0, 4.0):
        model = random_model(config, strength, trust_remote_code)
        layers = reference_layers(passes, len(decoder_layers(model)))
        if layers is None:
            return model, None
        ids = random_ids(config, 21)
        difference = relative_error(reference_logits(model, layers, ids), reference_logits(model, None, ids))
        if difference >= DIFFERENT:
            return model, layers
    raise VerificationError(
        f"the rehearsal of model type {config.model_type!r} shows nothing: its rewritten form differs from the "
        f"original by {difference:.1e} only, {DIFFERENT:.0e} is needed to tell them apart. Use --verify full or none"
    )
