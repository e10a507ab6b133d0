"""A module of a program on meta tensors: which kernels it runs, and what they compute and move.

It is run as it stands, with a rank's own shapes, so that all that can be emitted can be counted. A value is known by
its storage: views move nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from rewriter.ir import Body, Leaf, Module, Opaque, args_of, ops
from rewriter.ir.op_semantics import operator_of
from rewriter.predict.attention_cost import attention_items, cache_kernels
from rewriter.predict.cache_only import of_keys
from rewriter.predict.kernel_cost import (
    CostedOperation,
    Item,
    Kernel,
    ModuleExchange,
    as_launched,
    axis_group,
    fused,
    measured_as,
)
from rewriter.predict.mixer_cost import recurrence_items
from rewriter.predict.workload import ForwardPass

EXPERTS = "experts"  # the name of their products
_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "softmax", "logsumexp", "norm", "var", "std", "argmax", "topk")


class ModuleRun:
    """Runs one module, or one operator of the wiring. `mesh`: sizes of the axes that the rank is part of; `names`:
    of the model's weights that are of the format of `given`, those of the module."""

    def __init__(
        self, given: ForwardPass, dtype: torch.dtype, mesh: Mapping[str, int], names: Collection[str] = ()
    ) -> None:
        self.given, self.dtype, self.mesh, self.names = given, dtype, mesh, names
        self.operations: list[CostedOperation] = []
        self.weights: set[Hashable] = set()
        self.stored: set[Hashable] = set()  # those of `given.weights`
        self.biased = False  # whether attention had a position bias
        self.alive: list[Any] = []  # keeps storages, by which values are known, from being used again

    def items(self, value: Any) -> tuple[Item, ...]:
        """Kernels of what has run; `value` is what comes out."""
        if not self.given.fused:
            return tuple(as_launched(self.operations))
        return tuple(fused(self.operations, frozenset(_storage(t) for t in _tensors(value))))

    def module(self, module: Module, path: str, inputs: Sequence[Any]) -> Any:
        if isinstance(module, Leaf):
            return self._leaf(module, path.rpartition(".")[2], inputs[0])
        if isinstance(module, Opaque):
            raise ValueError(module.reason)
        env: dict[fx.Node, Any] = {}
        remaining = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(remaining, None)
            elif node.op == "output":
                result = args_of(node)[0]
                return env[result] if isinstance(result, fx.Node) else tuple(env[n] for n in result)
            else:
                env[node] = self._value(module, node, env)
            self.alive.append(env[node])
        raise ValueError("a graph without output")

    def keys(self, body: Body, inputs: Sequence[Any]) -> None:
        """The part of a module that computes the keys and values of its attention, and stores them."""
        env: dict[fx.Node, Any] = {}
        given = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), inputs, strict=False))
        for node in of_keys(body):
            if node.op == "placeholder":
                env[node] = given.get(node)
            elif node.target is ops.attention:
                k, v = (env[n] for n in args_of(node)[1:3])
                self._record("cache", (k, v), (), items=cache_kernels(k, v))
            else:
                env[node] = self._value(body, node, env)
                self.alive.append(env[node])

    def _value(self, body: Body, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        """A node of a body that is neither an input nor the output."""
        if node.op == "get_attr":
            return self._attribute(body, str(node.target))
        if node.op == "call_module":
            inner = body.modules[str(node.target)]
            return self.module(inner, str(node.target), [env[a] for a in node.all_input_nodes])
        if node.target is ops.all_gather:
            given: Any = fx.map_arg(node.args, env.__getitem__)
            return self._gathered(*given)
        return self.operation(node, env)

    def _attribute(self, body: Body, name: str) -> torch.Tensor:
        if name in body.buffers:
            return torch.empty_like(body.buffers[name], device="meta")
        return self._weight(name, body.parameters[name], body.stored.get(name))

    def _weight(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        weight = torch.empty(tuple(shape), dtype=dtype or self.dtype)
        self.weights.add(_storage(weight))
        if any(f".{full}".endswith(f".{name}") for full in self.names):
            self.stored.add(_storage(weight))
        self.alive.append(weight)
        return weight

    def _leaf(self, leaf: Leaf, name: str, x: torch.Tensor) -> torch.Tensor:
        if leaf.kind == "Dropout":
            return x
        if leaf.kind == "OffloadedEmbedding":  # the host's, whose time is not counted
            return torch.empty(*x.shape, leaf.parameters["weight"][1], dtype=self.dtype)
        weight = self._weight(f"{name}.weight", leaf.parameters["weight"])
        bias = self._weight(f"{name}.bias", leaf.parameters["bias"]) if "bias" in leaf.parameters else None
        if "Embedding" in leaf.kind:
            return self._record(name, (x,), (torch.empty(*x.shape, weight.shape[1], dtype=self.dtype),))
        sources = [x, weight] if bias is None else [x, weight, bias]
        if leaf.kind == "LayerNorm":
            return self._record(name, sources, (torch.empty_like(x),))
        columns = weight.shape[0] if leaf.kind.endswith("Linear") else weight.shape[1]
        out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype)
        return self._record(name, sources, (out,), product=x)

    def operation(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        args: Any = _on_meta(fx.map_arg(node.args, env.__getitem__))
        kwargs: dict[str, Any] = dict(_on_meta(fx.map_arg(node.kwargs, env.__getitem__)))
        target: Any = node.target
        name = getattr(target, "__name__", str(target)).split(".")[0]
        if target is ops.attention:
            q, k, v = args[:3]
            self.biased = self.biased or kwargs.get("bias") is not None or kwargs.get("slopes") is not None
            out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
            ranks = (self.mesh.get("sp", 1), self.mesh.get("tp", 1))
            items = attention_items(q, k, v, kwargs, self.given, ranks)
            return self._record("attention", [q, k, v], (out,), items=items)
        if target in ops.RECURRENT:
            tensors = [t for t in args if isinstance(t, torch.Tensor)]
            out = torch.empty_like(tensors[2] if target is ops.delta_rule else tensors[0])
            if target is ops.preceded:
                out = target(out, None, **kwargs)
            return self._record(name, tensors, (out,), items=recurrence_items(node, tensors, out, self.given))
        if target is ops.own_ranges:
            return args[0].narrow(args[2], 0, sum(end - begin for begin, end in args[3][0]))
        if target is ops.experts:
            items = experts_items(args, kwargs, self.given)
            return self._record("experts", _tensors(args), (torch.empty_like(args[0]),), items=items)
        if target in (ops.all_reduce, ops.all_reduce_start):
            exchange = ModuleExchange("all_reduce", args[1], args[0].nbytes, axis_group(self.mesh, args[1]), "inside")
            return self._record("all_reduce", (args[0],), (args[0].clone(),), items=[exchange])
        if target is ops.vocab_embedding:
            out = torch.empty(*args[0].shape, args[1].shape[1], dtype=self.dtype)
            return self._record(name, (args[0],), (out,))
        if target in (ops.all_gather, ops.repeat_shard):
            return self._repeated(*args[:3])
        if target is ops.own_shard:
            return args[0].narrow(args[2], 0, args[0].shape[args[2]] // self.mesh.get(args[1], 1))
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        if node.op == "call_method":
            target = getattr(type(args[0]), target)
        out = _on_meta(target(*args, **kwargs))
        results = _tensors(out)
        sources = [t for t in _tensors((args, kwargs)) if t.device.type == "meta"]
        if not results or {_storage(t) for t in results} <= {_storage(t) for t in sources}:
            return out  # a view, or a size
        row, product = operator_of(node), None
        if row is not None and row.kind == "product":
            product = args[row.factors[0]]
        elif row is not None and row.kind == "convolution":
            product = args[1][0].flatten()
        if row is not None and row.kind == "lookup":  # it reads as much as it writes, not the full table
            self._record(name, [t for t in sources[1:] if t.dim()], results, also=sum(t.nbytes for t in results))
        else:
            self._record(name, sources, results, product=product)
        return out

    def _gathered(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        """Shards that are gathered inside a module, and put one after the other."""
        group = axis_group(self.mesh, axis)
        exchange = ModuleExchange("all_gather", axis, x.nbytes * len(group), group, "inside")
        return self._repeated(self._record("all_gather", (x,), (x.clone(),), items=[exchange]), axis, dim)

    def _repeated(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        """As many copies as an axis has ranks, side by side: what a gathered tensor looks like."""
        out = torch.cat([x] * self.mesh.get(axis, 1), dim=dim)
        return self._record("cat", (x, out), (out,))

    def _record(
        self,
        name: str,
        sources: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        *,
        product: torch.Tensor | None = None,
        items: Sequence[Item] = (),
        also: int = 0,
    ) -> torch.Tensor:
        """One operator; its first result. `product`: the operand of a product whose last dimension is summed over."""
        reads: dict[Hashable, int] = {_storage(t): _extent(t) for t in sources}
        if also:
            reads[object()] = also
        writes: dict[Hashable, int] = {_storage(t): _extent(t) for t in results}
        weights = frozenset(self.weights & set(reads))
        self.alive += [*sources, *results]
        if product is not None:
            out = results[0]
            depth, columns = product.shape[-1], out.shape[-1]
            batches = out.shape[0] if out.dim() > 2 and not weights else 1
            rows = max(1, out.numel() // max(1, columns * batches))
            nbytes, read = sum(reads.values()) + sum(writes.values()), sum(reads[s] for s in weights)
            stored = self.given.weights if self.stored & set(reads) else None
            kept = read if stored is None else round(read * stored.share(self.dtype.itemsize))
            items = [
                Kernel(
                    name, "product", nbytes - read + kept, 2.0 * out.numel() * depth, kept, batches, rows, columns,
                    depth, stored=stored,
                )
            ]  # fmt: skip
        self.operations.append(CostedOperation(name, reads, writes, tuple(items), weights, _reduced(name, sources)))
        return results[0] if results else sources[0]


def _reduced(name: str, sources: Sequence[torch.Tensor]) -> tuple[int, int]:
    """(rows, values of a row) of an operator that makes one of a row's values, or norms them; (1, 0) of others."""
    known = any(name == word or name.endswith(f"_{word}") or (word == "norm" and word in name) for word in _REDUCTIONS)
    if not known or not sources or not sources[0].dim():
        return 1, 0
    columns = sources[0].shape[-1]
    return sources[0].numel() // max(1, columns), columns


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor: an expanded one reads no more than it has."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _on_meta(tree: Any) -> Any:
    """The same tree without data: constants of the source may be elsewhere."""
    return tree_map_only(torch.Tensor, lambda t: t if t.is_meta else torch.empty_like(t, device="meta"), tree)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def active_experts(experts: int, chosen: int, tokens: int) -> float:
    """Number of `experts` that are chosen by at least one of `tokens` that choose `chosen` each, uniformly at random.

    X · (1 − (1 − k / X)ⁿ); a trained router is not uniform, and fewer are then chosen.
    """
    return experts * (1.0 - (1.0 - min(1.0, chosen / experts)) ** tokens)


def experts_items(args: Any, kwargs: Mapping[str, Any], given: ForwardPass) -> list[Item]:
    """Kernels of `ops.experts`. As emitted, each active expert runs on its own tokens: two products and four pieces of
    glue (gather, activation, weighting, scatter) after a sort. Fused: one grouped product for all experts of each
    projection, as grouped kernels do it."""
    fused, stored = given.fused, given.weights
    x, index, _, up, down = args[:5]
    tokens, chosen = index.shape
    size, count = x.element_size(), up.shape[0]
    active = min(count, max(1, round(active_experts(count, chosen, tokens))))
    of_one = (up[0].numel(), down[0].numel())
    width, hidden = x.shape[1], down.shape[1] if kwargs.get("transposed") else down.shape[2]
    rows = tokens * chosen
    shapes = ((of_one[0], width, of_one[0] // width), (of_one[1], hidden, width))
    moved = rows * (width + 2 * hidden) * size  # gathered tokens, activations, weighted results
    items: list[Kernel] = [Kernel("route", "glue", 4.0 * rows * 8)]
    groups = 1 if fused else active
    for _ in range(groups):
        share = active / groups
        for elements, depth, columns in shapes:
            weights = int(elements * share * size * (1.0 if stored is None else stored.share(size)))
            nbytes, flops = weights + rows / groups * (depth + columns) * size, 2.0 * rows / groups * elements
            batches, each = max(1, round(share)), max(1, rows // active)
            items.append(
                Kernel(EXPERTS, "product", nbytes, flops, weights, batches, each, columns, depth, stored=stored)
            )
        items += [Kernel("glue of experts", "glue", 2.0 * moved / groups / 4) for _ in range(1 if fused else 4)]
    if not fused:
        return list(items)
    gated = of_one[0] == 2 * width * hidden  # as measured ones are
    return [
        measured_as(
            EXPERTS, "experts", items, batches=count, rows=tokens, columns=hidden, depth=width,
            groups=chosen if gated else 0, stored=stored,
        )
    ]  # fmt: skip
