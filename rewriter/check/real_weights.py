"""Computed from the real weights, never from a shrunken copy: equality (`--verify full`), drift, golden logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from rewriter.check.asked_passes import asked_passes
from rewriter.check.comparison import QUANTIZED_REAL_WEIGHTS, REAL_WEIGHTS, Verification
from rewriter.check.random_model import random_ids
from rewriter.check.reference_modes import reference_of
from rewriter.check.shrunken_check import compare_emitted, test_lengths
from rewriter.common.errors import VerificationError
from rewriter.emit.files.output_files import PlannedFiles
from rewriter.emit.manifest import mesh_of
from rewriter.ir import Program
from rewriter.ir.simulate import load_weights, simulate
from rewriter.measure.drift import calibration_tokens, drift, golden_logits, golden_tokens, other_weights, too_large
from rewriter.output.manifest import Drift
from rewriter.passes.base import bound_ranks, single_device
from rewriter.passes.quantize_collectives import always_quantized, exact, is_quantized
from rewriter.weights.plain_model import plain_model

SHARDED_DRIFT = (
    "the drift is that of the sharded module where every reduction of a block is quantized, as in a long prefill. The "
    "adapted checkpoint sums exactly"
)


class RealWeights:
    """A rewritten program with its weights in memory, fp32; the caller has asked `too_large` before.

    `layout` says how the output holds them. Golden logits and the rewritten side of the drift are of weights rounded
    so; what they are compared with is of the weights as they were.
    """

    def __init__(self, program: Program, layout: PlannedFiles, progress: Callable[..., None]) -> None:
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
        """The ranks' logits for `ids`; None where no message of so many tokens is quantized."""
        if not is_quantized(self.program):
            return None
        weights = self._weights_of(self.program)
        exactly, logits = (simulate(program, ids, weights=weights) for program in (exact(self.program), self.program))
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
            rewritten = always_quantized(self.program)
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
        name = f"real weights: rewritten = {reference.name}"
        for length in test_lengths(model.config):
            ids = random_ids(model.config, length, rows=1)
            actual = simulate(self.single, ids, weights=self.stored)
            verification.require(name, actual, reference.logits(model, ids), REAL_WEIGHTS)
        target, dequantized = self.layout.target, self.layout.dequantized
        if target is None and dequantized is None:
            return
        del model
        model, _ = plain_model(str(source.path), source.remote_code, target or torch.float32, dequantized)
        actual = simulate(self.single, ids, weights=self.written)
        name = f"real weights: rewritten, as written = {reference.name}, rounded by transformers"
        verification.require(name, actual, reference.logits(model, ids), REAL_WEIGHTS)

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
