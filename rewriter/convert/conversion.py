"""From a checkpoint to a verified output directory: what `rewrite MODEL --recipe NAME` does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewriter.check.comparison import Verification
from rewriter.check.drift import golden_tokens, load_tokenizer, too_large
from rewriter.check.real_weights import RealWeights, compare_ranks
from rewriter.common.errors import RewriterError
from rewriter.common.garbage import collector_paused
from rewriter.common.run_context import ProgressCall, RunContext
from rewriter.common.tokenizer_code import own_code
from rewriter.convert.output_manifest import job_of, manifest_of, verified
from rewriter.convert.pass_measurements import calibrate
from rewriter.convert.preflight import check_free, check_place, check_shrunken_copy, require_room
from rewriter.convert.reopened import recorded_path
from rewriter.convert.replaced_files import remove_interrupted
from rewriter.convert.report import ConversionReport, communication, unused_note, verification_table
from rewriter.convert.reshard import reshard
from rewriter.convert.save_options import Level, SaveOptions
from rewriter.emit.card import model_card
from rewriter.emit.end_tokens import end_tokens
from rewriter.emit.files import output_files
from rewriter.emit.files.output_directory import OutputDirectory
from rewriter.emit.manifest import mesh_of
from rewriter.ir import Program
from rewriter.output.manifest import (
    GOLDEN,
    AdaptationEntry,
    Drift,
    Golden,
    Manifest,
    Padding,
    SourceEntry,
    read_manifest,
)
from rewriter.output.names import MANIFEST, mesh_name
from rewriter.passes.phases import single_device
from rewriter.passes.quantize_collectives import is_quantized
from rewriter.recipes.apply import apply_recipe, check_bound, load_recipe
from rewriter.weights.early_copies import EarlyCopies

if TYPE_CHECKING:
    from rewriter.recipes import Recipe

CARD = "README.md"


def convert(
    model: str | os.PathLike[str],
    recipe: str | os.PathLike[str] | Recipe,
    *,
    out: str | os.PathLike[str] | None = None,
    tp: int | Sequence[int] = 1,
    sp: int = 1,
    set: Mapping[str, Any] | None = None,
    options: SaveOptions = SaveOptions(),
    context: RunContext = RunContext(),
    early: EarlyCopies | None = None,
) -> ConversionReport:
    """Convert a Hugging Face checkpoint by a recipe.

    `tp` ranks share the heads and channels, `sp` ranks the tokens of a sequence. Of several numbers in `tp` each gets
    a runtime module, and all read one checkpoint; the recipe must not be bound to its ranks then. `out` defaults to
    MODEL-RECIPE[-spN][-tpN] in the current directory. Everything that can be refused without work is refused first,
    then the shrunken check runs, then files are written next to their final place and renamed; of the weights, what
    `early` copies meanwhile is taken. Raises RewriterError for bad input, VerificationError when the result does not
    compute what the recipe says; nothing is left then.
    """
    loaded = load_recipe(recipe, set)
    if not isinstance(tp, int) and not tp:
        raise RewriterError("tp: no number of ranks. Give one, or several, such as [2, 4]")
    tp, *others = [tp] if isinstance(tp, int) else dict.fromkeys(tp)
    passes = loaded.build()
    for degree in (tp, *others):
        check_bound(loaded, passes, degree, sp)
    for index, rewrite in enumerate(passes):
        if others and (more := rewrite.for_degrees((tp, *others))):
            loaded = loaded.with_options(index, more)
    if others and (options.materialize or any(p.scope == "per_rank" for p in passes)):
        why = "--materialize writes weights for one" if options.materialize else f"{loaded.name} is bound to its ranks"
        raise RewriterError(f"--tp {tp},{','.join(map(str, others))}: {why}. Convert once for each number of ranks")
    mesh = f"-sp{sp}" * (sp > 1) + f"-tp{tp}" * (tp > 1 and not others)
    place = Path(out) if out is not None else Path(f"{Path(model).resolve().name}-{loaded.name}{mesh}")
    if not options.resume:
        check_free(place, model)

    context.progress("tracing")
    with collector_paused():
        from rewriter.tracing import trace

        traced = trace(model, trust_remote_code=context.trust_remote_code)
    loaded = calibrate(loaded, traced, tp, options.text, context.progress)
    with collector_paused():
        program, skipped = apply_recipe(traced, loaded, tp, sp=sp)
        for degree in others:
            apply_recipe(traced, loaded, degree, sp=sp)  # refused before anything is written
    finished = (place / MANIFEST).is_file()  # by an earlier run that is resumed: it is never deleted
    report = save(program, place, os.fspath(model), options, context, skipped=skipped, early=early)
    if others and not options.dry_run:
        _add_degrees(report, place, others, options.verify, finished, context)
    return report


def _add_degrees(
    report: ConversionReport, place: Path, degrees: Sequence[int], verify: Level, finished: bool, context: RunContext
) -> None:
    """Add the modules that are not there yet; where one fails, nothing stays, unless it was `finished` before."""
    remove_interrupted(place)
    made = read_manifest(place)
    try:
        for degree in degrees:
            if mesh_name({**made.mesh, "tp": degree}) not in made.runtime:
                report.verification |= reshard(place, degree, verify=verify, context=context)
    except BaseException:
        if not finished:
            shutil.rmtree(place)
        raise
    report.files = sorted([*read_manifest(place).files, MANIFEST])


def save(
    program: Program,
    out: str | os.PathLike[str],
    name: str | None = None,
    options: SaveOptions = SaveOptions(),
    context: RunContext = RunContext(),
    *,
    skipped: Sequence[tuple[str, str]] = (),
    adaptation: AdaptationEntry | None = None,
    original: SourceEntry | None = None,
    padding: Padding | None = None,
    beside: Mapping[str, Path] | None = None,
    early: EarlyCopies | None = None,
) -> ConversionReport:
    """Verify a rewritten program and write its output directory. `name` is what the base model is called in the card,
    `skipped` names passes that were not applied, with reasons.

    `adaptation` says that the program's weights were trained after the rewrite, and how: their drift is then not
    measured, since the same weights under the original wiring are not the original, whose entry is `original`, and
    `padding` is what those weights hold of it. `beside`
    are further files to copy into the directory, by their names there. `early` may have begun to copy the weights.

    Raises RewriterError and VerificationError as `convert` does.
    """
    progress = context.progress
    if not program.history:
        raise RewriterError(f"{program!r} is the original model: rewrite it before saving")
    check_place(Path(out), program.source.path)
    layout = output_files.plan(program, options.dtype, options.materialize, options.dequantize, options.drop_unused)
    end_tokens(layout.checkpoint.directory, program.source.config)  # what is copied can be read
    if adaptation is None and own_code(layout.checkpoint.directory):
        load_tokenizer(str(layout.checkpoint.directory), program.source.remote_code)  # may be refused
    report = ConversionReport(
        model=output_files.public_name(program.source.path, name),
        recipe=str((program.recipe or {}).get("name", "passes")),
        out=os.fspath(out),
        mesh=mesh_of(program),
        passes=[
            {"name": e.name, "kind": e.kind, "summary": e.summary, "notes": list(e.notes)}
            | {"fired": e.fired, "routine": e.routine}
            for e in program.history
        ],
        communication=communication(program),
        files=sorted([*layout.names(), CARD, MANIFEST]),
        bytes=layout.nbytes(),
        notes=[
            *(f"{pass_name} was not applied: {reason}" for pass_name, reason in skipped),
            *unused_note(program, options.drop_unused),
        ],
        program=program,
    )
    if options.dry_run:
        report.dry_run = True
        check_free(Path(out))
        return report
    with OutputDirectory(out, options.resume, job_of(program, layout, options)) as output:
        if output.complete:
            report.notes.append("it was complete already; nothing was written")
            report.verification = verification_table(read_manifest(output.final).verification)
            return report
        if early is not None and not {source for source, _ in layout.copies}.issuperset(early.sources):
            early.stop()  # the output holds other weights
            early = None
        require_room(program, layout, output, options, early)
        verification = Verification() if options.verify == "none" else check_shrunken_copy(program, progress)
        hashes = output_files.write(layout, output, options.link, progress, early)
        manifest = manifest_of(program, layout, report.model, hashes, skipped, adaptation)
        manifest.unused = [] if options.drop_unused else sorted(program.source.unused)
        manifest.source.path = recorded_path(layout.checkpoint.directory, output.final)
        manifest.source, manifest.padding = original or manifest.source, padding or manifest.padding
        _write_checked(program, layout, output, options, verification, manifest, beside or {}, progress)
        report.files = sorted([*output.files])
    report.verification = verification_table(manifest.verification)
    return report


def _write_checked(
    program: Program,
    layout: output_files.PlannedFiles,
    output: OutputDirectory,
    options: SaveOptions,
    verification: Verification,
    manifest: Manifest,
    beside: Mapping[str, Path],
    progress: ProgressCall,
) -> None:
    """Check the real weights, and complete the manifest by what was compared; it is written last."""
    drift: Drift | None = None
    real = None if options.verify == "none" else _real_weights(program, layout, options, progress, verification)
    if real is not None:
        if options.verify == "full":
            real.compare(verification)
        drift = real.drift(verification, options.text) if manifest.adaptation is None else None
        output.write(GOLDEN, real.golden())
        manifest.golden = Golden(file=GOLDEN, tokens=golden_tokens(program).shape[1])
    for file, path in beside.items():
        if output.finished(file) is None:
            output.write(file, path.read_bytes())
    manifest.verification, manifest.files = verified(verification, options.verify, drift), output.hashes()
    if options.verify != "none":
        output.manifest(manifest.table())  # the sharded module is found through it
        if options.verify == "full" and real is not None:
            real.compare_emitted(verification, output.staging)
        else:
            del real  # its memory is needed
            compare_ranks(
                program, manifest.mesh, output.staging, verification, layout.target, layout.dequantized, progress
            )
        manifest.verification = verified(verification, options.verify, drift)
    assert program.source.path is not None
    output.write(CARD, model_card(manifest, Path(program.source.path)))
    manifest.files = output.hashes()
    output.manifest(manifest.table())


def _real_weights(
    program: Program,
    layout: output_files.PlannedFiles,
    options: SaveOptions,
    progress: ProgressCall,
    verification: Verification,
) -> RealWeights | None:
    """The real weights to check on; where they do not fit in memory, None and a note of it."""
    # as stored, rounded to the dtype, and as the ranks hold them, whose drift is measured where they quantize
    copies = 1 + (options.dtype is not None) + is_quantized(program)
    if reason := too_large(single_device(program), copies):
        verification.notes.append(reason)
        return None
    return RealWeights(program, layout, progress)
