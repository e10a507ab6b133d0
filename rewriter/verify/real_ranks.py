"""What ranks compute from the real weights, as they were written, against the source: part of every verification."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rewriter.common.expressions import Tensor
from rewriter.emit.manifest import ranks_of
from rewriter.ir import Program
from rewriter.passes.base import single_device
from rewriter.passes.quantize_collectives import least_quantized
from rewriter.tracing.meta_model import build_on_meta
from rewriter.tracing.parameters import checkpoint_expressions
from rewriter.verify import subprocess_logits
from rewriter.verify.asked_passes import asked_passes
from rewriter.verify.comparison import REAL_WEIGHTS, Verification
from rewriter.verify.drift import GOLDEN_TOKENS, golden_tokens, too_large
from rewriter.verify.quantized_loading import cannot_load, loading_arguments
from rewriter.verify.reference_modes import Reference, reference_of
from rewriter.verify.shrunken_check import MOST_RANKS, on_ranks
from rewriter.weights import Checkpoint
from rewriter.weights.checkpoint import torch_dtype
from rewriter.weights.loadable import loadable
from rewriter.weights.quantized_tensors import QuantizedWeights, quantized_weights
from rewriter.weights.streaming import stream_parameters

LARGEST_WIDTH = 1 << 14  # elements of a token in the residual stream, of any model known


def compare_ranks(
    program: Program,
    mesh: Mapping[str, int],
    directory: Path,
    found: Verification,
    target: torch.dtype | None = None,
    progress: Callable[..., None] = lambda *_: None,
) -> None:
    """Compare the sharded module in `directory` with the source model, or with the rewrite's reference made of it.

    For a few tokens, in fp32, each side reading weights when it uses them where they do not fit into memory. `target`
    is the dtype that the output holds them in, if it is not the source's. Adds to `found` or raises VerificationError.
    """
    reference = reference_of(program, asked_passes(program))
    ranks = ranks_of(mesh)
    fits = too_large(single_device(program), 1 + -(-reference.ranks // 2)) is None
    if ranks > MOST_RANKS:
        found.notes.append(f"ranks did not run on the real weights: more than {MOST_RANKS} are not started here")
        return
    if reference.ranks > 1 and not fits:
        found.notes.append(
            f"ranks did not run on the real weights: their reference holds parts of {reference.ranks} ranks, which do "
            "not fit into memory"
        )
        return
    if least_quantized(program) < GOLDEN_TOKENS * LARGEST_WIDTH * 4:
        found.notes.append("ranks did not run on the real weights: they quantize short messages. Use --verify full")
        return
    progress("running ranks on the real weights")
    ids = golden_tokens(program)
    expected = source_logits(program, reference, ids, stream=not fits, target=target)
    (actual,) = subprocess_logits.rank_logits(directory, ranks, [ids], stream=not fits)
    found.require(
        f"real weights: sharded module on {on_ranks(mesh)} = {reference.name}", actual, expected, REAL_WEIGHTS
    )


@torch.no_grad()
def source_logits(
    program: Program, reference: Reference, ids: torch.Tensor, stream: bool, target: torch.dtype | None
) -> torch.Tensor:
    """Logits [B, S, vocabulary] (fp32) of the source model under `reference`, its weights rounded to `target`."""
    source = program.source
    assert source.path is not None
    if stream or cannot_load(source.path):
        return reference.logits(streamed_model(Path(source.path), source.remote_code, target), ids)
    with loadable(source.path) as place:
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, attn_implementation="eager", trust_remote_code=source.remote_code,
            **loading_arguments(place),
        ).eval()  # fmt: skip
    if quantized := _quantized(Checkpoint.open(source.path)):
        target = target or torch_dtype(quantized.dtype, "its weights")  # ranks hold them so
    for tensor in model.state_dict().values():
        tensor.copy_(rounded(tensor, target))
    return reference.logits(model, ids)


def streamed_model(directory: Path, remote_code: bool, target: torch.dtype | None) -> PreTrainedModel:
    """The eager model of a checkpoint, whose weights are read when they are used, in fp32."""
    checkpoint = Checkpoint.open(directory)
    quantized = _quantized(checkpoint)
    tensors = quantized.tensors if quantized else {name: Tensor(name) for name in checkpoint.tensors}
    config = AutoConfig.from_pretrained(directory, trust_remote_code=remote_code)
    model = build_on_meta(config, torch.float32, attn_implementation="eager", trust_remote_code=remote_code).eval()
    expressions, ties, _ = checkpoint_expressions(model, checkpoint, tensors)

    def read(name: str) -> torch.Tensor:
        tensor = checkpoint.evaluate(expressions[ties.get(name, name)])
        return rounded(tensor.float() if tensor.is_floating_point() else tensor, target).clone()

    model.load_state_dict({n: read(n) for n, _ in model.named_buffers() if n in expressions}, strict=False)
    stream_parameters(model, read)
    return model


def _quantized(checkpoint: Checkpoint) -> QuantizedWeights | None:
    config = json.loads((checkpoint.directory / "config.json").read_text(encoding="utf-8"))
    return quantized_weights(checkpoint, config)


def rounded(tensor: torch.Tensor, target: torch.dtype | None) -> torch.Tensor:
    """`tensor` with the precision of `target`, if it has floating-point numbers."""
    return tensor if target is None or not tensor.is_floating_point() else tensor.to(target).to(tensor.dtype)
