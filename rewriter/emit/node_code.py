"""One IR node as the Python a person would write: ATen operators as methods, functions and infix."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.emit.python_source import attribute, literal
from rewriter.ir import args_of, ops
from rewriter.ir.marks import marks
from rewriter.ir.op_semantics import named_arguments, starts_sum

aten = torch.ops.aten

_INFIX: dict[Any, str] = {
    aten.add.Tensor: "+", aten.sub.Tensor: "-", aten.mul.Tensor: "*", aten.div.Tensor: "/", aten.add.Scalar: "+",
    aten.mul.Scalar: "*", aten.div.Scalar: "/", aten.sub.Scalar: "-", aten.matmul.default: "@",
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.iadd: "+", operator.matmul: "@", torch.add: "+", torch.mul: "*",
    aten.eq.Scalar: "==", aten.ne.Scalar: "!=", aten.gt.Scalar: ">", aten.lt.Scalar: "<", aten.ge.Scalar: ">=",
    aten.le.Scalar: "<=", aten.bitwise_and.Tensor: "&", aten.bitwise_or.Tensor: "|",
}  # fmt: skip

# x.method(*arguments), by the operator's own name
_METHODS = {target: target.overloadpacket.__name__ for target in (
    aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.expand.default, aten.contiguous.default, aten.clone.default, aten.pow.Tensor_Scalar,
    aten.type_as.default, aten.cos.default, aten.sin.default, aten.sigmoid.default, aten.tanh.default,
    aten.exp.default, aten.sqrt.default, aten.rsqrt.default, aten.abs.default, aten.flatten.using_ints,
    aten.clamp.default, aten.masked_fill.Scalar, aten.gather.default, aten.scatter.src, aten.index_select.default,
    aten.select.int, aten.repeat.default, aten.clamp_min.default,
)} | {aten._unsafe_view.default: "view"}  # fmt: skip
# methods whose one list argument is spread: x.view(a, b)
_SPREAD = ("view", "reshape", "permute", "expand")
# torch functions by name
_FUNCTIONS: dict[Any, str] = {
    aten.silu.default: "F.silu", aten.relu.default: "F.relu", aten.gelu.default: "F.gelu",
    aten.linear.default: "F.linear", aten.bmm.default: "torch.bmm",
    aten.view_as_complex.default: "torch.view_as_complex", aten.view_as_real.default: "torch.view_as_real",
    aten.softplus.default: "F.softplus", aten.layer_norm.default: "F.layer_norm", aten.polar.default: "torch.polar",
    aten.reciprocal.default: "torch.reciprocal",
    aten.ones_like.default: "torch.ones_like", aten.full_like.default: "torch.full_like",
}  # fmt: skip


GROUP = "self.tp"  # the group of collectives


class NodePrinter:
    """Prints nodes given the names of their inputs.

    `name` maps a node to its Python expression; `module` and `attribute` give the expression of a called module and
    of a tensor attribute.
    """

    functional = "F"  # torch.nn.functional

    def __init__(
        self,
        name: Callable[[fx.Node], str],
        module: Callable[[str], str] = attribute,
        attribute: Callable[[str], str] = attribute,
    ) -> None:
        self.name, self.module, self.attribute = name, module, attribute

    def value(self, x: Any) -> str:
        return literal(x, lambda item: self.name(item) if isinstance(item, fx.Node) else None)

    def arguments(self, args: Any, kwargs: Mapping[str, Any]) -> str:
        return ", ".join([*map(self.value, args), *(f"{k}={self.value(v)}" for k, v in kwargs.items())])

    def expression(self, node: fx.Node) -> str:
        """The right-hand side for `node`; infix results are not parenthesised."""
        if node.op == "call_module":
            return f"{self.module(str(node.target))}({self.arguments(node.args, {})})"
        if node.op == "get_attr":
            return self.attribute(str(node.target))
        if node.op == "call_method":
            return f"{self.atom(args_of(node)[0])}.{node.target}({self.arguments(args_of(node)[1:], node.kwargs)})"
        return self._function(node)

    def atom(self, x: Any) -> str:
        """A value that a method call or an index may follow."""
        text = self.value(x)
        return f"({text})" if isinstance(x, fx.Node) and is_infix(x) and not text.isidentifier() else text

    def _function(self, node: fx.Node) -> str:
        target: Any = node.target
        args, kwargs = node.args, dict(node.kwargs)
        if kwargs.get("device") == "like":
            kwargs["device"] = None
        if target is getattr:  # between a layer's children: x.shape
            return f"{self.atom(args[0])}.{args[1]}"
        if target in _INFIX and not kwargs and len(args) == 2:
            return f"{self.atom(args[0])} {_INFIX[target]} {self.atom(args[1])}"
        if target is aten.neg.default:
            return f"-{self.atom(args[0])}"
        if target is aten.rsub.Scalar:
            return f"{self.value(args[1])} - {self.atom(args[0])}"
        if target in _METHODS:
            return self._method(_METHODS[target], args, kwargs)
        if (special := _SPECIAL.get(node.target)) is not None:
            return special(self, node)
        if target is aten.layer_norm.default:
            args = args[:5]  # its last one, about cuDNN, is none of the function's
        if function := _FUNCTIONS.get(node.target):
            return f"{function}({self.arguments(args, kwargs)})"
        return f"{self._named(node)}({self.arguments(args, kwargs)})"

    def _named(self, node: fx.Node) -> str:
        """A function of torch by its name."""
        if isinstance(node.target, torch._ops.OpOverload):
            return f"torch.ops.{node.target}"
        name = getattr(node.target, "__name__", "")
        for home, prefix in ((torch.nn.functional, self.functional), (torch, "torch")):
            if getattr(home, name, None) is node.target:
                return f"{prefix}.{name}"
        raise RewriterError(f"{node.name}: {node.target} in a layer's wiring cannot be written as Python")

    def _method(self, method: str, args: Any, kwargs: Mapping[str, Any]) -> str:
        rest = list(args[1:])
        if method in _SPREAD and len(rest) == 1 and isinstance(rest[0], (list, tuple)):
            rest = list(rest[0])
        return f"{self.atom(args[0])}.{method}({self.arguments(rest, kwargs)})"


def is_effect(node: fx.Node) -> bool:
    """True if a node, or a module that it calls, only stores keys and values."""
    stores = node.target is ops.store_keys or node.target in ops.CACHED - {ops.attention}
    return not node.users and (stores or str(node.target).endswith(".store_keys"))


def is_infix(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in _INFIX or node.target in (aten.neg.default, aten.rsub.Scalar))


def _slice(p: NodePrinter, node: fx.Node) -> str:
    x, dim, start, end, step = (*args_of(node), *(None,) * 5)[:5]
    dim, value = dim or 0, node.meta.get("val")  # between modules nothing says how many dimensions there are
    if value is not None:
        dim, rank = dim % value.dim(), value.dim()
        dim = -1 if dim == rank - 1 and rank > 1 else dim
    stop = None if end is None or (isinstance(end, int) and end >= 1 << 62) else end
    piece = f"{p.value(start) if start else ''}:{'' if stop is None else p.value(stop)}"
    piece += f":{step}" if step not in (None, 1) else ""
    before, after = ("..., ", ", :" * (-dim - 1)) if dim < 0 else (":, " * dim, "")
    return f"{p.atom(x)}[{before}{piece}{after}]"


def _getitem(p: NodePrinter, node: fx.Node) -> str:
    index = args_of(node)[1]
    inner = ", ".join(map(p.value, index)) if isinstance(index, tuple) and index else p.value(index)
    return f"{p.atom(args_of(node)[0])}[{inner}]"


def _cast(p: NodePrinter, node: fx.Node) -> str:
    x, dtype = args_of(node)[:2]
    return f"{p.atom(x)}.float()" if dtype == torch.float32 else f"{p.atom(x)}.to({dtype})"


def _padding(node: fx.Node, place: int) -> str:
    """The row of an embedding that has no gradient, where there is one; ATen's -1 is none."""
    (row,) = args_of(node)[place : place + 1] or [-1]
    return f", padding_idx={row}" if row >= 0 else ""


def _dims(method: str) -> Callable[[NodePrinter, fx.Node], str]:
    def show(p: NodePrinter, node: fx.Node) -> str:
        x, dims, keep = (*args_of(node), False)[:3]
        dims = dims[0] if len(dims) == 1 else tuple(dims)
        return f"{p.atom(x)}.{method}({p.value(dims)}{', keepdim=True' if keep else ''})"

    return show


def _convolution(p: NodePrinter, node: fx.Node) -> str:
    usual = {"stride": [1], "padding": [0], "dilation": [1], "groups": 1}
    given = named_arguments(node.target, node.args, node.kwargs)
    rest = {name: given[name] for name, value in usual.items() if _plain(given[name]) != value}
    return f"F.conv1d({p.arguments((given['input'], given['weight'], given['bias']), rest)})"


def _plain(x: Any) -> Any:
    return list(x) if isinstance(x, (list, tuple)) else x


def _vector_norm(p: NodePrinter, node: fx.Node) -> str:
    given = named_arguments(node.target, node.args, node.kwargs)
    rest = {name: given[name] for name in ("ord", "dim", "keepdim", "dtype") if given[name] not in (None, False)}
    return f"torch.linalg.vector_norm({p.arguments((given['self'],), rest)})"


def _slot(node: fx.Node) -> str:
    """The cache entry of a call, by its number among those of its body."""
    return f"slot=self.slot + {ordinal}" if (ordinal := node.kwargs["slot"]) else "slot=self.slot"


def _attention(p: NodePrinter, node: fx.Node) -> str:
    kwargs = {k: v for k, v in node.kwargs.items() if k not in ("slot", "mask")}
    kwargs.pop("sequence", None)  # whether tokens are sharded differs by call: the context says it
    mask: Any = node.kwargs["mask"]
    rest = "".join(f", {k}={p.value(v)}" for k, v in kwargs.items() if v is not None)
    return f"attention({', '.join(map(p.value, node.args))}, {_slot(node)}, mask={mask.source}{rest})"


def _recurrence(p: NodePrinter, node: fx.Node) -> str:
    options = {k: v for k, v in node.kwargs.items() if k != "slot" and v is not None}
    given = ", ".join([p.arguments(node.args, {}), _slot(node), *(f"{k}={p.value(v)}" for k, v in options.items())])
    return f"{getattr(node.target, '__name__', '')}({given})"


def _top_keys(p: NodePrinter, node: fx.Node) -> str:
    mask: Any = node.kwargs["mask"]
    numbers = "".join(f", {name}={number}" for name, number in node.kwargs.items() if name != "mask")
    return f"top_keys({p.arguments(node.args, {})}, mask={mask.source}{numbers})"


def _on_group(function: str) -> Callable[[NodePrinter, fx.Node], str]:
    """A collective, with a format where it travels quantized."""

    def show(p: NodePrinter, node: fx.Node) -> str:
        x, _, *rest = node.args
        # a sum works in place, and a module that reads the partial too may need it again in backward
        readers = node.all_input_nodes[0].users
        copied = starts_sum(node) and any(user.op == "call_module" or node < user for user in readers)
        items = [f"{p.value(x)}{'.clone()' if copied else ''}", GROUP, *map(p.value, rest)]
        if (tag := marks(node).tag) is not None:
            items.append(f'name="{tag}"')
        if "format" in node.kwargs:
            items.append(f'format="{node.kwargs["format"]}", min_bytes={node.kwargs["min_bytes"]:_}')
        return f"{function}({', '.join(items)})"

    return show


def _along(text: Callable[[NodePrinter, Any, Any], str], place: int = 2) -> Callable[[NodePrinter, fx.Node], str]:
    """A call with the dimension by name, which is the argument at `place`: 0 where it is not given."""

    def show(p: NodePrinter, node: fx.Node) -> str:
        args = args_of(node)
        dim = args[place] if len(args) > place else 0
        return f"{text(p, args[0], args[1] if len(args) > 1 else None)}, dim={dim})"

    return show


_SPECIAL: dict[Any, Callable[[NodePrinter, fx.Node], str]] = {
    aten.slice.Tensor: _slice,
    aten.to.dtype: _cast,
    ops.type_as_model: lambda p, n: f"{p.atom(args_of(n)[0])}.to({p.atom(args_of(n)[1])}.dtype)",
    aten.sym_size.int: lambda p, n: f"{p.atom(args_of(n)[0])}.shape[{args_of(n)[1]}]",
    operator.getitem: _getitem,
    ops.dropout: lambda p, n: (
        f"{p.functional}.dropout({p.value(n.args[0])}, p={p.value(n.args[1])}, training=self.training)"
    ),
    aten.cat.default: _along(lambda p, parts, _: f"torch.cat({p.value(list(parts))}", 1),
    aten.stack.default: _along(lambda p, parts, _: f"torch.stack({p.value(list(parts))}", 1),
    aten.chunk.default: _along(lambda p, x, count: f"{p.atom(x)}.chunk({count}"),
    aten.split.Tensor: _along(lambda p, x, size: f"{p.atom(x)}.split({size}"),
    aten.split_with_sizes.default: _along(lambda p, x, sizes: f"{p.atom(x)}.split({list(sizes)}"),
    aten.mean.dim: _dims("mean"),
    aten.sum.dim_IntList: _dims("sum"),
    aten.softmax.int: lambda p, n: (
        f"F.softmax({p.value(args_of(n)[0])}, dim={args_of(n)[1]}"
        + (f", dtype={args_of(n)[2]})" if len(n.args) > 2 and args_of(n)[2] is not None else ")")
    ),
    aten.topk.default: lambda p, n: f"{p.atom(args_of(n)[0])}.topk({p.arguments(args_of(n)[1:], n.kwargs)})",
    aten.embedding.default: lambda p, n: (
        f"F.embedding({p.value(args_of(n)[1])}, {p.value(args_of(n)[0])}{_padding(n, 2)})"
    ),
    aten.conv1d.default: _convolution,
    aten.linalg_vector_norm.default: _vector_norm,
    ops.attention: _attention,
    **dict.fromkeys(ops.CACHED - {ops.attention}, _recurrence),
    ops.block_starts: lambda p, n: f"block_starts({p.arguments(n.args, {})}, size={n.kwargs['size']})",
    ops.top_keys: _top_keys,
    ops.store_keys: lambda p, n: f"store_keys({p.arguments(n.args, {})}, {_slot(n)})",
    ops.where_rewired: lambda p, n: (
        f"torch.where({p.atom(args_of(n)[0])}[..., None], {p.arguments(args_of(n)[1:], {})})"
    ),
    ops.experts: lambda p, n: f"experts({p.arguments(n.args, n.kwargs)})",
    ops.all_reduce: _on_group("all_reduce"),
    ops.all_reduce_start: _on_group("all_reduce_start"),
    ops.all_reduce_wait: lambda p, n: f"all_reduce_wait({p.value(args_of(n)[0])})",
    ops.copy_to_group: _on_group("copy_to_group"),
    ops.agreed: _on_group("agreed"),
    ops.all_gather: _on_group("all_gather"),
    ops.repeat_shard: _on_group("repeat_shard"),
    ops.own_shard: _on_group("own_shard"),
    ops.own_ranges: _on_group("own_ranges"),
    ops.shard_tokens: lambda p, n: f"shard_tokens({p.value(args_of(n)[0])}, ctx)",
    ops.gather_tokens: lambda p, n: f"gather_tokens({p.value(args_of(n)[0])}, ctx)",
    ops.vocab_embedding: lambda p, n: (
        f"vocab_embedding({p.value(args_of(n)[0])}, {p.value(args_of(n)[1])}, {GROUP}{_padding(n, 3)})"
    ),
}
