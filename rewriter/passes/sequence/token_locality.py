"""True if every value of a program belongs to one token, but for what attention reads: then tokens can be sharded.

The graphs of the program as traced are followed with the owners of every value (see `token_rules`) for a small example,
in which sizes of the trace that are dynamic are numbers. Passes put sums, collectives of "tp" and products of the same
values in between, so what holds as traced holds after them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Leaf, Module, Opaque, Program, args_of, ops, placeholders
from rewriter.ir.labels import dynamic
from rewriter.ir.op_semantics import METHODS, aten
from rewriter.passes.sequence.token_rules import (
    BATCH,
    LENGTH,
    Count,
    Mixed,
    Owners,
    alike,
    applied,
    attended,
    chosen_experts,
    flat,
    nobody,
    owned,
    same,
    tokens,
)

# What was found to be right: the wirings, with the modules that they call. Programs do not change.
_checked: WeakKeyDictionary[fx.Graph, Mapping[str, Module]] = WeakKeyDictionary()


def check_tokens(program: Program, who: str = "sequence_parallel") -> None:
    """Raises RewriterError, naming module, operator and reason, where a value needs more than its token's own."""
    source = program.origin or program
    if _checked.get(source.graph) is not source.modules:
        _Follower(source, who).run()
        _checked[source.graph] = source.modules


class _Follower:
    def __init__(self, program: Program, who: str) -> None:
        self.program, self.who = program, who
        # alike layers are followed once
        self.known: dict[int, list[tuple[list[Any], Any]]] = {}

    def run(self) -> None:
        ids = tokens(BATCH, LENGTH, dim=1)
        inputs = [None if n.target == "ctx" else ids for n in placeholders(self.program.graph)]
        logits = self._graph(self.program.graph, inputs, "", None)
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != (BATCH, LENGTH):
            raise RewriterError(f"{self.who}: the model does not return logits of every token")
        if ((logits >= 0) & (logits != tokens(*logits.shape, dim=1))).any():
            raise RewriterError(f"{self.who}: the model returns its tokens' logits in another order. {_NEXT}")

    def _graph(self, graph: fx.Graph, inputs: Sequence[Any], path: str, body: Body | None) -> Any:
        env: dict[fx.Node, Any] = {}
        remaining = iter(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(remaining)
            elif node.op == "output":
                return fx.map_arg(args_of(node)[0], env.__getitem__)
            elif node.op == "get_attr":
                env[node] = self._attribute(node, body)
            elif node.op == "call_module":
                modules = body.modules if body else self.program.modules
                inner = f"{path}.{node.target}" if path else str(node.target)
                env[node] = self._module(modules[str(node.target)], inner, [env[n] for n in args_of(node)])
            else:
                try:
                    env[node] = self._operation(node, env)
                except (Mixed, RuntimeError, IndexError, TypeError) as error:
                    raise RewriterError(self._refusal(path, node, error)) from None
        raise RewriterError("a graph without output")

    def _refusal(self, path: str, node: fx.Node, error: Exception) -> str:
        name = str(node.target) if node.op == "call_method" else _name(node.target)
        reason = str(error) if isinstance(error, Mixed) else "does not fit another number of tokens"
        return f"{self.who}: {path or 'the wiring'}: {name} {reason}. {_NEXT}"

    def _attribute(self, node: fx.Node, body: Body | None) -> Owners:
        name = str(node.target)
        if body is not None and name in body.buffers:
            return nobody(*body.buffers[name].shape)
        shapes: Mapping[str, Any] = body.parameters if body is not None else {}
        return nobody(*(shapes[name] if name in shapes else self.program.parameters[name].shape))

    def _module(self, module: Module, path: str, inputs: list[Any]) -> Any:
        if isinstance(module, Opaque):
            raise RewriterError(
                f"{self.who}: {path} stays the source's own module ({module.class_name}), since {module.reason}. What "
                f"it reads of other tokens is not known. {_NEXT}"
            )
        if isinstance(module, Leaf):
            try:
                return _leaf(module, inputs[0])
            except Mixed as error:
                raise RewriterError(f"{self.who}: {path} ({module.kind}) {error}. {_NEXT}") from None
        for given, result in self.known.setdefault(id(module), []):
            if all(_same(a, b) for a, b in zip(given, inputs, strict=True)):
                return result
        result = self._graph(module.graph, inputs, path, module)
        self.known[id(module)].append((inputs, result))
        return result

    def _operation(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        target: Any = node.target
        args: list[Any] = list(fx.map_arg(args_of(node), env.__getitem__))
        kwargs: dict[str, Any] = dict(fx.map_arg(node.kwargs, env.__getitem__))
        if target is ops.additive_mask:
            reader = next((f", for {u.target}" for u in node.users if u.op == "call_module"), "")
            raise Mixed(f"is the mask as a tensor, of all queries and keys of a call{reader}")
        if target is ops.attention:
            if kwargs.get("sinks") is not None and owned(kwargs["sinks"]):
                raise Mixed("has sinks that depend on tokens")
            return attended(*args[:3])
        if target is ops.experts:
            return chosen_experts(*args[:3])
        if target is aten.sym_size.int or target == "size":
            return _size(args[0], args[1]) if len(args) > 1 else tuple(_size(args[0], d) for d in range(args[0].dim()))
        if target is getattr:
            if args[1] != "shape":
                raise Mixed(f"reads {args[1]!r}")
            return tuple(_size(args[0], d) for d in range(args[0].dim()))
        values = [a for a in (*args, *kwargs.values()) if isinstance(a, (int, float, torch.Tensor, list, tuple))]
        if target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        if getattr(target, "__module__", "") == "_operator" and all(isinstance(v, (int, float)) for v in values):
            result = target(*args)
            return Count(result) if any(isinstance(v, Count) for v in values) else result
        if node.op == "call_method":
            if target not in METHODS:
                raise Mixed("is not known to treat each token on its own")
            target = METHODS[str(target)]
            if not isinstance(args[1], (list, tuple)) and target is aten.reshape.default:
                args = [args[0], args[1:]]
        value = node.meta.get("val")
        given = flat((args, kwargs))
        if value is not None and not any(isinstance(a, Count) or (isinstance(a, Owners) and owned(a)) for a in given):
            return _free(value)
        first = next((n.meta.get("val") for n in node.all_input_nodes), None)
        integral = isinstance(first, torch.Tensor) and not (first.is_floating_point() or first.is_complex())
        return applied(target, args, kwargs, integral)


_NEXT = "Its tokens cannot be sharded: rewrite it without, --sp 1"


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", target))


def _leaf(leaf: Leaf, x: Owners) -> Owners:
    if "Embedding" in leaf.kind:
        return x.unsqueeze(-1).expand(*x.shape, leaf.options["embedding_dim"])
    if leaf.kind == "Dropout":
        return x
    width = leaf.options.get("out_features", leaf.options.get("nf", x.shape[-1]))
    return alike(x, -1, "computes over the tokens of a call").expand(*x.shape[:-1], width)


def _size(owners: Owners, dim: int) -> int:
    """A size; that of a dimension of tokens is a Count."""
    size = owners.shape[dim]
    moved = owners.movedim(dim, 0)
    return Count(size) if (moved != moved[:1]).any() else size


def _free(value: Any) -> Any:
    """Owners of a value that no token takes part in, of the traced shape; dynamic sizes of it are the batch's."""
    if isinstance(value, torch.Tensor):
        return nobody(*(BATCH if dynamic(s) else int(s) for s in value.shape))
    if isinstance(value, (tuple, list)):
        return tuple(_free(v) for v in value)
    return value


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and same(a, b))
