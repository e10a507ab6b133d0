"""The manifest of an output, and what an interrupted run must agree on to be continued."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rewriter.check.comparison import Verification
from rewriter.convert.padding import padding_of
from rewriter.convert.save_options import SaveOptions
from rewriter.emit.files import output_files
from rewriter.emit.manifest import mesh_of, versions
from rewriter.ir import Program
from rewriter.ir.absolute_positions import position_table
from rewriter.output.manifest import (
    AdaptationEntry,
    Adapted,
    CheckEntry,
    Drift,
    Manifest,
    PassEntry,
    QuantizedEntry,
    SkippedPass,
    SourceEntry,
    Verified,
)
from rewriter.passes import installed


def manifest_of(
    program: Program,
    layout: output_files.PlannedFiles,
    name: str,
    hashes: Mapping[str, str],
    skipped: Sequence[tuple[str, str]] = (),
    adaptation: AdaptationEntry | None = None,
) -> Manifest:
    """The manifest of what was planned, before anything was verified. `name`: of the base model; `hashes`: of its
    files."""
    recipe = program.recipe or {"name": "passes", "passes": [{"pass": e.name, **e.options} for e in program.history]}
    return Manifest(
        versions=versions(),
        recipe=json.loads(json.dumps(dict(recipe), default=list)),
        passes=[
            PassEntry(name=e.name, kind=e.kind, options=plain(e.options), summary=e.summary, notes=list(e.notes))
            for e in program.history
        ],
        skipped=[SkippedPass(name=n, reason=reason) for n, reason in skipped],
        mesh=mesh_of(program),
        runtime=dict(layout.runtime),
        source=SourceEntry(
            name=name,
            model_type=program.source.model_type,
            architecture=program.source.architecture,
            files=dict(hashes),
        ),
        adapted=Adapted(model_type=layout.model_type, modeling=layout.modeling),
        per_rank=layout.per_rank,
        quantized=_quantized(program),
        verification=Verified(level="none"),
        positions=position_table(program),
        adaptation=adaptation,
        padding=padding_of(program),
        packages=_packages(program),
        files={},
    )


def verified(verification: Verification, level: str, drift: Drift | None = None) -> Verified:
    """The checks that were made, as the manifest keeps them."""
    checks = [CheckEntry(name=c.name, error=c.error, limit=c.limit) for c in verification.checks]
    return Verified(level=level, checks=checks, drift=drift, notes=list(verification.notes))


def job_of(program: Program, layout: output_files.PlannedFiles, options: SaveOptions) -> dict[str, Any]:
    """Values that must be equal for an interrupted run to be continued. No paths: it is kept in the manifest."""
    return {
        "checkpoint": layout.checkpoint.fingerprint(),
        "passes": [[e.name, plain(e.options)] for e in program.history],
        "packages": _packages(program),
        "mesh": mesh_of(program),
        "dtype": options.dtype,
        "materialize": options.materialize,
        "dequantize": options.dequantize,
        "drop_unused": options.drop_unused,
        "verify": options.verify,
        "text": options.text,
        "versions": versions(),
        "emitted code": hashlib.sha256(json.dumps(dict(layout.texts)).encode()).hexdigest(),
    }


def _packages(program: Program) -> dict[str, str]:
    """The packages of the passes that `rewriter` does not ship, by pass; also of those that were left out."""
    modules = {entry.name: type(entry.rewrite).__module__ for entry in program.history}
    asked = [spec["pass"] for spec in (program.recipe or {"passes": ()})["passes"]]
    names = dict.fromkeys((*modules, *asked))
    return {name: package for name in names if (package := installed.requirement(name, modules.get(name)))}


def _quantized(program: Program) -> QuantizedEntry | None:
    from rewriter.ir.communication import collectives, quantized

    traffic = quantized(collectives(program))
    return None if traffic is None else QuantizedEntry(**asdict(traffic))


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(options), default=list))
    return plain
