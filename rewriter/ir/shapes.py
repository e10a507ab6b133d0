"""The shape of every value of a wiring, with "B" (batch), "S" (tokens) and "N" (batch · tokens) for dynamic sizes.

Bodies carry the values that they were traced with; leaves say their widths; what stands between is glue. In a sharded
program the shapes are a rank's own: "S/4" and "N/4" where 4 ranks share the tokens of a sequence, padding aside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from rewriter.ir import ops
from rewriter.ir.marks import marks
from rewriter.ir.structure import Body, Leaf, Opaque, ProgramData, Shape, args_of, placeholders

Value = Shape | tuple[Shape, ...] | None
# of equal tensors along the last dimension, as passes put them into a wiring
_CAT, _CHUNK = torch.ops.aten.cat.default, torch.ops.aten.chunk.default
_INPUTS: dict[str, Value] = {"input_ids": ("B", "S"), "position_ids": ("B", "S")}


def wiring_shapes(program: ProgramData) -> dict[fx.Node, Value]:
    """Per wiring node: its shape, the shapes of a call that returns several tensors, or None where it is not known."""
    ranks = program.mesh.get("tp", 1)
    shapes: dict[fx.Node, Value] = {}
    bodies: dict[tuple[int, tuple[Value, ...]], Value] = {}  # alike layers are asked once
    for node in program.graph.nodes:
        inputs = tuple(shapes[n] for n in node.all_input_nodes)
        if node.op == "placeholder":
            shapes[node] = _INPUTS.get(str(node.target))
        elif node.op == "output":
            shapes[node] = inputs[0]
        elif node.op == "call_module":
            module = program.modules[str(node.target)]
            if isinstance(module, Leaf):
                shapes[node] = leaf_shape(module, inputs[0])
            elif isinstance(module, Opaque):
                shapes[node] = module.outputs if len(module.outputs) > 1 else module.outputs[0]
            else:
                key = (id(module), inputs)
                if key not in bodies:
                    bodies[key] = _body_shapes(module, inputs)
                shapes[node] = bodies[key]
        elif node.target in (ops.shard_tokens, ops.gather_tokens) and is_shape(inputs[0]):
            shapes[node] = _tokens(inputs[0], args_of(node)[2].ranks if node.target is ops.shard_tokens else 1)
        elif node.target in (ops.all_gather, ops.repeat_shard) and is_shape(inputs[0]):
            shapes[node] = _gathered(inputs[0], int(args_of(node)[2]), ranks)
        elif getattr(node.target, "__name__", "") == "getitem" and isinstance(args_of(node)[1], int):
            several = inputs[0]
            shapes[node] = several[args_of(node)[1]] if several and isinstance(several[0], tuple) else None
        elif isinstance(node.meta.get("val"), torch.Tensor):
            shapes[node] = _named(node.meta["val"].shape, {})
        elif node.op == "call_method" and str(node.target) in _MOVES and is_shape(inputs[0]):
            shapes[node] = _MOVES[str(node.target)](inputs[0], *args_of(node)[1:])
        elif node.target is torch.matmul and is_shape(inputs[0]) and is_shape(inputs[1]):
            shapes[node] = (*(broadcast([inputs[0][:-2], inputs[1][:-2]]) or ()), inputs[0][-2], inputs[1][-1])
        elif node.target is _CAT:
            shapes[node] = _wider(inputs[0], len(inputs))
        elif node.target is _CHUNK:
            count = int(args_of(node)[1])
            piece = _wider(inputs[0], 1, count)
            shapes[node] = (piece,) * count if is_shape(piece) else None
        else:
            shapes[node] = broadcast([s for s in inputs if is_shape(s)])
    return shapes


def stream_shape(program: ProgramData) -> Value:
    """The shape of the residual stream: [B, S, D], [B, S, n, D] of n streams, [B, S, n · D] of n in one; None without
    one."""
    written = next((n for n in program.graph.nodes if marks(n).stream == 1), None)
    return None if written is None else wiring_shapes(program)[written]


def is_shape(value: Value) -> TypeGuard[Shape]:
    return value is not None and all(isinstance(size, (int, str)) for size in value)


def _unsqueezed(shape: Shape, dim: int) -> Shape:
    at = dim % (len(shape) + 1)
    return (*shape[:at], 1, *shape[at:])


def _transposed(shape: Shape, first: int, second: int) -> Shape:
    sizes = list(shape)
    sizes[first], sizes[second] = sizes[second], sizes[first]
    return tuple(sizes)


def _flattened(shape: Shape, start: int = 0, end: int = -1) -> Value:
    start, end = start % len(shape), end % len(shape)
    sizes = [s for s in shape[start : end + 1] if isinstance(s, int)]
    return (*shape[:start], math.prod(sizes), *shape[end + 1 :]) if len(sizes) == end + 1 - start else None


# methods of tensors in a layer's wiring that change sizes
_MOVES: Mapping[str, Callable[..., Value]] = {
    "unsqueeze": _unsqueezed,
    "transpose": _transposed,
    "flatten": _flattened,
}


def _wider(shape: Value, times: int, pieces: int = 1) -> Value:
    """`times` of a shape, or one of `pieces` of it, along its last dimension."""
    if not is_shape(shape) or not isinstance(shape[-1], int):
        return None
    return (*shape[:-1], shape[-1] * times // pieces)


def _gathered(shape: Shape, dim: int, ranks: int) -> Shape:
    dim %= len(shape)
    return tuple(s * ranks if i == dim and isinstance(s, int) else s for i, s in enumerate(shape))


def _tokens(shape: Shape, ranks: int) -> Shape:
    """A shape with the symbols of tokens of one of `ranks` ranks that share them."""
    share = f"/{ranks}" if ranks > 1 else ""
    return tuple(s[0] + share if isinstance(s, str) and s[0] in "SN" else s for s in shape)


def leaf_shape(leaf: Leaf, source: Value) -> Value:
    """The shape of a leaf's result, from that of its input."""
    if source is None:
        return None
    if "Embedding" in leaf.kind:
        return (*source, leaf.options["embedding_dim"])
    width = leaf.options.get("out_features", leaf.options.get("nf"))
    return source if width is None else (*source[:-1], width)


def broadcast(shapes: Sequence[Value]) -> Value:
    """The shape of a pointwise result; sizes of 1 stretch."""
    result: tuple[Any, ...] = ()
    for shape in shapes:
        assert shape is not None
        longer, shorter = (shape, result) if len(shape) >= len(result) else (result, shape)
        filled = (1,) * (len(longer) - len(shorter)) + tuple(shorter)
        result = tuple(b if a == 1 else a for a, b in zip(longer, filled, strict=True))
    return result or None


def _body_shapes(body: Body, inputs: Sequence[Value]) -> Value:
    names: dict[str, str] = {}
    for node, shape in zip(placeholders(body.graph), inputs, strict=False):
        if isinstance(node.meta.get("val"), torch.Tensor) and is_shape(shape):
            for size, symbol in zip(node.meta["val"].shape, shape or (), strict=False):
                if isinstance(size, torch.SymInt) and isinstance(symbol, str):
                    names[str(size)] = symbol
    result = args_of(body.graph.output_node())[0]
    if isinstance(result, fx.Node):
        return _named(result.meta["val"].shape, names)
    return tuple(_named(n.meta["val"].shape, names) for n in result)


def _named(shape: Sequence[Any], names: Mapping[str, str]) -> Shape:
    """Sizes as ints and symbols; a product of symbols is "N"."""
    share = next((name[1:] for name in names.values() if name[0] in "SN"), "")

    def symbol(text: str) -> str:
        return names.get(text, ("N" if "*" in text else "S") + share)

    return tuple(symbol(str(s)) if isinstance(s, torch.SymInt) else int(s) for s in shape)
