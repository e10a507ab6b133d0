"""The measurements that passes request (`Pass.request`): passes never run a model, so it is measured here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.common.errors import RewriterError
from rewriter.common.run_context import ProgressCall, silent

if TYPE_CHECKING:
    from rewriter.ir import Program
    from rewriter.recipes import Recipe


class _TooLarge(Exception):
    """The weights cannot be run here; it says why."""


def calibrate(
    recipe: Recipe,
    program: Program,
    ranks: int,
    text: str | None = None,
    progress: ProgressCall = silent,
) -> Recipe:
    """`recipe` with the measurements that its passes request; the same recipe where none is missing.

    They are taken on the weights of `program` (as traced) for `ranks` ranks with `text`, by default the packaged
    calibration text. What cannot be measured at all (one rank, no weights) is left to the pass, which refuses. Raises
    RewriterError where the weights are too large to be run here; an optional pass gets the reason, and is left out.
    """
    if ranks < 2 or program.source.path is None or program.history:
        return recipe
    for kind, measure in _MEASUREMENTS.items():
        passes = recipe.build()
        waiting = [i for i, p in enumerate(passes) if p.request is not None and p.request.kind == kind]
        if not waiting:
            continue
        name, request = passes[waiting[0]].name, passes[waiting[0]].request
        try:
            value, what = measure(program, recipe, ranks, text, progress)
        except _TooLarge as reason:
            if not all(recipe.passes[index].optional for index in waiting):
                raise RewriterError(f"{name}: {request.chosen}, but {reason}. {request.instead}") from None
            value, what = None, str(reason)
        for index in waiting:  # each takes the result by its own option
            option = passes[index].request.option
            recipe = recipe.with_options(index, {**({} if value is None else {option: value}), "measured_on": what})
    return recipe


def _sensitivity(
    program: Program, recipe: Recipe, ranks: int, text: str | None, progress: ProgressCall
) -> tuple[Any, str]:
    """Cost of dropping each layer's attention reduction, alone."""
    from rewriter.check.drift import calibration_tokens, too_large
    from rewriter.check.sensitivity import sensitivity

    if reason := too_large(program):
        raise _TooLarge(reason)
    tokens, what = calibration_tokens(program, text)
    costs = sensitivity(program, tokens, ranks, progress=progress)
    return list(costs), f"{len(tokens)} tokens on {ranks} ranks, {what}"


def _affinity(
    program: Program, recipe: Recipe, ranks: int, text: str | None, progress: ProgressCall
) -> tuple[Any, str]:
    """By block, which rank each head and channel should go to, under `recipe`."""
    from rewriter.check.affinity import affinity, measurable
    from rewriter.check.drift import calibration_tokens, too_large

    others = recipe
    for index, rewrite in enumerate(recipe.build()):
        if rewrite.request is not None:
            others = others.with_options(index, rewrite.supposed(program)[0])
    rewritten = measurable(program, others, ranks)
    if rewritten is None:
        return {}, "every rank computes with the same residual"
    if reason := too_large(program, 2):  # as they are, and in another order
        raise _TooLarge(reason)
    tokens, what = calibration_tokens(program, text)
    order = affinity(program, rewritten, tokens, progress=progress)
    return dict(order.ranks), f"{len(tokens)} tokens on {ranks} ranks, {what}: {order}"


_MEASUREMENTS = {"sensitivity": _sensitivity, "affinity": _affinity}
"""By kind of request, in the order of measuring: an order of heads is good for the layers that were chosen before."""
