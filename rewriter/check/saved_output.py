"""`rewrite verify DIR`: does a written output still compute what its manifest says?"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.files import check_sha256, read_json
from rewriter.common.run_context import ProgressCall, RunContext, silent
from rewriter.output.manifest import Manifest, read_manifest
from rewriter.output.names import ranks_of
from rewriter.weights import references
from rewriter.weights.expressions import Expression, Tensor


def verify(directory: str | os.PathLike[str], context: RunContext = RunContext()) -> dict[str, Any]:
    """Check a written output again; returns names and figures of what held.

    Every file's sha256, and that weights are finite; then, where the manifest has golden logits and memory allows, the
    adapted checkpoint's and the sharded module's logits for the same tokens, the latter on as many real ranks as the
    manifest names. What is not run is reported with the reason. Raises VerificationError for the first that differs,
    RewriterError for no such output.
    """
    root = Path(directory)
    manifest = read_manifest(root)
    check_files(root, manifest, progress=context.progress)
    check_weights(root, manifest)
    return {
        "files with the hash of the manifest": len(manifest.files),
        **golden_figures(root, manifest, context.progress),
    }


def golden_figures(root: Path, manifest: Manifest, progress: ProgressCall) -> dict[str, Any]:
    """The golden logits computed again, where there are some and memory allows: names and figures of what held, and in
    words what was not run. Raises VerificationError for the first that differs."""
    table: dict[str, Any] = {}
    if manifest.golden is None:
        return {"golden logits": "none were stored when this was written"}
    from safetensors.torch import load_file

    from rewriter.check import subprocess_logits
    from rewriter.check.comparison import QUANTIZED_REAL_WEIGHTS, REAL_WEIGHTS, Verification
    from rewriter.check.drift import memory_shortage
    from rewriter.check.shrunken_check import MOST_RANKS
    from rewriter.weights import Checkpoint
    from rewriter.weights.quantized_tensors import quantized_weights

    checkpoint = Checkpoint.open(root)
    quantized = quantized_weights(checkpoint, config_of(root))
    tensors: Iterable[Expression] = map(Tensor, checkpoint.tensors) if quantized is None else quantized.tensors.values()
    elements = sum(math.prod(tensor.shape(checkpoint.shapes)) for tensor in tensors)
    if shortage := memory_shortage(elements):
        table["golden logits"] = f"not computed again: in fp32 the weights take {shortage}"
        return table
    golden = load_file(root / manifest.golden.file)
    result = Verification()
    ranks = ranks_of(manifest.mesh)
    sharded = bool(manifest.runtime) and ranks <= MOST_RANKS
    if manifest.runtime and not sharded:
        table["sharded module"] = f"not run: {ranks} ranks, more than {MOST_RANKS} are not started on one machine"
    progress("computing the golden logits")
    single, parallel = subprocess_logits.emitted_logits(root, ranks if sharded else None, [golden["input_ids"]])
    result.require("adapted checkpoint = golden logits", single[0][0, -1], golden["logits"], REAL_WEIGHTS)
    name = f"sharded module on {ranks} rank{'s' * (ranks > 1)} = golden logits"
    if parallel and "sharded_logits" in golden:
        last, expected, exact = parallel[0][0, -1:], golden["sharded_logits"][None], golden["logits"][None]
        result.require_quantized(f"{name}, quantized", [last], [expected], [exact], QUANTIZED_REAL_WEIGHTS)
    elif parallel:
        result.require(name, parallel[0][0, -1], golden["logits"], REAL_WEIGHTS)
    return table | result.figures() | ({"note": "; ".join(result.notes)} if result.notes else {})


def check_files(
    root: Path, manifest: Manifest, names: Iterable[str] | None = None, progress: ProgressCall = silent
) -> None:
    """Compare the sha256 of files (default: all) with the manifest. Raises VerificationError where one differs."""
    chosen = list(manifest.files if names is None else names)
    for done, name in enumerate(chosen):
        progress("hashing", done, len(chosen))
        if name not in manifest.files:
            raise VerificationError(f"{root}: its manifest does not list {name}, so what it holds cannot be trusted")
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise RewriterError(
                f"{root}: its manifest names {name!r}, outside the directory. `rewrite` did not write it so."
            )
        check_sha256(root / name, manifest.files[name])


def check_weights(root: Path, manifest: Manifest) -> None:
    """Read the weights of an output once. Raises VerificationError for one that is not finite, among those that its
    ranks read, or all where ranks have files of their own."""
    from rewriter.weights import Checkpoint
    from rewriter.weights.finite import check_finite, watched

    checkpoint = Checkpoint.open(root)
    references_file = next((entry.weights for entry in manifest.runtime.values() if entry.weights is not None), None)
    read: Iterable[Expression] = map(Tensor, checkpoint.tensors)
    if references_file is not None:
        read = references.RankWeights.open(root, root / references_file, 0).parameters.values()
    try:
        check_finite(checkpoint, watched(checkpoint, read))
    except RewriterError as error:
        raise VerificationError(str(error)) from error


def check_headers(root: Path, manifest: Manifest) -> None:
    """Compare sizes and headers of the checkpoint with what a rank's references say of them, if there are any.

    It costs nothing next to a load, and finds a checkpoint that was replaced by another layout. Raises RewriterError
    for one that was, VerificationError where the references changed.
    """
    references_file = next((entry.weights for entry in manifest.runtime.values() if entry.weights is not None), None)
    if references_file is not None:
        check_files(root, manifest, [references_file])
        references.check_headers(root, root / references_file)


def check_read_by_transformers(root: Path) -> None:
    """Raise RewriterError where transformers on this machine takes a directory's weights for other numbers."""
    import torch

    from rewriter.weights import Checkpoint
    from rewriter.weights.quantized_tensors import read_otherwise

    why = read_otherwise(Checkpoint.open(root), config_of(root), torch.cuda.is_available())
    if why is not None:
        raise RewriterError(f"{root}: {why}. Start this program with torchrun, or rewrite the model with --dequantize")


def config_of(root: Path) -> dict[str, Any]:
    """config.json of an output directory."""
    return read_json(root / "config.json", "Rewrite the model again.")
