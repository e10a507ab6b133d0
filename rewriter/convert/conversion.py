"""From a checkpoint to a verified output directory: what `rewrite MODEL --recipe NAME` does."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rewriter.analysis.sequence_layout import bytes_per_token, sequence_plan
from rewriter.common.errors import RewriterError
from rewriter.common.garbage import collector_paused
from rewriter.convert.pass_measurements import calibrate
from rewriter.emit import output_files
from rewriter.emit.card import model_card
from rewriter.emit.manifest import (
    AdaptationEntry,
    Adapted,
    CheckEntry,
    Drift,
    Golden,
    Manifest,
    PassEntry,
    QuantizedEntry,
    SkippedPass,
    SourceEntry,
    Verified,
    mesh_of,
    versions,
)
from rewriter.emit.output_directory import MANIFEST, OutputDirectory
from rewriter.ir import Program
from rewriter.passes.base import single_device
from rewriter.passes.quantize_collectives import is_quantized
from rewriter.recipes.apply import apply_recipe, check_bound, load_recipe
from rewriter.verify.comparison import Verification
from rewriter.verify.drift import golden_tokens, too_large
from rewriter.verify.real_weights import RealWeights

if TYPE_CHECKING:
    from rewriter.recipes import Recipe

Level = Literal["none", "shrunken", "full"]
Progress = Callable[..., None]
GOLDEN = "golden.safetensors"
CARD = "README.md"


def _silent(*_: Any) -> None:
    pass


@dataclass
class Report:
    """What a conversion did, or with `dry_run` would do. `to_json()` is what `--json` prints."""

    model: str
    recipe: str
    out: str
    mesh: Mapping[str, int]
    passes: list[dict[str, Any]]
    verification: dict[str, Any] = field(default_factory=dict)
    communication: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def convert(
    model: str | os.PathLike[str],
    recipe: str | os.PathLike[str] | Recipe,
    *,
    out: str | os.PathLike[str] | None = None,
    tp: int = 1,
    sp: int = 1,
    dtype: str | None = None,
    verify: Level = "shrunken",
    dry_run: bool = False,
    resume: bool = False,
    link: bool = False,
    trust_remote_code: bool = False,
    set: Mapping[str, Any] | None = None,
    text: str | None = None,
    progress: Progress = _silent,
) -> Report:
    """Convert a Hugging Face checkpoint by a recipe; see `rewrite MODEL --help` for the options.

    `tp` ranks share the heads and channels, `sp` ranks the tokens of a sequence. `out` defaults to
    MODEL-RECIPE[-spN][-tpN] in the current directory; `text` replaces the packaged calibration text. Everything that
    can be refused without work is refused first, then the rehearsal runs, then files are written beside their final
    place and renamed. Raises RewriterError for bad input, VerificationError when the result does not compute what the
    recipe says; nothing is left then.
    """
    loaded = load_recipe(recipe, set)
    check_bound(loaded, loaded.build(), tp, sp)
    check_options(dtype, verify, link)
    mesh = f"-sp{sp}" * (sp > 1) + f"-tp{tp}" * (tp > 1)
    place = Path(out) if out is not None else Path(f"{Path(model).resolve().name}-{loaded.name}{mesh}")
    if not resume:
        check_free(place)

    progress("tracing")
    with collector_paused():
        from rewriter.tracing import trace

        traced = trace(model, trust_remote_code=trust_remote_code)
    loaded = calibrate(loaded, traced, tp, text, progress)
    with collector_paused():
        program, skipped = apply_recipe(traced, loaded, tp, sp=sp)
    return save(
        program,
        place,
        name=os.fspath(model),
        skipped=skipped,
        dtype=dtype,
        verify=verify,
        dry_run=dry_run,
        resume=resume,
        link=link,
        text=text,
        progress=progress,
    )


def save(
    program: Program,
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    skipped: Sequence[tuple[str, str]] = (),
    dtype: str | None = None,
    verify: Level = "shrunken",
    dry_run: bool = False,
    resume: bool = False,
    link: bool = False,
    text: str | None = None,
    progress: Progress = _silent,
    adaptation: AdaptationEntry | None = None,
    beside: Mapping[str, Path] | None = None,
) -> Report:
    """Verify a rewritten program and write its output directory. `name` is what the base model is called in the card.

    `adaptation` says that the program's weights were trained after the rewrite, and how: their drift is then not
    measured, since the same weights under the original wiring are not the original. `beside` are further files to copy
    into the directory, by their names there.

    Raises RewriterError and VerificationError as `convert` does.
    """
    check_options(dtype, verify, link)
    if not program.history:
        raise RewriterError(f"{program!r} is the original model: rewrite it before saving")
    layout = output_files.plan(program, dtype)
    report = Report(
        model=output_files.public_name(program.source.path, name),
        recipe=str((program.recipe or {}).get("name", "passes")),
        out=os.fspath(out),
        mesh=mesh_of(program),
        passes=[
            {"name": e.name, "kind": e.kind, "summary": e.summary, "notes": list(e.notes)} for e in program.history
        ],
        communication=communication(program),
        files=sorted([*layout.names(), CARD, MANIFEST]),
        bytes=layout.nbytes(),
        notes=[f"{pass_name} was not applied: {reason}" for pass_name, reason in skipped],
    )
    if dry_run:
        check_free(Path(out))
        return report
    job = _job(program, layout, dtype, verify, text)
    with OutputDirectory(out, resume, job) as output:
        if output.complete:
            report.notes.append("it was complete already; nothing was written")
            report.verification = _finished_verification(output.final)
            return report
        output.require_space(layout.nbytes())
        found = Verification()
        measured: Drift | None = None
        if verify != "none":
            found = _rehearse(program, dtype, progress)
        hashes = output_files.write(layout, output, link, progress)
        golden: Golden | None = None
        real: RealWeights | None = None
        if verify != "none":
            # as stored, rounded to the dtype, and as the ranks hold them, whose drift is measured where they quantize
            copies = 1 + (dtype is not None) + is_quantized(program)
            if reason := too_large(single_device(program), copies):
                found.notes.append(reason)
            else:
                real = RealWeights(program, dtype, progress)
                if verify == "full":
                    real.compare(found)
                measured = real.drift(found, text) if adaptation is None else None
                output.write(GOLDEN, real.golden())
                golden = Golden(file=GOLDEN, tokens=golden_tokens(program).shape[1])

        for file, path in (beside or {}).items():
            if output.finished(file) is None:
                output.write(file, path.read_bytes())

        def manifest_now() -> Manifest:
            made = _manifest(program, layout, output, report, skipped, hashes, found, measured, verify, golden)
            return made.model_copy(update={"adaptation": adaptation})

        if verify == "full" and real is not None:
            output.manifest(manifest_now().table())  # the sharded module is found through it
            real.compare_emitted(found, output.staging)
        output.write(CARD, model_card(manifest_now(), layout.checkpoint.directory))
        manifest = manifest_now()
        output.manifest(manifest.table())
        report.files = sorted([*output.files])
    report.verification = verification_table(manifest.verification)
    return report


def check_options(dtype: str | None, verify: str, link: bool) -> None:
    """Refuse options that do not exist or contradict each other."""
    if dtype is not None and dtype not in output_files.DTYPES:
        raise RewriterError(
            f"dtype {dtype!r}: expected {', '.join(output_files.DTYPES)}, or none to keep what is stored."
        )
    if verify not in ("none", "shrunken", "full"):
        raise RewriterError(f"verify {verify!r}: expected none, shrunken or full.")
    if link and dtype is not None:
        raise RewriterError("--link with --dtype: converted files differ from the source's, so they cannot be links.")


def check_free(out: Path) -> None:
    """Refuse a place that is taken, before any work is done. `OutputDirectory` decides; this only asks early."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if os.path.lexists(out) and not (out.is_symlink() and not out.exists()):
        ours = (out / MANIFEST).is_file()
        what = (
            "already holds an output of rewriter"
            if ours
            else "exists, and is not an output of rewriter: it is not touched"
        )
        raise RewriterError(f"{out}: {what}. Choose another --out, or delete it yourself.")


def communication(program: Program) -> dict[str, Any]:
    """Collectives of a forward pass as `rewrite inspect` counts them; empty where nothing is communicated.

    Where tokens are sharded also what attention sends, forward and backward: bytes of a rank for each token that it
    holds, in all layers together.
    """
    from rewriter.analysis.communication import by_place, collectives, quantized, summary

    found = collectives(program)
    if not found:
        return {}
    total, places, travel = summary(found), by_place(found), quantized(found)
    blocks = places.get("block")
    return {
        "block reductions": blocks.collectives if blocks else 0,
        "hidden behind computation": blocks.hidden if blocks else 0,
        "other collectives": total.collectives - (blocks.collectives if blocks else 0),
        "bytes per token": total.bytes_per_token,
        **({} if travel is None else {"quantized reductions": asdict(travel)}),
        **{
            f"attention {when}": {"bytes per token of a rank": sum(sizes.values()), **sizes}
            for when, sizes in bytes_per_token(program).items()
        },
    }


def verification_table(verified: Verified) -> dict[str, Any]:
    """Names and values for the terminal and for `--json`."""
    table: dict[str, Any] = {check.name: check.error for check in verified.checks}
    if verified.drift is not None:
        table["drift"] = verified.drift.model_dump()
    for index, note in enumerate(verified.notes, start=1):
        table[f"note {index}" if len(verified.notes) > 1 else "note"] = note
    return table


def _rehearse(program: Program, dtype: str | None, progress: Progress) -> Verification:
    from rewriter.tracing.meta_model import load_config
    from rewriter.verify.shrunken_check import rehearse

    passes = [entry.rewrite for entry in program.history]
    assert program.source.path is not None
    config = load_config(program.source.path, program.source.remote_code)

    def write(small: Program, out: Path) -> None:
        layout = output_files.plan(small)
        with OutputDirectory(out, job={"rehearsal": True}) as output:
            hashes = output_files.write(layout, output)
            report = Report(output_files.public_name(None), "rehearsal", str(out), {}, [])
            manifest = _manifest(small, layout, output, report, (), hashes, Verification(), None, "none")
            output.manifest(manifest.table())

    return rehearse(
        config,
        passes,
        program.mesh.get("tp", 1),
        plan=sequence_plan(program),
        write=write,
        trust_remote_code=program.source.remote_code,
        progress=progress,
    )


def _manifest(
    program: Program,
    layout: output_files.PlannedFiles,
    output: OutputDirectory,
    report: Report,
    skipped: Sequence[tuple[str, str]],
    hashes: Mapping[str, str],
    found: Verification,
    measured: Drift | None,
    level: str,
    golden: Golden | None = None,
) -> Manifest:
    recipe = program.recipe or {"name": "passes", "passes": [{"pass": e.name, **e.options} for e in program.history]}
    return Manifest(
        versions=versions(),
        recipe=json.loads(json.dumps(dict(recipe), default=list)),
        passes=[
            PassEntry(name=e.name, kind=e.kind, options=_plain(e.options), summary=e.summary, notes=list(e.notes))
            for e in program.history
        ],
        skipped=[SkippedPass(name=n, reason=reason) for n, reason in skipped],
        mesh=mesh_of(program),
        runtime=dict(layout.runtime),
        source=SourceEntry(
            name=report.model,
            model_type=program.source.model_type,
            architecture=program.source.architecture,
            files=dict(hashes),
        ),
        adapted=Adapted(model_type=layout.model_type, modeling=layout.modeling),
        per_rank=layout.per_rank,
        quantized=_quantized(program),
        verification=Verified(
            level=level,
            checks=[CheckEntry(name=c.name, error=c.error, limit=c.limit) for c in found.checks],
            drift=measured,
            notes=list(found.notes),
        ),
        golden=golden,
        files={name: digest for name, (_, digest) in sorted(output.files.items()) if name != MANIFEST},
    )


def _quantized(program: Program) -> QuantizedEntry | None:
    from rewriter.analysis.communication import collectives, quantized

    found = quantized(collectives(program))
    return None if found is None else QuantizedEntry(**asdict(found))


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(options), default=list))
    return plain


def _job(
    program: Program, layout: output_files.PlannedFiles, dtype: str | None, verify: str, text: str | None
) -> dict[str, Any]:
    """What must be equal for an interrupted run to be continued. No paths: it is kept in the manifest."""
    return {
        "checkpoint": layout.checkpoint.fingerprint(),
        "passes": [[e.name, _plain(e.options)] for e in program.history],
        "mesh": mesh_of(program),
        "dtype": dtype,
        "verify": verify,
        "text": text,
        "versions": versions(),
        "emitted code": hashlib.sha256(json.dumps(dict(layout.texts)).encode()).hexdigest(),
    }


def _finished_verification(final: Path) -> dict[str, Any]:
    from rewriter.emit.manifest import read_manifest

    return verification_table(read_manifest(final).verification)
