"""Ranks on the real weights, as they were written, against the source: part of every verification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from rewriter.check import subprocess_logits
from rewriter.check.asked_passes import asked_passes
from rewriter.check.comparison import REAL_WEIGHTS, Verification
from rewriter.check.reference_modes import reference_of
from rewriter.check.shrunken_check import MOST_RANKS, on_ranks
from rewriter.ir import Program
from rewriter.measure.drift import GOLDEN_TOKENS, golden_tokens, too_large
from rewriter.output.names import ranks_of
from rewriter.passes.base import single_device
from rewriter.passes.quantize_collectives import least_quantized
from rewriter.tracing.meta_model import build_on_meta
from rewriter.tracing.parameters import checkpoint_expressions
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Expression, Tensor, evaluate, substituted
from rewriter.weights.plain_model import PlainTensors, loaded_dtypes, plain_model
from rewriter.weights.quantized_tensors import quantized_weights
from rewriter.weights.streaming import stream_parameters

LARGEST_WIDTH = 1 << 14  # elements of a token in the residual stream, of any model known


def compare_ranks(
    program: Program,
    mesh: Mapping[str, int],
    directory: Path,
    verification: Verification,
    target: torch.dtype | None = None,
    dequantized: torch.dtype | None = None,
    progress: Callable[..., None] = lambda *_: None,
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
    if least_quantized(program) < GOLDEN_TOKENS * LARGEST_WIDTH * 4:
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
    expected = reference.logits(model, ids)
    del model
    (actual,) = subprocess_logits.rank_logits(directory, ranks, [ids], stream=not fits)
    verification.require(
        f"real weights: sharded module on {on_ranks(mesh)} = {reference.name}", actual, expected, REAL_WEIGHTS
    )


def streamed_model(
    directory: Path, remote_code: bool, target: torch.dtype | None = None, dequantized: torch.dtype | None = None
) -> PreTrainedModel:
    """`plain_model` of a checkpoint whose weights are read when they are used."""
    checkpoint, plain = Checkpoint.open(directory), PlainTensors(directory)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=remote_code)
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
