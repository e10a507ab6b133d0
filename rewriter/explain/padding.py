"""Costs of padded sizes: weights, computation and cache of a rank, beside layouts that need no padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.text_settings import nested_settings
from rewriter.ir import Program, args_of, nodes_inside, ops
from rewriter.passes.fit_ranks import growth_of
from rewriter.passes.placement.rank_memory import memory
from rewriter.passes.tensor_parallel import TensorParallel


def tensor_parallel(program: Program, ranks: int) -> Program:
    """Plain tensor parallelism over `ranks`. Raises RewriterError where heads do not divide."""
    return TensorParallel().apply(program.with_(mesh={"tp": ranks}, origin=program)) if ranks > 1 else program


def padding(original: Program, after: Program, standard: Program, ranks: int) -> dict[str, Any] | None:
    """The sizes that a recipe padded, and per layout what a rank holds and computes; None where it padded none.

    `standard` has the padded sizes under tensor parallelism alone.
    "waste" is what all ranks together have more than the source on one device, as a share of that: of weights, of
    products per token, of keys and values. Key/value heads that several ranks hold count once for each.
    """
    source = after.source
    if not source.settings and not source.on_load:
        return None
    table = nested_settings(original.source.config) or original.source.config
    settings = {**source.settings, **source.on_load}
    sizes = [
        {"setting": name, "before": table.get(name), "after": value}
        for name, value in settings.items()
        if value != table.get(name)
    ]
    return {
        "sizes": sizes,
        "model_type": source.model_type,
        "on_load": dict(source.on_load),
        "weights": growth_of(original, after.origin or after),
        "layouts": list(_layouts(original, standard, ranks)),
    }


def _layouts(original: Program, standard: Program, ranks: int) -> Iterator[dict[str, Any]]:
    yield _layout(f"padded, on {ranks}", original, standard, ranks)
    replicated = [degree for degree in range(ranks // 2, 0, -1) if ranks % degree == 0]
    for degrees, name in ((range(ranks - 1, 1, -1), "on {0}, which divides"), (replicated, "{1} replicas on {0}")):
        for degree in degrees:
            with suppress(RewriterError):  # heads do not divide
                program = tensor_parallel(original, degree)
                yield _layout(name.format(degree, ranks // degree), original, program, degree)
                break


def _layout(name: str, original: Program, program: Program, ranks: int) -> dict[str, Any]:
    whole, rank = memory(original), memory(program)
    shares = {
        "weights": (rank.parameters_per_rank, whole.parameters),
        "products": (products_per_token(program), products_per_token(original)),
        "cache": (rank.cache_per_token, whole.cache_per_token),
    }
    return {
        "layout": name,
        "ranks": ranks,
        "weight_bytes": rank.parameters_per_rank,
        "cache_bytes_per_token": rank.cache_per_token,
        "products_per_token": shares["products"][0],
        "waste": {what: ranks * own / all_ - 1 if all_ else 0.0 for what, (own, all_) in shares.items()},
    }


def products_per_token(program: Program) -> int:
    """Multiplications of a token with weights on one rank: matrices, the chosen experts alone, and the head."""
    chosen: dict[str, tuple[int, int]] = {}
    for path, module in program.modules.items():
        for inside, node in nodes_inside(module, path):
            if node.target is ops.experts:
                top = int(args_of(node)[1].meta["val"].shape[-1])
                for weight in args_of(node)[3:5]:
                    chosen[f"{inside}.{weight.target}"] = top, int(weight.meta["val"].shape[0])
    total = 0
    for name, parameter in program.parameters.items():
        if len(parameter.shape) < 2 or _is_lookup(program, name):
            continue
        top, experts = chosen.get(name, (1, 1))
        total += math.prod(parameter.shape) * top // experts
    return total


def _is_lookup(program: Program, name: str) -> bool:
    """True for a table of embeddings that is not the head too."""
    module = program.modules.get(name.rpartition(".")[0])
    return (
        "Embedding" in getattr(module, "kind", getattr(module, "class_name", "")) and name not in program.ties.values()
    )
