"""The source's tensors as the adapted checkpoint keeps them: as on disk, or what quantized ones stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.text_settings import without_quantization
from rewriter.ir import Program
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Expression, Shapes, Tensor, is_dequantized, substituted
from rewriter.weights.padding import PaddedCheckpoint
from rewriter.weights.quantized_tensors import QuantizedWeights, quantized_weights

DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class KeptTensors:
    """`program` reads `tensors` by their names there; each is an expression over the checkpoint's tensors.

    `dequantized` is set where some of them are not as the checkpoint stores them.
    """

    checkpoint: Checkpoint
    program: Program
    tensors: Mapping[str, Expression]
    dequantized: QuantizedWeights | None = None

    @cached_property
    def shapes(self) -> Shapes:
        """By name."""
        return {name: expression.shape(self.checkpoint.shapes) for name, expression in self.tensors.items()}

    def files(self) -> dict[Path, list[str]]:
        """By file of the checkpoint, the names of what is kept of it; files of which nothing is kept are left out."""
        by_file: dict[Path, list[str]] = {}
        for name, expression in self.tensors.items():
            by_file.setdefault(self.checkpoint.info(next(expression.tensors())).file, []).append(name)
        return {file: by_file[file] for file in self.checkpoint.files if file in by_file}

    def stored(self, expression: Expression) -> Expression:
        """An expression over `tensors` as one over the checkpoint's."""
        return substituted(expression, self._by_name) if self._by_name else expression

    def named(self, expression: Expression) -> Expression:
        """An expression over the checkpoint's tensors as one over `tensors`."""
        return substituted(expression, self._names) if self._names else expression

    @cached_property
    def _by_name(self) -> Mapping[Expression, Expression]:
        return {Tensor(name): tensor for name, tensor in self.tensors.items() if tensor != Tensor(name)}

    @cached_property
    def _names(self) -> Mapping[Expression, Expression]:
        return {tensor: name for name, tensor in self._by_name.items()}

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """config.json for these tensors, from one for the checkpoint's."""
        if self.dequantized is None:
            return dict(config)
        return without_quantization(config) | {"dtype": DTYPES[self.dequantized.dtype]}


def kept_tensors(
    program: Program, checkpoint: Checkpoint, dequantize: bool, refuse: str | None, drop_unused: bool = False
) -> KeptTensors:
    """The tensors that an output of `program`, traced from `checkpoint`, keeps: with `drop_unused` none that the model
    does not use. `refuse`: why weights cannot stay quantized.

    Raises RewriterError where they would, and where `dequantize` or `drop_unused` has nothing to do.
    """
    quantized = quantized_weights(checkpoint, program.source.config)
    padded = program.source.padded
    unused = set(program.source.unused) if drop_unused else set()
    if drop_unused and not unused:
        raise RewriterError(f"--drop-unused: the model uses every tensor in {checkpoint.directory}. Leave it out")
    if quantized is None and dequantize:
        raise RewriterError(f"--dequantize: the weights in {checkpoint.directory} are not quantized. Leave it out")
    if quantized is None or not dequantize:
        if quantized is not None and refuse is not None:
            raise RewriterError(
                f"the weights in {checkpoint.directory} are {quantized.kind}: {refuse}. Add --dequantize"
            )
        stored = unused if quantized is None else {n for name in unused for n in quantized.tensors[name].tensors()}
        if (name := next((name for name, change in padded.items() if is_dequantized(change)), None)) is not None:
            assert quantized is not None
            raise RewriterError(f"{name}: padding would cut through groups of {quantized.kind}. Add --dequantize")
        kept = {n: padded.get(n, Tensor(n)) for n in checkpoint.tensors if n not in stored}
        names: dict[Expression, Expression] = {tensor: Tensor(name) for name, tensor in padded.items()}
        return KeptTensors(checkpoint, _renamed(program, names) if names else program, kept)
    cut = {name: change for name, change in padded.items() if is_dequantized(change)}
    inside: dict[Expression, Expression] = {Tensor(n): change for n, change in padded.items() if n not in cut}
    stands = quantized_weights(PaddedCheckpoint(checkpoint, padded), program.source.config) or quantized
    whole = {name: cut.get(name) or substituted(tensor, inside) for name, tensor in stands.tensors.items()}
    names = {tensor: Tensor(name) for name, tensor in whole.items()}
    kept = {name: tensor for name, tensor in whole.items() if name not in unused}
    return KeptTensors(checkpoint, _renamed(program, names), kept, quantized)


def _renamed(program: Program, names: Mapping[Expression, Expression]) -> Program:
    parameters = {
        name: spec if spec.expression is None else replace(spec, expression=substituted(spec.expression, names))
        for name, spec in program.parameters.items()
    }
    origin = None if program.origin is None else _renamed(program.origin, names)
    return program.with_(parameters=parameters, origin=origin)
