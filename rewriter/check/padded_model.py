"""A model of padded sizes in transformers' own classes, and what of its logits is the source's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from rewriter.check.comparison import Verification
from rewriter.check.random_model import build_model
from rewriter.check.reference_modes import original_logits
from rewriter.common.errors import VerificationError
from rewriter.ir import Program
from rewriter.ir.simulate import load_weights
from rewriter.tracing import resized_config


def padded_model(program: Program) -> PreTrainedModel:
    """The eager fp32 model of a program's padded sizes, as traced, with its weights in memory."""
    origin = program.origin or program
    model = build_model(resized_config(program), program.source.remote_code)
    weights = load_weights(origin, torch.float32)
    weights |= {alias: weights[name] for alias, name in origin.ties.items()}
    surplus = model.load_state_dict(weights, strict=False)
    if surplus.unexpected_keys:
        raise VerificationError(f"{surplus.unexpected_keys[0]}: the model of padded sizes has no such weight")
    return model


def real_tokens(padded: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Those logits of padded sizes that the source has too.

    Raises VerificationError where a token that is padding is likelier than all others.
    """
    count = original.shape[-1]
    if padded.shape[-1] > count:
        beyond, best = padded[..., count:].amax(-1), padded[..., :count].amax(-1)
        if place := int((beyond >= best).sum()):
            raise VerificationError(f"padding of the vocabulary is the likeliest token at {place} places")
    return padded[..., :count]


def model_to_compare(
    program: Program,
    model: PreTrainedModel,
    verification: Verification,
    batches: Sequence[torch.Tensor],
    limit: float,
    prefix: str = "",
) -> PreTrainedModel:
    """`model`, the source, or, where a pass padded its sizes, that of those sizes, once it gives the same logits for
    all `batches` of ids. Adds to `verification` or raises."""
    if not program.source.padded:
        return model
    padded = padded_model(program)
    for ids in batches:
        expected = original_logits(model, ids)
        actual = real_tokens(original_logits(padded, ids), expected)
        verification.require(f"{prefix}padded sizes = original model", actual, expected, limit)
    return padded
