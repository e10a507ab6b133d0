"""What a layer of experts does: only those that some token chose are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewriter.predict.kernel_cost import Item, Kernel

NAME = "experts"  # of their products


def active_experts(experts: int, chosen: int, tokens: int) -> float:
    """How many of `experts` are chosen by at least one of `tokens` that choose `chosen` each, uniformly at random.

    X · (1 − (1 − k / X)ⁿ); a trained router is not uniform, and fewer are then chosen.
    """
    return experts * (1.0 - (1.0 - min(1.0, chosen / experts)) ** tokens)


def experts_items(args: Any, kwargs: Mapping[str, Any], fused: bool) -> list[Item]:
    """Kernels of `ops.experts`. As emitted, each active expert runs on its own tokens: two products and four pieces of
    glue (gather, activation, weighting, scatter) behind a sort. `fused`: one grouped product for all experts of each
    projection, as grouped kernels do it."""
    x, index, _, up, down = args[:5]
    tokens, chosen = index.shape
    size, count = x.element_size(), up.shape[0]
    active = min(count, max(1, round(active_experts(count, chosen, tokens))))
    of_one = (up[0].numel(), down[0].numel())
    width, hidden = x.shape[1], down.shape[1] if kwargs.get("transposed") else down.shape[2]
    rows = tokens * chosen
    shapes = ((of_one[0], width, of_one[0] // width), (of_one[1], hidden, width))
    moved = rows * (width + 2 * hidden) * size  # gathered tokens, activations, weighted results
    items: list[Item] = [Kernel("route", "glue", 4.0 * rows * 8)]
    groups = 1 if fused else active
    for _ in range(groups):
        share = active / groups
        for elements, depth, columns in shapes:
            weights = int(elements * share * size)
            nbytes, flops = weights + rows / groups * (depth + columns) * size, 2.0 * rows / groups * elements
            batches, each = max(1, round(share)), max(1, rows // active)
            items.append(Kernel(NAME, "product", nbytes, flops, weights, batches, each, columns, depth))
        items += [Kernel("glue of experts", "glue", 2.0 * moved / groups / 4) for _ in range(1 if fused else 4)]
    return items
