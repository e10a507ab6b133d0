"""Files of an output directory but its manifest: planned from a program, then written in one pass."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rewriter.common.errors import RewriterError
from rewriter.common.run_context import ProgressCall, silent
from rewriter.common.tokenizer_code import code_files, vocabulary_files
from rewriter.emit.files.kept_tensors import KeptTensors, kept_tensors
from rewriter.emit.files.output_directory import OutputDirectory, sha256_of
from rewriter.emit.files.weights import cast_dtypes, changed_tensors, untied_tensors, weight_references, written_dtypes
from rewriter.emit.manifest import mesh_of
from rewriter.emit.wiring_config import quantized_config, sentences
from rewriter.ir import Program
from rewriter.output.manifest import FileHeader, PerRank, Runtime, SequenceEntry
from rewriter.output.names import mesh_name
from rewriter.passes.base import bound_ranks
from rewriter.passes.phases import single_device
from rewriter.passes.sequence.sequence_plans import sequence_plan
from rewriter.weights import Checkpoint, ShardPlan, convert_files, plan_bytes
from rewriter.weights.checkpoint import INDEX, torch_dtype
from rewriter.weights.early_copies import EarlyCopies
from rewriter.weights.expressions import Expression, Reference, Tensor, evaluate
from rewriter.weights.finite import Watched, watched
from rewriter.weights.header import read_header
from rewriter.weights.references import references_text

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BESIDE_WEIGHTS = (
    "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*processor_config.json", "spiece.model", "sentencepiece*.model", "*.tiktoken",
    "LICENSE*", "NOTICE*",
)  # fmt: skip
CHAT_TEMPLATES = "additional_chat_templates"  # a folder of them, besides chat_template.jinja


@dataclass(frozen=True)
class PlannedFiles:
    """The files to write: `copies` (source, name), `shards` (name → tensors), `texts` (name → content), and
    `references` (name → what ranks hold of the adapted checkpoint's tensors). `kept` are the source's tensors, and
    `written` the dtypes that they are written in, as safetensors calls them; `target` is the one that was asked for.
    `watched`: what must be finite."""

    checkpoint: Checkpoint
    copies: tuple[tuple[Path, str], ...]
    shards: Mapping[str, Mapping[str, tuple[Expression, torch.dtype | None]]]
    metadata: Mapping[str, Mapping[str, str]]
    texts: Mapping[str, str]
    modeling: str | None
    model_type: str
    runtime: Mapping[str, Runtime] = field(default_factory=dict)
    references: Mapping[str, Mapping[str, Reference]] = field(default_factory=dict)
    per_rank: PerRank | None = None
    kept: KeptTensors | None = None
    written: Mapping[str, str] = field(default_factory=dict)
    target: torch.dtype | None = None
    watched: Watched = field(default_factory=dict)

    @property
    def dequantized(self) -> torch.dtype | None:
        """The dtype of what the source stores quantized and the output does not, unless `target` is that of all."""
        quantized = None if self.kept is None or self.target is not None else self.kept.dequantized
        return None if quantized is None else torch_dtype(quantized.dtype, "its weights")

    def held(self, expression: Expression) -> torch.Tensor:
        """The value of an expression over the source, fp32, with the precision in which the output holds it."""
        assert self.kept is not None
        tensors = self.kept.tensors

        def read(name: str) -> torch.Tensor:
            return self.checkpoint.evaluate(tensors[name]).to(torch_dtype(self.written[name], name))

        return evaluate(self.kept.named(expression), read).to(torch.float32)

    def names(self) -> list[str]:
        """Every file, sorted."""
        return sorted([*(name for _, name in self.copies), *self.shards, *self.texts, *self.references])

    def nbytes(self, written: Collection[str] = (), shared: bool = False) -> int:
        """Bytes to write, without files that are `written`, and without copies if the source `shared` its blocks."""
        plans = [ShardPlan(Path(name), tensors) for name, tensors in self.shards.items() if name not in written]
        copies = [source for source, name in self.copies if name not in written and not shared]
        copied = sum(source.stat().st_size for source in copies)
        texts = sum(len(text.encode()) for name, text in self.texts.items() if name not in written)
        return copied + plan_bytes(self.checkpoint, plans) + texts


def plan(
    program: Program,
    dtype: str | None = None,
    materialize: bool = False,
    dequantize: bool = False,
    drop_unused: bool = False,
) -> PlannedFiles:
    """The files of a program's output directory; reads headers only.

    `dtype` (bf16, fp16, fp32) converts floating-point weights. Ranks read ranges of the adapted checkpoint, or with
    `materialize` files that hold what each of them needs. Quantized weights stay as they are stored, unless
    `dequantize` writes what they stand for; `drop_unused` leaves out tensors that the model does not use. Raises
    RewriterError for a program without a checkpoint, one that can only be timed, and everything that the emitters
    refuse.
    """
    from rewriter.emit.huggingface import emit_huggingface

    if program.source.path is None:
        raise RewriterError("this program was traced from a config and has no weights: trace a checkpoint to write one")
    timing = [entry.name for entry in program.history if entry.kind == "timing only"]
    if timing:
        raise RewriterError(
            f"{timing[0]} is for timing only: what it computes is meaningless, so no checkpoint is written from it. "
            "Benchmark it instead"
        )
    source = Path(program.source.path)
    checkpoint = Checkpoint.open(source)
    target = DTYPES[dtype] if dtype is not None else None
    read = watched(checkpoint, (spec.expression for spec in program.parameters.values()))
    kept = kept_tensors(program, checkpoint, dequantize, _kept_quantized(dtype, materialize), drop_unused)
    program = kept.program
    written = written_dtypes(program, kept, target)
    single = single_device(program)
    emitted, changed = emit_huggingface(single), changed_tensors(single, kept.shapes)
    config = kept.config(emitted.config)
    config |= quantized_config(program, config)
    if target is not None:
        config["dtype"] = str(target).removeprefix("torch.")
    texts = {"config.json": _json(config)}
    if emitted.modeling_name is not None and emitted.modeling is not None:
        texts[emitted.modeling_name] = emitted.modeling
    copies: list[tuple[Path, str]] = []
    shards: dict[str, dict[str, tuple[Expression, torch.dtype | None]]] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    for file, names in kept.files().items():
        name = file.relative_to(checkpoint.directory).as_posix()
        inside = {n: kept.stored(changed.get(n, Tensor(n))) for n in names}
        whole = len(names) == len(checkpoint.headers[file].tensors)
        if target is None and whole and all(expression == Tensor(n) for n, expression in inside.items()):
            copies.append((file, name))
        else:
            shards[name] = {n: (e, None if target is None else torch_dtype(written[n], n)) for n, e in inside.items()}
            metadata[name] = checkpoint.metadata[file]
    texts[INDEX] = _index(checkpoint, source, kept.files(), shards)
    copies += [(path, name) for path, name in _beside_weights(source) if name not in texts]
    mesh, entry, module = runtime_module(program)
    texts[entry.module] = module
    references: dict[str, Mapping[str, Reference]] = {}
    casts = cast_dtypes(program, checkpoint, written, config)
    if materialize:
        entry.weights, folder = None, f"runtime/{mesh}"
        entry.ranks = [f"{folder}/rank-{rank}.tensors" for rank in range(program.mesh.get("tp", 1))]
        for rank, name in enumerate(entry.ranks):
            shards[name] = {
                parameter: (
                    kept.stored(spec.on_rank(rank)),
                    torch_dtype(casts.get(parameter) or next(iter(spec.on_rank(rank).dtypes(written))), parameter),
                )
                for parameter, spec in program.parameters.items()
            }
            metadata[name] = {"format": "pt", "rank": str(rank), "mesh": mesh}
    else:
        assert entry.weights is not None
        references[entry.weights] = weight_references(program, changed, kept.shapes, casts)
    per_rank = None
    if (bound := bound_ranks(program)) is not None:
        untied = untied_tensors(changed)
        per_rank = PerRank(ranks=bound, pattern=config["rewriter_pattern"], modes=sentences(program), untied=untied)
    return PlannedFiles(
        checkpoint, tuple(copies), shards, metadata, texts, emitted.modeling_name, emitted.model_type,
        {mesh: entry}, references, per_rank, kept, written, target, read,
    )  # fmt: skip


def runtime_module(program: Program) -> tuple[str, Runtime, str]:
    """(the mesh's name, its part of the manifest, the text of its module), for ranks that read the checkpoint."""
    from rewriter.emit.module import emit_runtime_module

    mesh, plan = mesh_name(mesh_of(program)), sequence_plan(program)
    sequence = None if plan is None else SequenceEntry(**asdict(plan))
    module, weights = f"runtime/{mesh}/module.py", f"runtime/{mesh}/weights.json"
    entry = Runtime(module=module, class_name="Model", weights=weights, sequence=sequence)
    return mesh, entry, emit_runtime_module(program)


def write(
    layout: PlannedFiles,
    output: OutputDirectory,
    link: bool = False,
    progress: ProgressCall = silent,
    early: EarlyCopies | None = None,
) -> dict[str, str]:
    """Write everything but manifest and card; returns the sha256 of the source's weight files by name.

    Files that an interrupted run finished are kept, and those that `early` copies are taken from there. Raises
    RewriterError and OSError as `convert_files` does.
    """
    for name, text in layout.texts.items():
        if output.finished(name) is None:
            output.write(name, text)
    copies = [(source, output.path(name)) for source, name in layout.copies if output.finished(name) is None]
    plans = [
        ShardPlan(output.path(name), tensors, layout.metadata[name])
        for name, tensors in layout.shards.items()
        if output.finished(name) is None
    ]
    total, done = len(copies) + len(plans), 0

    def finished(path: Path, sha256: str) -> None:
        nonlocal done
        done += 1
        output.record(path, sha256)
        progress("weights", done, total)

    progress("weights", 0, total)
    convert_files(layout.checkpoint, copies, plans, link=link, early=early, watched=layout.watched, finished=finished)
    for entry in layout.runtime.values():
        headers = {name: read_header(output.path(name)) for name in entry.ranks or ()}
        entry.headers = {name: FileHeader(size=h.size, header=h.sha256) for name, h in headers.items()} or None
    if layout.references:
        adapted = Checkpoint.open(output.staging)
        for name, references in layout.references.items():
            output.write(name, references_text(references, adapted))
    hashes: dict[str, str] = {}
    copied = dict(layout.copies)
    for file in layout.checkpoint.files:
        name = file.relative_to(layout.checkpoint.directory).as_posix()
        known = output.finished(copied[file]) if file in copied else None
        hashes[name] = known or sha256_of(file)
    return hashes


def _kept_quantized(dtype: str | None, materialize: bool) -> str | None:
    """The option that cannot be applied to weights that stay quantized, with the reason; None where there is none."""
    if dtype is not None:
        return f"--dtype {dtype} would round their scales"
    return "--materialize writes what ranks compute with, which is not quantized" if materialize else None


def _beside_weights(source: Path) -> Iterator[tuple[Path, str]]:
    """The files of a checkpoint that are copied as they are, with their names: tokenizer, chat templates, licences.

    Raises RewriterError for something else in the place of one, such as a folder or a link that leads nowhere.
    """
    of_code = {*code_files(source), *vocabulary_files(source)}
    for path in sorted(source.iterdir()):
        if path not in of_code and not any(fnmatch.fnmatch(path.name, pattern) for pattern in _BESIDE_WEIGHTS):
            continue
        if path.is_file():
            yield path, path.name
        elif path.suffix:
            try:
                path.stat()
                wrong = "not a regular file"
            except OSError as error:
                wrong = f"cannot be read: {error.strerror}"
            raise RewriterError(f"{path}: {wrong}. Put the model's own there, or remove it")
    for path in sorted((source / CHAT_TEMPLATES).glob("*.jinja")):
        yield path, f"{CHAT_TEMPLATES}/{path.name}"


def _index(
    checkpoint: Checkpoint,
    source: Path,
    files: Mapping[Path, Sequence[str]],
    shards: Mapping[str, Mapping[str, tuple[Expression, torch.dtype | None]]],
) -> str:
    """The index of the adapted checkpoint, of a single file too: by it engines know which files are the model's."""
    names = {file: file.relative_to(checkpoint.directory).as_posix() for file in files}
    weight_map = {n: names[file] for file, inside in files.items() for n in inside}
    said = checkpoint.index or {}
    alike = said.get("weight_map") == weight_map and isinstance(said.get("metadata"), dict)
    if alike and not any(name in shards for name in names.values()):
        return (source / INDEX).read_text(encoding="utf-8")
    total = sum(checkpoint.tensors[n].nbytes for f, inside in files.items() if names[f] not in shards for n in inside)
    total += plan_bytes(checkpoint, [ShardPlan(Path(n), shards[n]) for n in names.values() if n in shards])
    return _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def public_name(path: str | None, given: str | None = None) -> str:
    """The name of a model in what is published: a hub id, or the bare name of its directory, never a path."""
    for name in (given, path):
        if name is None:
            continue
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() and not name.startswith("."):
            return name
        return Path(name).resolve().name
    return "model"
