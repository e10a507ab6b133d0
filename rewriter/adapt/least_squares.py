"""Weights for prompts: projections of keys and values by least squares.

A rewired block reads another input than the original's. Which projection of it comes nearest to the original's keys and
values is a linear problem, solved layer by layer from below, so that each sees what the solved ones before it leave.

N: tokens, I, O: inputs and outputs of a projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from rewriter.adapt.models import Batch, first_rewritten, layers_of
from rewriter.adapt.prompt_weights import keys_and_values
from rewriter.ir.phases import REWIRED

RIDGE = 1e-3
"""Of the mean square of an input: how much a change of weights costs beside errors."""
TOKENS = 16
"""Tokens that are read, for each element of the stream."""
ROUNDING = 1e-9
"""The square of an error that is none, by that of what is wanted."""
_CHUNK = 1024  # tokens that are added up at once


def key_projections(student: nn.Module, ids_BS: Tensor, rewired_BS: Tensor) -> dict[str, nn.Module]:
    """The trained linear modules of rewritten layers on which the keys or values of their own layer depend, by name."""
    names = {id(module): name for name, module in student.named_modules()}
    cache, first = DynamicCache(), first_rewritten(student)
    found: dict[str, nn.Module] = {}
    with torch.enable_grad():
        keys_and_values(student, ids_BS, rewired_BS, cache)
        for layer, kept in zip(layers_of(student)[first:], cache.layers[first:], strict=False):
            made = [kept.keys, kept.values] if getattr(kept, "keys", None) is not None else []
            linear = [m for m in layer.modules() if isinstance(m, nn.Linear | Conv1D) and m.weight.requires_grad]
            made = [part.float().sum() for part in made if part.requires_grad]
            if linear and made:
                weights = [module.weight for module in linear]
                gradients = torch.autograd.grad(sum(made), weights, retain_graph=True, allow_unused=True)
                found |= {names[id(m)]: m for m, g in zip(linear, gradients, strict=True) if g is not None}
    return found


def fit_keys(student: nn.Module, theirs: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
    """Set `key_projections` of `student` to those that give what the original, `theirs`, computes of `batch`.

    Returns, by module, the squared error over the square of what is wanted, before and after.
    """
    ids, rewired = batch["input_ids"], batch[REWIRED]
    few = int(rewired[0].to(torch.int64).argmax()) + 4  # tokens up to the first rewired one, and some after it
    projections = key_projections(student, ids[:1, :few], rewired[:1, :few])
    valid = batch["segment_ids"] == 0  # each example has its own row: others are padding
    counts = rewired[valid].sum(), (~rewired[valid]).sum()
    # exact tokens at the beginning are few, and all others look at them: together they count as much as those
    weights_N = torch.where(rewired[valid], 1.0, counts[0] / counts[1].clamp(min=1))
    wanted: dict[str, Tensor] = {}
    errors: dict[str, tuple[float, float]] = {}

    def keep(name: str) -> Any:
        return lambda module, args, output: wanted.__setitem__(name, output[valid])

    def solve(name: str) -> Any:
        def solved(module: Any, args: Any, output: Tensor) -> Any:
            errors[name] = _solved(module, args[0][valid], wanted.pop(name), weights_N)
            return type(module).forward(module, args[0])

        return solved

    with torch.no_grad():
        others = dict(theirs.named_modules())
        _hooked({others[name]: keep(name) for name in projections}, theirs, ids, None)
        _hooked({module: solve(name) for name, module in projections.items()}, student, ids, rewired)
    return errors


def _hooked(hooks: dict[nn.Module, Any], module: nn.Module, ids_BS: Tensor, rewired_BS: Tensor | None) -> None:
    handles = [part.register_forward_hook(hook) for part, hook in hooks.items()]
    try:
        keys_and_values(module, ids_BS, rewired_BS)
    finally:
        for handle in handles:
            handle.remove()


def _solved(module: Any, states_NI: Tensor, wanted_NO: Tensor, weights_N: Tensor) -> tuple[float, float]:
    """Solve one projection, with a weight for each token's error; squared errors, over the square of what is wanted,
    before and after."""
    weight_OI = module.weight.t() if isinstance(module, Conv1D) else module.weight
    before = after = 0.0
    for rows, inputs in _row_groups(module, weight_OI, states_NI):
        bias = 0.0 if module.bias is None else module.bias[rows]
        times = len(inputs) // len(wanted_NO)
        errors = wanted_NO[:, rows].repeat(times, 1) - inputs @ weight_OI[rows].t() - bias
        square = float(errors.double().square().sum())
        before += square
        if square <= ROUNDING * float(wanted_NO[:, rows].double().square().sum()):
            after += square
            continue  # it reads what the original's reads
        scales = weights_N.repeat(times).sqrt()[:, None]
        parts = zip((inputs * scales).split(_CHUNK), (errors * scales).split(_CHUNK), strict=True)
        products = [(x.double().t() @ x.double(), x.double().t() @ e.double()) for x, e in parts]
        gram_II, products_IO = (torch.stack(each).sum(0) for each in zip(*products, strict=True))
        penalty = (RIDGE * gram_II.diagonal().mean()).clamp(min=1e-12)
        change_IO = torch.linalg.solve(gram_II + penalty * torch.eye(len(gram_II)).to(gram_II), products_IO)
        weight_OI[rows] += change_IO.t().to(weight_OI.dtype)
        after += float((errors - inputs @ change_IO.to(inputs.dtype)).double().square().sum())
    square = float(wanted_NO.double().square().sum().clamp(min=1e-12))
    return before / square, after / square


def _row_groups(module: Any, weight_OI: Tensor, states_NI: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of the weight, int64, with the inputs that they read, [N, I]: all of them, or those of each rank where the
    module computes each rank's rows of its own input; of ranks that hold the same rows, one after the other."""
    every = torch.arange(len(weight_OI), device=weight_OI.device)
    ranks = states_NI.shape[-1] // weight_OI.shape[1]
    if ranks == 1:
        yield every, states_NI
        return
    if getattr(module, "rows", None) is not None:
        held = [tuple(each) for each in module.rows]
        for first, end in dict.fromkeys(held):
            chunks = states_NI.chunk(ranks, -1)
            yield every[first:end], torch.cat([chunks[r] for r, own in enumerate(held) if own == (first, end)])
        return
    segments = every.split(module.segments or len(every))
    for rank, inputs in enumerate(states_NI.chunk(ranks, -1)):
        yield torch.cat([segment.chunk(ranks)[rank] for segment in segments]), inputs
