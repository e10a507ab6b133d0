"""What passes need measured before they are applied: they never run a model, so it is measured here and handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rewriter.errors import RewriterError

if TYPE_CHECKING:
    from rewriter.program import Program
    from rewriter.recipes import Recipe


def calibrate(
    recipe: Recipe,
    program: Program,
    ranks: int,
    text: str | None = None,
    progress: Callable[..., None] = lambda *_: None,
) -> Recipe:
    """`recipe` with the measurements that its passes ask for and do not have; the same recipe where none is missing.

    A `drop_sync` without layers and sensitivity gets `sensitivity`, measured on the weights of `program` (as traced)
    for `ranks` ranks with `text`, by default the packaged calibration text. What cannot be measured at all (one rank,
    no weights) is left to the pass, which refuses. Raises RewriterError where the weights are too large to be run here.
    """
    from rewriter.passes.drop_sync import DropSync

    waiting = [i for i, p in enumerate(recipe.build()) if isinstance(p, DropSync) and p.unmeasured]
    if not waiting or ranks < 2 or program.source.path is None or program.history:
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
