"""The shrunken check: the whole conversion of a shrunken copy of the model, everything it gives compared.

It runs before anything is written, in seconds, on a model of the same kind that is small enough to be compared
everywhere (see `shrink`). Its weights are random and large, so that a block that reads the wrong value shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from rewriter.check import subprocess_logits
from rewriter.check.comparison import DIFFERENT, EXACT, QUANTIZED, RANKS, Verification, exact_limit, relative_error
from rewriter.check.padded_model import model_to_compare, padded_model
from rewriter.check.random_model import amplification, random_ids, random_model, save_model
from rewriter.check.reference_modes import original_logits, reference_of
from rewriter.common.errors import VerificationError
from rewriter.common.files import scratch_folder
from rewriter.common.run_context import ProgressCall, silent
from rewriter.common.shrink_sizes import rope_types
from rewriter.common.text_settings import context_length
from rewriter.ir import Program
from rewriter.ir.ops import SequencePlan
from rewriter.ir.simulate import simulate
from rewriter.output.names import mesh_name, ranks_of
from rewriter.passes.base import Pass, bound_ranks
from rewriter.passes.phases import both_wirings, single_device, with_short_ends
from rewriter.passes.quantize_collectives import exact, is_quantized
from rewriter.tracing import trace
from rewriter.tracing.shrink import depth, representatives, shrink

LENGTHS = (1, 21, 100)
# Starting this many ranks of a tiny model takes about half a minute on two cores; beyond it `simulate` has to do.
MOST_RANKS = 8

# Where a model amplifies rounding more than this, two right computations may differ by the limits of `compare`.
STEADY = 50.0
# Strengths of random weights in the order of trying them, and whether the model has to be steady. Recurrent mixers with
# large weights are chaotic; weights that are too small hide what a block reads.
_STRENGTHS = ((1.0, True), (0.5, True), (0.25, True), (1.0, False), (2.0, False), (4.0, False))

Write = Callable[[Program, Path], None]
"""Writes the output directory of a program, unverified: what the shrunken check loads and compares."""


def check_shrunken(
    config: PreTrainedConfig,
    passes: Sequence[Pass],
    ranks: int = 1,
    *,
    plan: SequencePlan | None = None,
    write: Write | None = None,
    trust_remote_code: bool = False,
    progress: ProgressCall = silent,
) -> Verification:
    """Convert a shrunken copy of the model of `config` by `passes` for `ranks` tensor-parallel ranks and compare all.

    `plan` is how further ranks share the tokens of a sequence; the copy is given the same one, though another might be
    chosen for its sizes.

    Compared, in fp32: the replay of the trace at three lengths with the unmodified eager model; what the adapted
    checkpoint has to compute with that model (exact passes) or an independent reference (approximating ones), which
    itself must differ from the original; the simulated ranks, with exact sums, with that; and, given `write`, the
    emitted checkpoint with it and the sharded module on real ranks with the simulated ones, every message quantized
    where any are. Raises VerificationError for the first that differs, RewriterError when the model
    cannot be checked on a shrunken copy. Nothing stays behind.
    """
    result = Verification()
    count = depth(config)
    kept = representatives(config, [kind for p in passes for kind in p.kinds_of_layers(count)])
    mapped = [with_short_ends(small) for p in passes for small in p.shrunken(kept, count, plan)]
    mesh = {"tp": ranks, **({} if plan is None else {"sp": plan.ranks})}
    small = shrink(config, kept, ranks, exchanged=1 if plan is None else plan.grid[0])
    batches = [random_ids(small, length) for length in test_lengths(small)]
    with scratch_folder("shrunken") as scratch:
        model, traced, program = telling_copy(small, mapped, mesh, scratch / "model", trust_remote_code, progress)
        reference, single = reference_of(program, mapped), single_device(program)
        limit = exact_limit(traced)
        for ids in batches:
            wanted = original_logits(model, ids)
            result.require("trace = original model", simulate(traced, ids, host=model), wanted, limit)
        model = model_to_compare(program, model, result, batches, limit)
        for ids in batches if reference.reordered else ():
            name = "heads and channels reordered = original model"
            result.require(name, original_logits(reference.ordered(model), ids), original_logits(model, ids), limit)
        # On several ranks partial sums are added in another order.
        limit = limit if bound_ranks(program) is None else RANKS
        expected = [simulate(single, ids, host=model) for ids in batches]
        for ids, logits in zip(batches, expected, strict=True):
            result.require(f"rewritten = {reference.name}", logits, reference.logits(model, ids), limit)
        quantized: list[torch.Tensor] | None = None
        if ranks_of(mesh) > 1:
            progress(f"shrunken check: simulating {on_ranks(mesh)}")
            both = both_wirings(program)
            there = "1 device" if bound_ranks(program) is None else f"{ranks} ranks on 1 device"
            sums = ", with exact sums" if is_quantized(program) else ""
            for ids, logits in zip(batches, expected, strict=True):
                name = f"{on_ranks(mesh, 'simulated ')}{sums} = {there}"
                result.require(name, simulate(exact(both), ids, host=model), logits, RANKS)
            if is_quantized(program):
                quantized = [simulate(both, ids, host=model) for ids in batches]
        if write is not None:
            progress("shrunken check: emitting")
            out = scratch / "out"
            write(program, out)
            compare_emitted(result, out, mesh, batches, expected, quantized, limit=limit, progress=progress)
    return result


def compare_emitted(
    result: Verification,
    out: Path,
    mesh: Mapping[str, int],
    batches: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    quantized: Sequence[torch.Tensor] | None = None,
    *,
    limit: float = EXACT,
    within: float = QUANTIZED,
    prefix: str = "",
    progress: ProgressCall = silent,
) -> None:
    """Compare what a written directory computes, in other processes, with `expected`; adds to `result` or raises.

    `quantized` is what the sharded module has to compute where its sums are quantized, `within` the limit then.
    """
    ranks = ranks_of(mesh)
    sharded = (out / "runtime" / mesh_name(mesh) / "module.py").is_file()
    if sharded and ranks > MOST_RANKS:
        result.notes.append(f"{ranks} ranks are simulated only: more than {MOST_RANKS} processes are not started here")
        sharded = False
    progress("loading what was emitted")
    single, parallel = subprocess_logits.emitted_logits(out, ranks if sharded else None, batches)
    for logits, wanted in zip(single, expected, strict=True):
        result.require(f"{prefix}adapted checkpoint = rewritten", logits, wanted, limit)
    name = f"{prefix}sharded module on {on_ranks(mesh)}"
    if parallel and quantized is not None:
        result.require_quantized(f"{name}, quantized = simulated", parallel, quantized, expected, within)
        return
    for logits, wanted in zip(parallel, expected, strict=False):
        result.require(f"{name} = rewritten", logits, wanted, max(limit, RANKS))


def on_ranks(mesh: Mapping[str, int], what: str = "") -> str:
    """A mesh as text: 2 ranks; 8 ranks (sp=4 × tp=2)."""
    ranks = ranks_of(mesh)
    axes = f" (sp={mesh['sp']} × tp={mesh['tp']})" if mesh.get("sp", 1) > 1 and mesh["tp"] > 1 else ""
    return f"{ranks} {what}rank{'s' * (ranks > 1)}{axes}"


def test_lengths(config: PreTrainedConfig) -> list[int]:
    """The lengths to compare at: those that the model has positions for. Dynamic scaling is for more than it has."""
    if "dynamic" in rope_types(getattr(config.get_text_config(), "rope_parameters", None)):
        return list(LENGTHS)
    return [length for length in LENGTHS if length <= context_length(config.to_dict())]


def apply_passes(program: Program, passes: Sequence[Pass], mesh: Mapping[str, int]) -> Program:
    """`program` (as traced) after `passes`, on a mesh of ranks by axis."""
    if ranks_of(mesh) > 1:
        axes = {axis: mesh[axis] for axis in ("sp", "tp") if mesh.get(axis, 1) > 1}
        program = program.with_(mesh=axes, origin=program)
    for rewrite in passes:
        program = rewrite.apply(program)
    return program


def candidates(config: PreTrainedConfig, build: Callable[[float], PreTrainedModel]) -> Iterator[PreTrainedModel]:
    """Models of `config` as `build` makes them of a strength of their random weights, the likeliest to show a fault
    first."""
    for strength, steady in _STRENGTHS:
        model = build(strength)
        if not (steady and amplification(model, config, test_lengths(config)[-1]) > STEADY):
            yield model


def telling_copy(
    config: PreTrainedConfig,
    passes: Sequence[Pass],
    mesh: Mapping[str, int],
    directory: Path,
    trust_remote_code: bool,
    progress: ProgressCall,
) -> tuple[PreTrainedModel, Program, Program]:
    """(a random model, saved in `directory`, whose reference differs visibly from it; its trace; that rewritten)."""
    difference = 0.0
    program: Program | None = None

    def build(strength: float) -> PreTrainedModel:
        progress("shrunken check: building")
        return random_model(config, strength, trust_remote_code)

    for model in candidates(config, build):
        with contextlib.ExitStack() as after:
            if hf_logging.is_progress_bar_enabled():  # these files are no progress of the user's conversion
                hf_logging.disable_progress_bar()
                after.callback(hf_logging.enable_progress_bar)
            save_model(model, config, directory)
        if program is None:  # of every strength of weights the same
            progress("shrunken check: tracing")
            traced = trace(directory, trust_remote_code=trust_remote_code)
            program = apply_passes(traced, passes, mesh)
            reference = reference_of(program, passes)
        if reference.exact:
            return model, traced, program
        ids = random_ids(config, 21)
        same = padded_model(program) if program.source.padded else model
        difference = relative_error(reference.logits(same, ids), original_logits(same, ids))
        if difference >= DIFFERENT:
            return model, traced, program
    raise VerificationError(
        f"the shrunken check of model type {config.model_type!r} shows nothing: its rewritten form differs from the "
        f"original by {difference:.1e} only, {DIFFERENT:.0e} is needed to tell them apart. Use --verify full or none"
    )
