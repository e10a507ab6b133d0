"""Computed from the real weights, never from a shrunken copy: equality (`--verify full`), drift, golden logits."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rewriter.check import subprocess_logits
from rewriter.check.asked_passes import asked_passes
from rewriter.check.comparison import QUANTIZED_REAL_WEIGHTS, REAL_WEIGHTS, Verification
from rewriter.check.drift import (
    calibration_tokens,
    drift,
    golden_logits,
    golden_tokens,
    other_weights,
    too_large,
)
from rewriter.check.padded_model import model_to_compare, real_tokens
from rewriter.check.random_model import random_ids
from rewriter.check.reference_modes import reference_of
from rewriter.check.shrunken_check import MOST_RANKS, compare_emitted, on_ranks, test_lengths
from rewriter.common.errors import VerificationError
from rewriter.common.model_class import load_config
from rewriter.common.run_context import ProgressCall, silent
from rewriter.emit.files.output_files import PlannedFiles
from rewriter.emit.manifest import mesh_of
from rewriter.ir import Program
from rewriter.ir.simulate import load_weights, simulate
from rewriter.output.manifest import Drift
from rewriter.output.names import ranks_of
from rewriter.passes.base import bound_ranks
from rewriter.passes.phases import both_wirings, single_device
from rewriter.passes.quantize_collectives import always_quantized, exact, is_quantized, least_quantized
from rewriter.tracing.meta_model import build_on_meta
from rewriter.tracing.parameters import checkpoint_expressions
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Expression, Tensor, evaluate, substituted
from rewriter.weights.plain_model import PlainTensors, loaded_dtypes, plain_model
from rewriter.weights.quantized_tensors import quantized_weights
from rewriter.weights.streaming import stream_parameters

SHARDED_DRIFT = (
    "the drift is that of the sharded module where every reduction of a block is quantized, as in a long prefill. The "
    "adapted checkpoint sums exactly"
)


class RealWeights:
    """A rewritten program with its weights in memory, fp32; the caller has asked `too_large` before.

    `layout` says how the output holds them. Golden logits and the rewritten side of the drift are of weights rounded
    so; what they are compared with is of the weights as they were.
    """

    def __init__(self, program: Program, layout: PlannedFiles, progress: ProgressCall) -> None:
        self.program, self.single = program, single_device(program)
        self.layout, self.progress = layout, progress
        progress("reading the weights")
        self.stored = load_weights(self.single, torch.float32)
        self.written = self._as_written(self.single, self.stored)

    def golden(self) -> bytes:
        """A safetensors file: the golden tokens and the logits after them, of one device.

        Also `sharded_logits`, those of the ranks, where so few tokens make messages that are quantized.
        """
        from safetensors.torch import save

        self.progress("golden logits")
        tensors = {"input_ids": golden_tokens(self.program), "logits": golden_logits(self.single, self.written)}
        if count := int((~tensors["logits"].isfinite()).sum()):
            raise VerificationError(
                f"golden logits: {count} of {tensors['logits'].numel()} are not finite, although every weight is. The "
                "model computes beyond the range of fp32. --verify none writes it all the same"
            )
        if (sharded := self._quantized(tensors["input_ids"])) is not None:
            tensors["sharded_logits"] = sharded[0, -1].float().contiguous()
        data: bytes = save(tensors)
        return data

    @torch.no_grad()
    def _quantized(self, ids: torch.Tensor) -> torch.Tensor | None:
        """The ranks' logits for `ids`; None where no message of that many tokens is quantized."""
        if not is_quantized(self.program):
            return None
        both, weights = both_wirings(self.program), self._weights_of(self.program)
        exactly, logits = (simulate(program, ids, weights=weights) for program in (exact(both), both))
        return None if torch.equal(exactly, logits) else logits

    def drift(self, verification: Verification, text: str | None) -> Drift | None:
        """Drift from the original on the calibration text; None when every pass is exact.

        Where sums are quantized, all of them are, and it is the drift of the ranks.
        """
        if all(entry.kind != "approximating" for entry in self.program.history):
            return None
        tokens, what = calibration_tokens(self.program, text)
        self.progress(f"drift on {len(tokens)} tokens")
        if what.startswith("random"):
            verification.notes.append(f"drift was measured on {what}")
        original = self.program.origin or self.program
        rewritten = self.single
        if is_quantized(self.program):
            rewritten = always_quantized(both_wirings(self.program))
            verification.notes.append(SHARDED_DRIFT)
        before, after = other_weights(original, self.single, self.stored), self._weights_of(rewritten)
        return drift(original, rewritten, tokens, weights=before, rewritten_weights=after, text=what)

    def _weights_of(self, program: Program) -> Mapping[str, torch.Tensor]:
        """The weights of another form of the program, with the precision that the output holds them in."""
        if program is self.single:
            return self.written
        weights = other_weights(program, self.single, self.written)
        others = {name: tensor for name, tensor in weights.items() if self.written.get(name) is not tensor}
        return {**weights, **self._as_written(program, others)}

    def _as_written(self, program: Program, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Parameters of `program` with the precision in which the output holds them; `weights` where it holds all."""
        if self.layout.target is None and self.layout.dequantized is None:
            return weights
        expressions = {name: program.parameters[name].expression for name in weights}
        return {name: self.layout.held(e) for name, e in expressions.items() if e is not None}

    @torch.no_grad()
    def compare(self, verification: Verification) -> None:
        """Compare the rewritten model with the unmodified one, or with the independent reference. Adds or raises."""
        source = self.program.source
        # The reference of a bound program holds every rank's part of the exit projections, full size.
        copies = 1 + -(-(bound_ranks(self.program) or 0) // 2)
        if reason := too_large(self.single, copies):
            verification.notes.append(f"--verify full: {reason}, beside the copy that is compared")
            return
        reference = reference_of(self.program, asked_passes(self.program))
        self.progress("comparing the real weights")
        model, _ = plain_model(str(source.path), source.remote_code)
        batches = [random_ids(model.config, length, rows=1) for length in test_lengths(model.config)]
        model = model_to_compare(self.program, model, verification, batches[-1:], REAL_WEIGHTS, "real weights: ")
        name = f"real weights: rewritten = {reference.name}"
        for ids in batches:
            actual = simulate(self.single, ids, weights=self.stored)
            verification.require(name, actual, reference.logits(model, ids), REAL_WEIGHTS)
        target, dequantized = self.layout.target, self.layout.dequantized
        if target is None and dequantized is None:
            return
        del model
        if reference.ranks > 1 and source.padded:
            verification.notes.append("weights as written were not compared: their reference is of padded sizes")
            return
        model, _ = plain_model(str(source.path), source.remote_code, target or torch.float32, dequantized)
        actual = simulate(self.single, ids, weights=self.written)
        name = f"real weights: rewritten, as written = {reference.name}, rounded by transformers"
        expected = reference.logits(model, ids)
        verification.require(name, real_tokens(actual, expected), expected, REAL_WEIGHTS)

    @torch.no_grad()
    def compare_emitted(self, verification: Verification, directory: Path) -> None:
        """Compare what a written directory computes in separate processes. Adds or raises."""
        ids = [golden_tokens(self.program)]
        expected = [simulate(self.single, ids[0], weights=self.written)]
        sharded = self._quantized(ids[0])
        compare_emitted(
            verification,
            directory,
            mesh_of(self.program),
            ids,
            expected,
            None if sharded is None else [sharded],
            limit=REAL_WEIGHTS,
            within=QUANTIZED_REAL_WEIGHTS,
            prefix="real weights: ",
            progress=self.progress,
        )


LARGEST_WIDTH = 1 << 14  # elements of a token in the residual stream, of any model known


def compare_ranks(
    program: Program,
    mesh: Mapping[str, int],
    directory: Path,
    verification: Verification,
    target: torch.dtype | None = None,
    dequantized: torch.dtype | None = None,
    progress: ProgressCall = silent,
) -> None:
    """Compare the sharded module in `directory` with the source model, or with the rewrite's reference made of it.

    For a few tokens, in fp32, each side reading weights when it uses them where they do not fit into memory. `target`
    is the dtype that the output holds them in, if it is not the source's, `dequantized` that of the quantized ones, if
    it holds those otherwise. Adds to `verification` or raises VerificationError.
    """
    reference = reference_of(program, asked_passes(program))
    ranks = ranks_of(mesh)
    fits = too_large(single_device(program), 1 + -(-reference.ranks // 2)) is None
    if ranks > MOST_RANKS:
        verification.notes.append(f"ranks did not run on the real weights: more than {MOST_RANKS} are not started here")
        return
    if reference.ranks > 1 and not fits:
        verification.notes.append(
            f"ranks did not run on the real weights: their reference holds parts of {reference.ranks} ranks, which do "
            "not fit into memory"
        )
        return
    if not fits and target is not None and find_spec("accelerate") is None:
        verification.notes.append(
            "ranks did not run on the real weights, which do not fit into memory: reading them as they are used, with "
            "--dtype, needs the package accelerate"
        )
        return
    if reference.ranks > 1 and program.source.padded and (target is not None or dequantized is not None):
        verification.notes.append(
            "ranks did not run on the real weights: these are rounded, and the reference of padded sizes is not"
        )
        return
    if least_quantized(program) < golden_tokens(program).numel() * LARGEST_WIDTH * 4:
        verification.notes.append(
            "ranks did not run on the real weights: they quantize short messages. Use --verify full"
        )
        return
    progress("running ranks on the real weights")
    ids = golden_tokens(program)
    path, remote_code = str(program.source.path), program.source.remote_code
    if fits:
        model, _ = plain_model(path, remote_code, target or torch.float32, dequantized)
    else:
        model = streamed_model(Path(path), remote_code, target, dequantized)
    if reference.ranks > 1 and program.source.padded:
        model = model_to_compare(program, model, verification, [ids], REAL_WEIGHTS, "real weights: ")
    expected = reference.logits(model, ids)
    del model
    (actual,) = subprocess_logits.rank_logits(directory, ranks, [ids], stream=not fits)
    name = f"real weights: sharded module on {on_ranks(mesh)} = {reference.name}"
    verification.require(name, real_tokens(actual, expected), expected, REAL_WEIGHTS)


def streamed_model(
    directory: Path, remote_code: bool, target: torch.dtype | None = None, dequantized: torch.dtype | None = None
) -> PreTrainedModel:
    """`plain_model` of a checkpoint whose weights are read when they are used."""
    checkpoint, plain = Checkpoint.open(directory), PlainTensors(directory)
    config = load_config(directory, remote_code)
    quantized = quantized_weights(checkpoint, config.to_dict())
    tensors = quantized.tensors if quantized else {name: Tensor(name) for name in checkpoint.tensors}
    names: dict[Expression, Expression] = {expression: Tensor(name) for name, expression in tensors.items()}
    model = build_on_meta(config, torch.float32, attn_implementation="eager", trust_remote_code=remote_code).eval()
    expressions, ties, _ = checkpoint_expressions(model, checkpoint, tensors)
    dtypes = loaded_dtypes(model, target or torch.float32)

    def part(name: str) -> torch.Tensor:
        tensor = plain.read(name)
        return tensor.to(dequantized).float() if dequantized is not None and plain.quantized(name) else tensor

    def read(name: str) -> torch.Tensor:
        tensor = evaluate(substituted(expressions[ties.get(name, name)], names), part)
        return tensor.to(dtypes[name], copy=True).float() if tensor.is_floating_point() else tensor.clone()

    model.load_state_dict({n: read(n) for n, _ in model.named_buffers() if n in expressions}, strict=False)
    stream_parameters(model, read)
    return model
