"""Padding while training: its gradients are zero, so that it stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rewriter.adapt.models import base_of
from rewriter.common.errors import VerificationError
from rewriter.convert.padding import padded_places
from rewriter.ir import Program
from rewriter.output.manifest import Padding
from rewriter.tracing.parameters import checkpoint_expressions
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Expression, Reference, evaluate
from rewriter.weights.expressions import Tensor as Stored

Masks = Mapping[str, Mapping[int, Tensor]]
"""By parameter and dimension, fp32 with 0 where elements are padding and 1 elsewhere."""


def masks_of_module(padding: Padding, source: Path, module: nn.Module) -> Masks:
    """Masks of a Hugging Face model, by its own names. `source` holds the weights that it was loaded from."""
    checkpoint = Checkpoint.open(source)
    tensors = {name: Stored(name) for name in checkpoint.tensors}
    expressions, _, _ = checkpoint_expressions(module, checkpoint, tensors)
    return _masks(padding, checkpoint, expressions)


def masks_of_program(padding: Padding, source: Path, program: Program, rank: int) -> Masks:
    """Masks of what one rank holds of a sharded module."""
    expressions = {
        name: Reference(spec.expression, spec.dim, spec.ranges).on_rank(rank)
        for name, spec in program.parameters.items()
        if spec.expression is not None
    }
    return _masks(padding, Checkpoint.open(source), expressions)


def _masks(padding: Padding, checkpoint: Checkpoint, expressions: Mapping[str, Expression]) -> Masks:
    places = padded_places(padding, list(checkpoint.tensors))

    def read(name: str) -> Tensor:
        mask = torch.ones(checkpoint.info(name).shape, dtype=torch.uint8)
        for dim, ranges, _ in places.get(name, ()):
            for start, stop in ranges:
                mask.narrow(dim, start, stop - start).zero_()
        return mask

    masks = {}
    for name, expression in expressions.items():
        if not places.keys().isdisjoint(expression.tensors()):
            mask = evaluate(expression.narrowed(checkpoint.shapes), read)
            found = {dim: _along(mask, dim) for dim in range(mask.dim())}
            masks[name] = {dim: along for dim, along in found.items() if not along.all()}
    return masks


def _along(mask: Tensor, dim: int) -> Tensor:
    """Of each index of a dimension, 0 if all that has it is padding."""
    return mask.movedim(dim, 0).reshape(mask.shape[dim], -1).amax(1).float()


def mask_gradients(module: nn.Module, masks: Masks) -> list[tuple[nn.Parameter, dict[int, Tensor]]]:
    """Let gradients of padding be zero, adapters' too, which start with zeros there.

    Returns the parameters that FSDP2 has sharded, whose gradients no hook sees, each with its masks: `mask_sharded`
    takes them.
    """
    base = base_of(module)
    names = {id(parameter): name for name, parameter in base.named_parameters()}
    sharded: list[tuple[nn.Parameter, dict[int, Tensor]]] = []
    for full, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        own = _own_masks(names.get(id(parameter), full), masks)
        if not own:
            continue
        if isinstance(parameter, DTensor):
            sharded.append((parameter, own))
            continue
        if ".lora_" in full:
            with torch.no_grad():
                _apply(parameter, own)
        parameter.register_hook(lambda gradient, own=own: _apply(gradient.clone(), own))
    return sharded


def _own_masks(name: str, masks: Masks) -> dict[int, Tensor]:
    """The masks of a parameter, or of the adapter of one: A has its inputs, B its outputs."""
    if ".lora_A." in name or ".lora_B." in name:
        which = ".lora_A." if ".lora_A." in name else ".lora_B."
        of = masks.get(f"{name.partition(which)[0]}.weight", {})
        dim = 1 if which == ".lora_A." else 0
        return {dim: of[dim]} if dim in of else {}
    return dict(masks.get(name.replace(".base_layer.", "."), {}))


def _apply(values: Tensor, masks: Mapping[int, Tensor]) -> Tensor:
    for dim, mask in masks.items():
        values.mul_(mask.to(values.device, values.dtype).reshape(-1, *[1] * (values.dim() - dim - 1)))
    return values


@torch.no_grad()
def mask_sharded(parameters: Sequence[tuple[nn.Parameter, Mapping[int, Tensor]]]) -> None:
    """Set what a rank holds of gradients of padding to zero. FSDP2 shards the first dimension."""
    for parameter, masks in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            continue
        size, ranks, rank = gradient.shape[0], gradient.device_mesh.size(), gradient.device_mesh.get_local_rank()
        rows = -(-size // ranks)
        own = {dim: mask[rank * rows : (rank + 1) * rows] if dim == 0 else mask for dim, mask in masks.items()}
        _apply(gradient.to_local(), own)


def require_padding(padding: Padding, trained: Path) -> None:
    """Raise VerificationError where what was padding is not zero any more in the checkpoint `trained`."""
    checkpoint = Checkpoint.open(trained)
    for name, places in padded_places(padding, list(checkpoint.tensors)).items():
        zeros = [(dim, span) for dim, ranges, zero in places if zero for span in ranges]
        if zeros:
            values = checkpoint.read(name)
            for dim, (start, stop) in zeros:
                if bool(values.narrow(dim, start, stop - start).any()):
                    raise VerificationError(
                        f"{name}: padding at [{start}, {stop}) of dimension {dim} was trained, and is not zero any "
                        "more. It is a fault of rewriter: please report it"
                    )
        checkpoint.release()
