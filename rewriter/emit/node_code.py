"""One IR node as the Python a person would write: ATen operators as methods, functions and infix."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from rewriter import ops
from rewriter.ir import args_of
from rewriter.ir.marks import marks

aten = torch.ops.aten

_INFIX: dict[Any, str] = {
    aten.add.Tensor: "+", aten.sub.Tensor: "-", aten.mul.Tensor: "*", aten.div.Tensor: "/", aten.add.Scalar: "+",
    aten.mul.Scalar: "*", aten.div.Scalar: "/", aten.sub.Scalar: "-", aten.matmul.default: "@",
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.iadd: "+", torch.add: "+", torch.mul: "*",
    aten.eq.Scalar: "==", aten.ne.Scalar: "!=", aten.gt.Scalar: ">", aten.lt.Scalar: "<", aten.ge.Scalar: ">=",
    aten.le.Scalar: "<=", aten.bitwise_and.Tensor: "&", aten.bitwise_or.Tensor: "|",
}  # fmt: skip

# x.method(*arguments)
_METHODS = {
    aten.view.default: "view", aten.reshape.default: "reshape", aten._unsafe_view.default: "view",
    aten.transpose.int: "transpose", aten.permute.default: "permute", aten.unsqueeze.default: "unsqueeze",
    aten.squeeze.dim: "squeeze", aten.expand.default: "expand", aten.contiguous.default: "contiguous",
    aten.clone.default: "clone", aten.pow.Tensor_Scalar: "pow",
    aten.type_as.default: "type_as", aten.cos.default: "cos", aten.sin.default: "sin",
    aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh", aten.exp.default: "exp", aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt", aten.abs.default: "abs", aten.flatten.using_ints: "flatten",
    aten.clamp.default: "clamp",
    aten.masked_fill.Scalar: "masked_fill", aten.gather.default: "gather", aten.scatter.src: "scatter",
    aten.index_select.default: "index_select", aten.select.int: "select",
}  # fmt: skip
# methods whose one list argument is spread: x.view(a, b)
_SPREAD = ("view", "reshape", "permute", "expand")
# torch functions by name
_FUNCTIONS: dict[Any, str | None] = {
    aten.silu.default: "F.silu", aten.relu.default: "F.relu", aten.gelu.default: "F.gelu",
    aten.linear.default: "F.linear", aten.bmm.default: "torch.bmm",
    aten.view_as_complex.default: "torch.view_as_complex", aten.view_as_real.default: "torch.view_as_real",
    aten.softplus.default: "F.softplus", aten.embedding.default: None, aten.layer_norm.default: "F.layer_norm",
}  # fmt: skip


class Printer:
    """Prints nodes given the names of their inputs.

    `name` maps a node to its Python expression; `module` and `attribute` give the expression of a called module and
    of a tensor attribute. Groups of collectives print as `group`.
    """

    def __init__(
        self,
        name: Callable[[fx.Node], str],
        module: Callable[[str], str],
        attribute: Callable[[str], str],
        group: str,
        slot: str = "self.slot",
    ) -> None:
        self.name, self.module, self.attribute, self.group, self.slot = name, module, attribute, group, slot

    def value(self, x: Any) -> str:
        if isinstance(x, fx.Node):
            return self.name(x)
        if isinstance(x, (list, tuple)):
            inner = ", ".join(map(self.value, x))
            return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' if len(x) == 1 else ''})"
        if isinstance(x, torch.dtype):
            return str(x)
        if isinstance(x, float) and not math.isfinite(x):
            return f'float("{x}")'
        return f'"{x}"' if isinstance(x, str) else repr(x)

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
        if target in (aten.rsub.Scalar,):
            return f"{self.value(args[1])} - {self.atom(args[0])}"
        if target in _METHODS:
            return self._method(_METHODS[target], args, kwargs)
        if (special := _SPECIAL.get(node.target)) is not None:
            return special(self, node)
        if function := _FUNCTIONS.get(node.target):
            return f"{function}({self.arguments(args, kwargs)})"
        if getattr(target, "__module__", "") in ("torch", "torch._C._nn", "torch.nn.functional"):
            place = "F" if "functional" in target.__module__ else "torch"
            return f"{place}.{target.__name__}({self.arguments(args, kwargs)})"
        return f"torch.ops.{target!s}({self.arguments(args, kwargs)})"

    def _method(self, method: str, args: Any, kwargs: Mapping[str, Any]) -> str:
        rest = list(args[1:])
        if method in _SPREAD and len(rest) == 1 and isinstance(rest[0], (list, tuple)):
            rest = list(rest[0])
        return f"{self.atom(args[0])}.{method}({self.arguments(rest, kwargs)})"


def is_infix(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in _INFIX or node.target in (aten.neg.default, aten.rsub.Scalar))


def _slice(p: Printer, node: fx.Node) -> str:
    x, dim, start, end, step = (*args_of(node), *(None,) * 5)[:5]
    rank = node.meta["val"].dim()
    dim = (dim or 0) % rank
    stop = None if end is None or (isinstance(end, int) and end >= 1 << 62) else end
    piece = f"{p.value(start) if start else ''}:{'' if stop is None else p.value(stop)}"
    piece += f":{step}" if step not in (None, 1) else ""
    before = "..., " if dim == rank - 1 and rank > 1 else ":, " * dim
    return f"{p.atom(x)}[{before}{piece}]"


def _cast(p: Printer, node: fx.Node) -> str:
    dtype = args_of(node)[1]
    return (
        f"{p.atom(args_of(node)[0])}.float()" if dtype == torch.float32 else f"{p.atom(args_of(node)[0])}.to({dtype})"
    )


def _dims(method: str) -> Callable[[Printer, fx.Node], str]:
    def show(p: Printer, node: fx.Node) -> str:
        x, dims, keep = (*args_of(node), False)[:3]
        dims = dims[0] if len(dims) == 1 else tuple(dims)
        return f"{p.atom(x)}.{method}({p.value(dims)}{', keepdim=True' if keep else ''})"

    return show


def _attention(p: Printer, node: fx.Node) -> str:
    kwargs = dict(node.kwargs)
    kwargs.pop("sequence", None)  # whether tokens are sharded differs by call: the context says it
    ordinal = kwargs.pop("slot")
    mask = kwargs.pop("mask")
    slot = p.slot if not ordinal else f"{p.slot} + {ordinal}"
    rest = "".join(f", {k}={p.value(v)}" for k, v in kwargs.items() if v is not None)
    return f"attention({', '.join(map(p.value, node.args))}, slot={slot}, mask={mask.source}{rest})"


def _on_group(function: str) -> Callable[[Printer, fx.Node], str]:
    def show(p: Printer, node: fx.Node) -> str:
        x, _, *rest = node.args
        name = f', name="{marks(node).tag}"' if marks(node).tag is not None else ""
        return f"{function}({', '.join([p.value(x), p.group, *map(p.value, rest)])}{name})"

    return show


def _reduction(function: str) -> Callable[[Printer, fx.Node], str]:
    """A sum over the group, with a format where it travels quantized."""
    call = _on_group(function)

    def show(p: Printer, node: fx.Node) -> str:
        if not node.kwargs:
            return call(p, node)
        options = f'format="{node.kwargs["format"]}", min_bytes={node.kwargs["min_bytes"]:_}'
        return f"{call(p, node).removesuffix(')')}, {options})"

    return show


_SPECIAL: dict[Any, Callable[[Printer, fx.Node], str]] = {
    aten.slice.Tensor: _slice,
    aten.to.dtype: _cast,
    ops.type_as_model: lambda p, n: f"{p.atom(args_of(n)[0])}.to({p.atom(args_of(n)[1])}.dtype)",
    aten.sym_size.int: lambda p, n: f"{p.atom(args_of(n)[0])}.shape[{args_of(n)[1]}]",
    operator.getitem: lambda p, n: f"{p.atom(args_of(n)[0])}[{p.value(args_of(n)[1])}]",
    aten.cat.default: lambda p, n: f"torch.cat({p.value(list(args_of(n)[0]))}, dim={(*args_of(n), 0)[1]})",
    aten.stack.default: lambda p, n: f"torch.stack({p.value(list(args_of(n)[0]))}, dim={(*args_of(n), 0)[1]})",
    aten.chunk.default: lambda p, n: f"{p.atom(args_of(n)[0])}.chunk({args_of(n)[1]}, dim={(*args_of(n), 0)[2]})",
    aten.split.Tensor: lambda p, n: f"{p.atom(args_of(n)[0])}.split({args_of(n)[1]}, dim={(*args_of(n), 0)[2]})",
    aten.split_with_sizes.default: lambda p, n: (
        f"{p.atom(args_of(n)[0])}.split({list(args_of(n)[1])}, dim={(*args_of(n), 0)[2]})"
    ),
    aten.mean.dim: _dims("mean"),
    aten.sum.dim_IntList: _dims("sum"),
    aten.softmax.int: lambda p, n: (
        f"F.softmax({p.value(args_of(n)[0])}, dim={args_of(n)[1]}"
        + (f", dtype={args_of(n)[2]})" if len(n.args) > 2 and args_of(n)[2] is not None else ")")
    ),
    aten.topk.default: lambda p, n: f"{p.atom(args_of(n)[0])}.topk({p.arguments(args_of(n)[1:], n.kwargs)})",
    aten.embedding.default: lambda p, n: f"F.embedding({p.value(args_of(n)[1])}, {p.value(args_of(n)[0])})",
    ops.attention: _attention,
    ops.experts: lambda p, n: f"experts({p.arguments(n.args, n.kwargs)})",
    ops.all_reduce: _reduction("all_reduce"),
    ops.all_reduce_start: _reduction("all_reduce_start"),
    ops.all_reduce_wait: lambda p, n: f"all_reduce_wait({p.value(args_of(n)[0])})",
    ops.copy_to_group: _on_group("copy_to_group"),
    ops.all_gather: _on_group("all_gather"),
    ops.repeat_shard: _on_group("repeat_shard"),
    ops.own_shard: _on_group("own_shard"),
    ops.shard_tokens: lambda p, n: f"shard_tokens({p.value(args_of(n)[0])}, ctx)",
    ops.gather_tokens: lambda p, n: f"gather_tokens({p.value(args_of(n)[0])}, ctx)",
    ops.vocab_embedding: lambda p, n: f"vocab_embedding({p.value(args_of(n)[0])}, {p.value(args_of(n)[1])}, {p.group})",
}
