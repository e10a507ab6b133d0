"""What passes need measured before they are applied: they never run a model, so it is measured here and handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rewriter.common.errors import RewriterError

if TYPE_CHECKING:
    from rewriter.ir import Program
    from rewriter.recipes import Recipe


def calibrate(
    recipe: Recipe,
    program: Program,
    ranks: int,
    text: str | None = None,
    progress: Callable[..., None] = lambda *_: None,
) -> Recipe:
    """`recipe` with the measurements that its passes ask for and do not have; the same recipe where none is missing.

    A `drop_sync` without layers and sensitivity gets `sensitivity`, a `permute` without an order `ranks`, measured on
    the weights of `program` (as traced) for `ranks` ranks with `text`, by default the packaged calibration text. What
    cannot be measured at all (one rank, no weights) is left to the pass, which refuses. Raises RewriterError where the
    weights are too large to be run here; a pass that is optional is left out then.
    """
    if ranks < 2 or program.source.path is None or program.history:
        return recipe
    for measure in (_sensitivities, _orders):
        recipe = measure(recipe, program, ranks, text, progress)
    return recipe


def _sensitivities(
    recipe: Recipe, program: Program, ranks: int, text: str | None, progress: Callable[..., None]
) -> Recipe:
    from rewriter.passes.drop_sync import DropSync

    waiting = [i for i, p in enumerate(recipe.build()) if isinstance(p, DropSync) and p.unmeasured]
    if not waiting:
        return recipe
    from rewriter.verify.drift import calibration_tokens, too_large
    from rewriter.verify.sensitivity import sensitivity

    if reason := too_large(program):
        raise RewriterError(
            f"drop_sync: its layers are chosen by a measurement, but {reason}. Give drop_sync.sensitivity (a number "
            "per layer, measured on a larger machine) or drop_sync.layers"
        )
    tokens, what = calibration_tokens(program, text)
    costs = sensitivity(program, tokens, ranks, progress=progress)
    for index in waiting:
        measured = {"sensitivity": list(costs), "measured_on": f"{len(tokens)} tokens on {ranks} ranks, {what}"}
        recipe = recipe.with_options(index, measured)
    return recipe


def _orders(recipe: Recipe, program: Program, ranks: int, text: str | None, progress: Callable[..., None]) -> Recipe:
    from rewriter.passes.permute import Permute

    waiting = [i for i, p in enumerate(recipe.build()) if isinstance(p, Permute) and p.unmeasured]
    if not waiting:
        return recipe
    from rewriter.verify.affinity import affinity, measurable
    from rewriter.verify.drift import calibration_tokens, too_large

    unmoved = recipe
    for index in waiting:
        unmoved = unmoved.with_options(index, {"ranks": {}})
    rewritten = measurable(program, unmoved, ranks)
    if rewritten is None:
        options: dict[str, Any] = {"ranks": {}, "measured_on": "every rank computes with the same residual"}
    elif reason := too_large(program, 2):  # as they are, and in another order
        if all(recipe.passes[index].optional for index in waiting):
            return recipe
        raise RewriterError(
            f"permute: the order of heads and channels is found by a measurement, but {reason}. Give permute.ranks "
            "(measured on a larger machine), or leave the pass out"
        )
    else:
        tokens, what = calibration_tokens(program, text)
        found = affinity(program, rewritten, tokens, progress=progress)
        options = {"ranks": dict(found.ranks), "measured_on": f"{len(tokens)} tokens on {ranks} ranks, {what}: {found}"}
    for index in waiting:
        recipe = recipe.with_options(index, options)
    return recipe
