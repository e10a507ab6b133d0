"""Meaning of every operator of a graph: one table for all analyses.

`TABLE` has a row per operator: an ATen overload, a function of `ir.ops`, of Python's `operator`, or of torch. A row
names the operator's kind, and what its arguments mean where torch's schema does not say it: which ones carry the
data, which are the factors of a product, which hold the sizes of the result. Arguments that the schema names (`dim`,
`start`, `dtype`) are read through `argument` and `dims_of`, with the schema's defaults.

To add an operator, find the kind below that describes it and add its overload to that row. If no analysis may look
through it, leave it out: every reader refuses an operator that has no row. Operators that torch tags as pointwise need
no row, unless `function` has to tell which one it is. A new kind needs a line in `Kind` and a rule in `token_locality`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx

from rewriter.ir import args_of, ops

aten = torch.ops.aten

Kind = Literal[
    # operators that move elements and compute nothing
    "view",  # other sizes, elements in the same order
    "permutation",  # dimensions in another order
    "copy",  # the same values in other memory
    "complex",  # pairs of real numbers as complex ones, or back
    "expansion",  # elements repeated
    "piece",  # a part of the elements, or several parts
    "join",  # several tensors one after the other
    "stack",  # several tensors along a new dimension
    "shift",  # elements moved along a dimension
    "difference",  # neighbours subtracted
    # operators that compute each element alone
    "alias",  # the argument itself
    "cast",  # another dtype or device
    "pointwise",
    "activation",  # a pointwise nonlinearity, called by name in a layer
    # operators that compute along dimensions
    "reduction",  # one value for many
    "scan",  # as many values as before
    "top",  # the k largest
    "normalization",
    "product",
    "convolution",
    # operators that choose by index
    "lookup",
    "one_hot",
    "scatter",
    # the rest
    "pad",
    "creation",  # a tensor from sizes and numbers
    "creation_like",  # the same, with dtype, device or sizes of another tensor
    "count",  # 0, 1, 2, …
    "size",  # a number: the size of a dimension
    "collective",
    "recurrence",  # a state that goes from token to token, and convolutions over tokens
]
_MOVING = frozenset({"view", "permutation", "copy", "complex", "expansion", "piece", "join", "stack"})


@dataclass(frozen=True)
class Operator:
    """A row. Positions count the arguments from 0.

    `function` names what is computed, where readers tell operators of a kind apart. `data` are the arguments whose
    values flow into the result (None: every tensor). `sizes` holds the sizes of the result. `factors` are the two of a
    product, `bias` what is added to it; `transposed` says that the second factor is taken as its transpose. `fill` is
    the number in a created tensor, `fill_at` the argument that holds it; neither: its values are undefined. `local`:
    whether it can run on a rank's shard, once its sizes and bounds are the shard's (`placement_rules.localize`).
    """

    kind: Kind
    function: str = ""
    data: tuple[int, ...] | None = None
    sizes: int | None = None
    factors: tuple[int, int] = (0, 1)
    bias: int | None = None
    transposed: bool = False
    fill: float | None = None
    fill_at: int | None = None
    local: bool = True

    @property
    def creates(self) -> bool:
        """True if the result depends on sizes and numbers alone."""
        return self.kind in ("creation", "creation_like")

    @property
    def is_filled(self) -> bool:
        """True if every element of the result has a value."""
        return self.fill is not None or self.fill_at is not None


def _overloads(*names: str) -> list[Any]:
    return [getattr(getattr(aten, name), overload) for name in names for overload in getattr(aten, name).overloads()]


_ROWS: tuple[tuple[Operator, list[Any]], ...] = (
    # --- movement
    (Operator("view", sizes=1), [aten.view.default, aten.reshape.default, aten._unsafe_view.default]),
    (Operator("view", sizes=2), [aten.unflatten.int]),
    (Operator("view"), [aten.flatten.using_ints, aten.unsqueeze.default, aten.squeeze.dim]),
    (Operator("permutation"), [aten.transpose.int, aten.permute.default, aten.movedim.int, aten.t.default,
                               aten.swapaxes.default]),
    (Operator("copy"), [aten.contiguous.default, aten.clone.default]),
    (Operator("complex"), [aten.view_as_complex.default, aten.view_as_real.default]),
    (Operator("expansion", sizes=1), [aten.expand.default]),
    (Operator("expansion"), [aten.repeat_interleave.self_int, aten.repeat.default]),
    (Operator("piece"), [aten.slice.Tensor, aten.select.int, aten.chunk.default, aten.split.Tensor,
                         aten.split_with_sizes.default, operator.getitem]),
    (Operator("piece", local=False), [aten.narrow.default, aten.unbind.int]),
    (Operator("join"), [aten.cat.default, aten.concat.default]),
    (Operator("stack"), [aten.stack.default]),
    (Operator("shift", local=False), [aten.flip.default, aten.roll.default, aten.unfold.default]),
    (Operator("difference"), [aten.diff.default]),
    # --- one element at a time
    (Operator("alias"), [aten.alias.default, aten.detach.default, aten.detach_.default, aten.lift_fresh_copy.default]),
    (Operator("cast", data=(0,)), [ops.type_as_model, aten.type_as.default, aten.to.dtype, aten.to.dtype_layout,
                                   aten.to.device, aten.to.other, aten._to_copy.default]),
    (Operator("pointwise", "add"), [aten.add.Tensor, aten.add.Scalar, operator.add, operator.iadd, torch.add]),
    (Operator("pointwise", "sub"), [aten.sub.Tensor, aten.sub.Scalar, operator.sub]),
    (Operator("pointwise", "mul"), [aten.mul.Tensor, aten.mul.Scalar, operator.mul, operator.imul, torch.mul]),
    (Operator("pointwise", "div"), [aten.div.Tensor, aten.div.Scalar, operator.truediv]),
    (Operator("pointwise", "neg"), [aten.neg.default, operator.neg]),
    (Operator("pointwise", "tanh"), [aten.tanh.default]),
    (Operator("pointwise", "floor"), [aten.maximum.default, aten.max.other, aten.clamp.default,
                                      aten.clamp_min.default]),
    (Operator("pointwise", "masked_fill"), [aten.masked_fill.Scalar, aten.masked_fill.Tensor]),
    (Operator("pointwise", "where"), [aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf]),
    (Operator("pointwise"), [aten.polar.default, aten.complex.default, operator.pow, ops.dropout, ops.copy_to_group]),
    (Operator("activation"), [F.gelu, F.relu, F.silu, torch.relu, torch.tanh]),
    # --- along dimensions
    (Operator("reduction", "sum"), [aten.sum.dim_IntList, aten.sum.default]),
    (Operator("reduction", "mean"), [aten.mean.dim, aten.mean.default]),
    (Operator("reduction", "largest"), [aten.max.default, aten.max.dim, aten.amax.default]),
    (Operator("reduction"), [
        aten.amin.default, aten.min.default, aten.min.dim, aten.any.dim, aten.any.default, aten.all.dim,
        aten.all.default, aten.argmax.default, aten.argmin.default, aten.logsumexp.default, aten.prod.default,
        aten.prod.dim_int, aten.var.correction, aten.std.correction, aten.linalg_vector_norm.default,
        aten.norm.ScalarOpt_dim]),
    (Operator("scan", "softmax"), [aten.softmax.int, aten._softmax.default]),
    (Operator("scan", "count"), [aten.cumsum.default]),
    (Operator("scan"), [aten.log_softmax.int, aten._log_softmax.default, aten.cumprod.default, aten.sort.default,
                        aten.argsort.default, aten.logcumsumexp.default]),
    (Operator("top"), [aten.topk.default]),
    (Operator("normalization", sizes=1), [aten.layer_norm.default, aten.rms_norm.default]),
    (Operator("product"), [aten.mm.default, aten.bmm.default, aten.matmul.default, torch.matmul]),
    (Operator("product", bias=2, transposed=True), [aten.linear.default]),
    (Operator("product", bias=0, factors=(1, 2)), [aten.addmm.default, aten.baddbmm.default]),
    (Operator("convolution"), _overloads("convolution", "conv1d", "conv2d", "conv3d", "_convolution")),
    # --- by index
    (Operator("lookup"), [aten.embedding.default, aten.index_select.default, aten.gather.default, aten.index.Tensor,
                          ops.vocab_embedding]),
    (Operator("one_hot"), [aten.one_hot.default]),
    (Operator("scatter"), [aten.scatter.src, aten.scatter.value]),
    # --- the rest
    (Operator("pad"), [aten.constant_pad_nd.default, aten.pad.default]),
    (Operator("creation", sizes=0, fill=0.0), [aten.zeros.default]),
    (Operator("creation", sizes=0, fill=1.0), [aten.ones.default]),
    (Operator("creation", sizes=0, fill_at=1), [aten.full.default]),
    (Operator("creation", sizes=0), [aten.empty.memory_format]),
    (Operator("creation_like", sizes=1, fill=0.0), [aten.new_zeros.default]),
    (Operator("creation_like", sizes=1, fill=1.0), [aten.new_ones.default]),
    (Operator("creation_like", sizes=1, fill_at=2), [aten.new_full.default]),
    (Operator("creation_like", sizes=1), [aten.new_empty.default]),
    (Operator("creation_like", fill=0.0), [aten.zeros_like.default, aten.zero.default]),
    (Operator("creation_like", fill=1.0), [aten.ones_like.default]),
    (Operator("creation_like", fill_at=1), [aten.full_like.default, aten.fill.Scalar]),
    (Operator("creation_like"), [aten.empty_like.default]),
    (Operator("count", "count"), _overloads("arange")),
    (Operator("size"), [aten.sym_size.int]),
    (Operator("collective", "sum"), [ops.all_reduce]),
    (Operator("collective", "start"), [ops.all_reduce_start]),
    (Operator("collective", "wait"), [ops.all_reduce_wait]),
    (Operator("collective", "gather"), [ops.all_gather, ops.gather_tokens]),
    (Operator("collective", "agreed"), [ops.agreed]),
    (Operator("pointwise", "where_rewired", data=(1, 2)), [ops.where_rewired]),
    (Operator("collective"), [ops.repeat_shard, ops.own_shard, ops.own_ranges, ops.shard_tokens]),
    (Operator("recurrence"), [*ops.STATEFUL, ops.remember, ops.remember_blocks, ops.block_starts]),
    (Operator("top"), [ops.top_keys]),
)  # fmt: skip

TABLE: Mapping[Any, Operator] = MappingProxyType({target: row for row, targets in _ROWS for target in targets})
# what a method of a tensor computes, as an operator of the table
METHODS: Mapping[str, Any] = MappingProxyType(
    {
        "add": aten.add.Tensor, "add_": aten.add.Tensor, "mul": aten.mul.Tensor, "mul_": aten.mul.Tensor,
        "div": aten.div.Tensor, "div_": aten.div.Tensor, "view": aten.reshape.default,
        "reshape": aten.reshape.default, "transpose": aten.transpose.int, "to": aten.to.dtype, "float": aten.to.dtype,
        "unsqueeze": aten.unsqueeze.default, "flatten": aten.flatten.using_ints,
    }
)  # fmt: skip
_UNKNOWN = Operator("pointwise")


def semantics(target: Any) -> Operator | None:
    """The row of an operator; None where nothing is known of it. Operators that torch tags as pointwise have one."""
    if (known := TABLE.get(target)) is not None:
        return known
    tagged = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return _UNKNOWN if tagged else None


def operator_of(node: fx.Node) -> Operator | None:
    """The row of what a node calls; None for inputs, modules and operators without one."""
    if node.op == "call_method":
        return semantics(METHODS.get(str(node.target)))
    return semantics(node.target) if node.op == "call_function" else None


def kind_of(node: fx.Node) -> Kind | None:
    """The kind of operator that a node calls; None where it has no row."""
    row = operator_of(node)
    return None if row is None else row.kind


def function_of(node: fx.Node) -> str:
    """Name of the function that a node computes; "" where no reader has to know."""
    row = operator_of(node)
    return "" if row is None else row.function


def is_movement(node: fx.Node) -> bool:
    """True if a node moves elements and computes nothing, in a way that a rank can do on its shard."""
    row = operator_of(node)
    return row is not None and row.kind in _MOVING and row.local


def is_pointwise(node: fx.Node) -> bool:
    """True if a node computes each element from those at the same place."""
    return kind_of(node) in ("pointwise", "cast")


def sends(node: fx.Node) -> bool:
    """True if a node begins a collective: an all-reduce or an all-gather, waited for in place or later."""
    return kind_of(node) == "collective" and function_of(node) in ("sum", "start", "gather")


def starts_sum(node: fx.Node) -> bool:
    """True if a node begins an all-reduce, which works in place: it overwrites the partial sum that it is given."""
    return kind_of(node) == "collective" and function_of(node) in ("sum", "start")


def ends_collective(node: fx.Node) -> bool:
    """True if all ranks hold the same value after a node, also where they held different ones before it."""
    return kind_of(node) == "collective" and function_of(node) in ("sum", "wait", "gather", "agreed")


def is_sum(node: fx.Node) -> bool:
    """True if a node is a sum or mean over dimensions that it names: ranks may complete it by an all-reduce."""
    named = kind_of(node) == "reduction" and function_of(node) in ("sum", "mean")
    return named and argument(node, "dim") is not None


def argument(node: fx.Node, name: str) -> Any:
    """An argument of an ATen operator by its schema's name; the schema's default, or None, where it is not given."""
    return named_arguments(node.target, node.args, node.kwargs).get(name)


def named_arguments(target: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an ATen operator by name, with defaults. Torch's schema is read only here."""
    schema = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    return values | {a.name: v for a, v in zip(schema, args, strict=False)} | dict(kwargs)


def slice_bounds(node: fx.Node, size: int) -> tuple[int, int] | None:
    """(begin, end) of a slice of a dimension of `size` elements, from 0 to `size`; None where they are computed."""
    start, end = argument(node, "start"), argument(node, "end")
    bounds = (0 if start is None else start, size if end is None else end)
    if not all(isinstance(b, int) for b in bounds):
        return None
    begin, end = (min(b + size if b < 0 else b, size) for b in bounds)
    return begin, end


def dims_of(node: fx.Node) -> list[Any]:
    """The dimensions that an ATen operator names, as they are given; empty where it names none."""
    given = named_arguments(node.target, node.args, node.kwargs)
    dims: Any = next((given[name] for name in ("dim", "dims", "dimension") if given.get(name) is not None), [])
    return list(dims) if isinstance(dims, (list, tuple)) else [dims]


def factors_of(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The left and the right factor of a product."""
    row = operator_of(node)
    assert row is not None
    return args_of(node)[row.factors[0]], args_of(node)[row.factors[1]]


def data_of(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values flow into a node's result: the others lend a dtype or sizes only."""
    row = operator_of(node)
    if row is None or row.data is None:
        return [n for n in node.all_input_nodes if not asks(n)]
    return [n for n in (args_of(node)[i] for i in row.data) if isinstance(n, fx.Node)]


def asks(node: fx.Node) -> bool:
    """True if a node of a layer's wiring is the shape, a size or the dtype of a value."""
    return node.target is getattr or (node.op, node.target) == ("call_method", "size")
