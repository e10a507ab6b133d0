"""Memory of one rank: parameters, keys and values per token, states per row, and the largest temporaries per token.

An estimate for planning, not a profile: temporaries are the logits (every rank gathers the full vocabulary), the values
that the projections of the widest block make at once, and the residual stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rewriter.ir import Leaf, Module, Opaque, Program, args_of, called_module, nodes_inside, ops, walk_modules
from rewriter.ir.communication import model_dtype_bytes
from rewriter.ir.labels import reduced_shape, value_of
from rewriter.ir.marks import in_stream, marks
from rewriter.ir.shapes import Value, is_shape, wiring_shapes
from rewriter.ir.states import state_of
from rewriter.passes.sequence.sequence_plans import attention_shapes


@dataclass(frozen=True)
class RankMemory:
    """Bytes on a rank's device, where tables that stay in the host's memory are not (`OffloadedEmbedding`). "Per
    token" counts one position of one sequence; a window's layers keep no more than its size of them.
    `states_per_row`: what recurrent mixers keep of a sequence, whatever its length."""

    parameters: int
    parameters_per_rank: int
    cache_per_token: int
    windowed_cache_per_token: int
    states_per_row: int
    logits_per_token: int
    block_per_token: int
    stream_per_token: int


def memory(program: Program) -> RankMemory:
    """Memory of one rank of `program`, in the dtype that the config says."""
    size = model_dtype_bytes(program)
    full = sum(math.prod(p.full_shape or p.shape) for p in program.parameters.values())
    local = sum(math.prod(p.shape) for p in program.parameters.values())
    shapes_kept = attention_shapes(program, storing=True)
    kept = [(s.layers * s.kv_heads * (s.head_dim + s.value_dim), s.window) for s in shapes_kept]
    cache = sum(elements for elements, _ in kept) + _remembered(program, 1000) // 1000
    windowed = sum(elements for elements, window in kept if window is not None)
    shapes, nodes = wiring_shapes(program), program.graph.nodes
    called = [called_module(node, program.modules) for node in nodes if marks(node).layer is not None]
    widest = max((_widths(m) for m in {id(m): m for m in called if m is not None}.values()), default=0)
    stream = max((_width(shapes[node]) for node in nodes if in_stream(node)), default=0)
    logits = _width(shapes[program.graph.output_node()])
    leaves = [module for _, module in walk_modules(program.modules) if isinstance(module, Leaf)]
    offloaded = sum(math.prod(leaf.parameters["weight"]) for leaf in leaves if leaf.kind == "OffloadedEmbedding")
    return RankMemory(
        full * size, (local - offloaded) * size, cache * size, windowed * size, _states(program, size), logits * size,
        widest * size, stream * size,
    )  # fmt: skip


def _states(program: Program, size: int) -> int:
    """Bytes of the states that a rank keeps of one sequence."""
    inside = (node for module in program.modules.values() for _, node in nodes_inside(module))
    states = [state_of(node) for node in inside if node.target in ops.STATEFUL]
    return sum(math.prod(state.shape) * (4 if state.fp32 else size) for state in states)


def _remembered(program: Program, tokens: int) -> int:
    """Elements that indexers keep of as many tokens, and keys of blocks of tokens."""
    inside = (node for module in program.modules.values() for _, node in nodes_inside(module))
    kept = [n for n in inside if n.target in (ops.remember, ops.remember_blocks)]
    sizes: list[Any] = [n.kwargs.get("size", 1) for n in kept]
    widths = [marks(n).local_channels or reduced_shape(value_of(n))[-1] for n in kept]
    return sum(width * -(-tokens // size) for width, size in zip(widths, sizes, strict=True))


def cache_elements(program: Program, tokens: int) -> int:
    """Elements of the keys and values that one rank keeps of `tokens` positions of one sequence.

    Windows keep no more positions than their size; ranks that share tokens keep their own. Of latent attention, keys
    and values of every head are kept, as attention reads them; transformers keeps what they are made of, which is less.
    """
    shared = program.mesh.get("sp", 1)
    return sum(
        shape.layers
        * shape.kv_heads
        * (shape.head_dim + shape.value_dim)
        * -(-min(tokens, shape.window or tokens) // shared)
        for shape in attention_shapes(program, storing=True)
    ) + _remembered(program, tokens)


def _width(shape: Value) -> int:
    return math.prod(s for s in shape if isinstance(s, int)) if is_shape(shape) else 0


def _widths(module: Module) -> int:
    """Elements per token that the projections of one module make together, on this rank."""
    if isinstance(module, Leaf):
        return int(module.options.get("out_features") or module.options.get("nf") or "0")
    if isinstance(module, Opaque):
        return 0  # what it makes inside is not known
    own = sum(_widths(m) for m in module.modules.values())
    for node in module.graph.nodes:
        if node.target is ops.experts:  # each token passes top-k experts, three values of the intermediate size in each
            down, chosen = args_of(node)[4], args_of(node)[1].meta["val"].shape[-1]
            own += 3 * int(chosen) * module.parameters[str(down.target)][1 if node.kwargs.get("transposed") else 2]
    return own
