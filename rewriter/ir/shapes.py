"""The shape of every value of a wiring, with "B" (batch), "S" (tokens) and "N" (batch · tokens) for dynamic sizes.

Bodies carry the values that they were traced with; leaves say their widths; what stands between is glue. In a sharded
program the shapes are a rank's own: "S/4" and "N/4" where 4 ranks share the tokens of a sequence, padding aside. What a
body returns beside its first result (keys that later layers read) has the sizes that it was traced with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from rewriter.ir import ops
from rewriter.ir.marks import marks
from rewriter.ir.phases import REWIRED
from rewriter.ir.structure import Body, Leaf, Module, Opaque, ProgramData, Shape, args_of, placeholders

Value = Shape | tuple[Shape, ...] | None
_INPUTS = {"input_ids": torch.int64, "position_ids": torch.int64, REWIRED: torch.bool}  # of [B, S]
_UNKNOWN = (TypeError, ValueError, AttributeError, IndexError, RuntimeError)  # of a value that is not known


def wiring_shapes(program: ProgramData) -> dict[fx.Node, Value]:
    """Per wiring node: its shape, the shapes of a call that returns several tensors, or None where it is not known.

    What stands between modules is computed on tensors without data, of sizes that stand for the symbols.
    """
    sizes = _Sizes(program.mesh.get("sp", 1))
    values: dict[fx.Node, Any] = {}
    shapes: dict[fx.Node, Value] = {}
    bodies: dict[tuple[int, tuple[Value, ...]], Value] = {}  # alike layers are asked once
    for node in program.graph.nodes:
        inputs = tuple(shapes[n] for n in node.all_input_nodes)
        if node.op == "placeholder":
            kind = _INPUTS.get(str(node.target))
            values[node] = None if kind is None else sizes.value(("B", "S"), kind)
        elif node.op == "get_attr":
            known = program.parameters.get(str(node.target))
            values[node] = None if known is None else sizes.value(tuple(known.shape))
        elif node.op == "output":
            values[node] = values[node.all_input_nodes[0]]
        elif node.op == "call_module":
            key = (id(program.modules[str(node.target)]), inputs)
            if key not in bodies:
                bodies[key] = _module_shapes(program.modules[str(node.target)], inputs)
            values[node] = sizes.value(bodies[key])
        elif node.target in _OF_RANKS:
            values[node] = sizes.value(_of_rank(node, inputs[0], program.mesh))
        elif isinstance(node.meta.get("val"), torch.Tensor):
            values[node] = sizes.value(_named(node.meta["val"].shape, {}))
        else:
            try:
                values[node] = _computed(node, values)
            except _UNKNOWN:
                values[node] = None
        shapes[node] = sizes.shape(values[node])
    return shapes


class _Sizes:
    """Numbers that stand for the symbols of sizes: primes, which no width of a model is likely to be."""

    def __init__(self, ranks: int) -> None:
        batch, tokens, share = 100_003, 200_003, 300_007
        self.numbers: dict[int | str, int] = {f"S/{ranks}": share, f"N/{ranks}": batch * share} if ranks > 1 else {}
        self.numbers |= {"B": batch, "S": tokens, "N": batch * tokens}
        self.names = {number: name for name, number in self.numbers.items()}

    def value(self, shape: Value, dtype: torch.dtype = torch.float32) -> Any:
        """A tensor without data, or a tuple of them."""
        if shape is None:
            return None
        if is_shape(shape):
            return torch.empty([int(self.numbers.get(size, size)) for size in shape], dtype=dtype, device="meta")
        return tuple(self.value(each, dtype) for each in shape if not isinstance(each, int | str))

    def shape(self, value: Any) -> Value:
        if isinstance(value, torch.Tensor):
            return tuple(self.names.get(size, size) for size in value.shape)
        if isinstance(value, tuple | list) and all(isinstance(each, torch.Tensor) for each in value):
            return tuple(tuple(self.names.get(size, size) for size in each.shape) for each in value)
        return None


def _computed(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """The result of a function or method of torch, or of an operator of the IR that keeps sizes, on `values`."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    schema = getattr(node.target, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if "device" in names[: len(args)]:
        args = (*args[: names.index("device")], "meta", *args[names.index("device") + 1 :])
    elif "device" in (*names, *kwargs):  # also where the call names none: what it makes would hold billions of numbers
        kwargs = {**kwargs, "device": "meta"}
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


_OF_RANKS = (ops.shard_tokens, ops.gather_tokens, ops.all_gather, ops.repeat_shard, ops.own_shard)


def _of_rank(node: fx.Node, shape: Value, mesh: Mapping[str, int]) -> Value:
    """The shape of what a rank makes of `shape` where it takes a part, or is sent the others'."""
    if not is_shape(shape):
        return None
    if node.target in (ops.shard_tokens, ops.gather_tokens):
        share = f"/{args_of(node)[2].ranks}" if node.target is ops.shard_tokens else ""
        return tuple(s[0] + share if isinstance(s, str) and s[0] in "SN" else s for s in shape)
    dim, ranks = int(args_of(node)[2]) % len(shape), mesh.get(args_of(node)[1], 1)
    size = shape[dim]
    if isinstance(size, int):
        size = size // ranks if node.target is ops.own_shard else size * ranks
    return (*shape[:dim], size, *shape[dim + 1 :])


def _module_shapes(module: Module, inputs: Sequence[Value]) -> Value:
    if isinstance(module, Leaf):
        return leaf_shape(module, inputs[0])
    if isinstance(module, Opaque):
        return module.outputs if len(module.outputs) > 1 else module.outputs[0]
    return _body_shapes(module, inputs)


def stream_shape(program: ProgramData) -> Value:
    """The shape of the residual stream: [B, S, D], [B, S, n, D] of n streams, [B, S, n · D] of n in one; None without
    one."""
    written = next((n for n in program.graph.nodes if marks(n).stream == 1), None)
    return None if written is None else wiring_shapes(program)[written]


def is_shape(value: Value) -> TypeGuard[Shape]:
    return value is not None and all(isinstance(size, (int, str)) for size in value)


def leaf_shape(leaf: Leaf, source: Value) -> Value:
    """The shape of a leaf's result, from that of its input."""
    if source is None:
        return None
    if "Embedding" in leaf.kind:
        return (*source, leaf.options["embedding_dim"])
    width = leaf.options.get("out_features", leaf.options.get("nf"))
    return source if width is None else (*source[:-1], width)


def _body_shapes(body: Body, inputs: Sequence[Value]) -> Value:
    names: dict[str, str] = {}
    traced: list[Any] = [node.meta.get("val") for node in placeholders(body.graph)]
    for value, shape in zip(traced, inputs, strict=False):
        if isinstance(value, torch.Tensor) and is_shape(shape):
            for size, symbol in zip(list[Any](value.shape), shape, strict=False):
                if isinstance(size, torch.SymInt) and isinstance(symbol, str):
                    names[str(size)] = symbol
    result = args_of(body.graph.output_node())[0]
    if isinstance(result, fx.Node):
        shape = result.meta["val"].shape
        given = [value.shape for value in traced[:1] if isinstance(value, torch.Tensor)]
        if given and str(shape) == str(given[0]) and not (body.modules or body.parameters):
            return inputs[0]  # an activation, on channels of a rank's own
        return _named(shape, names)
    return tuple(_named(n.meta["val"].shape, names) for n in result)


def _named(shape: Sequence[Any], names: Mapping[str, str]) -> Shape:
    """Sizes as ints and symbols; a product of symbols is "N", and of two that have no name the first is "B"."""
    share = next((name[1:] for name in names.values() if name[0] in "SN"), "")
    symbols = [place for place, size in enumerate(shape) if isinstance(size, torch.SymInt)]

    def symbol(place: int, text: str) -> str:
        rows = len(symbols) > 1 and place == symbols[0]
        return names.get(text, "N" + share if "*" in text else "B" if rows else "S" + share)

    return tuple(symbol(place, str(s)) if place in symbols else int(s) for place, s in enumerate(shape))
