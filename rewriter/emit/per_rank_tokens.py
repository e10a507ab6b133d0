"""Children of a layer that treat tokens one by one (experts and their routers): each rank's values are tokens.

Such a child takes [B, S · ranks, D], a token's values of all ranks one after the other: each rank's router sees that
rank's input. Only what a rank holds a part of has to know which rank a token is of: experts, shared experts'
projections. `token_child` walks a rank-local body, proves that nothing in it looks across tokens, and finds these
modules.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rewriter import ops
from rewriter.analysis.labels import dynamic, value_of
from rewriter.analysis.op_semantics import aten, dims_of, is_pointwise, kind_of
from rewriter.emit.per_rank_modules import NotPerRank, PerRankChild, PerRankModule, name_of, projection, segments
from rewriter.ir import Body, Leaf, Module, Program, args_of

# operators that leave elements with their tokens by kind or name, and those that look along dimensions that they name
_ALONE = ("copy", "creation_like", "size")
_KEEP_TOKENS = frozenset({aten.linear.default, aten.unsqueeze.default, aten.expand.default, operator.getitem})
_ALONG = ("reduction", "scan", "top", "lookup", "scatter", "piece")


def has_experts(module: Module) -> bool:
    """Whether some experts are called inside."""
    return isinstance(module, Body) and (
        any(n.target is ops.experts for n in module.graph.nodes) or any(map(has_experts, module.modules.values()))
    )


def token_child(program: Program, path: str) -> PerRankChild:
    """The modules of `path` that compute per rank when it is called with every rank's tokens.

    Raises NotPerRank where something in it looks across tokens, or depends on ranks in a way that is not known.
    """
    walk = _TokenWalk(program, path)
    walk.module(program.modules[path], "")
    return walk.found


class _TokenWalk:
    def __init__(self, program: Program, path: str) -> None:
        self.program, self.path = program, path
        self.found = PerRankChild(tokens=True)

    def module(self, module: Module, prefix: str) -> None:
        if isinstance(module, Leaf):
            self._leaf(module, prefix)
            return
        if not isinstance(module, Body):
            raise NotPerRank(f"{prefix or self.path} is the source's own module, which was not traced")
        for node in module.graph.nodes:
            if node.op == "call_module":
                name = str(node.target)
                self.module(module.modules[name], f"{prefix}.{name}" if prefix else name)
            elif node.op == "get_attr":
                split = self._ranges(f"{prefix}.{node.target}" if prefix else str(node.target)) is not None
                if split and any(u.target is not ops.experts for u in node.users):
                    raise NotPerRank(f"{node.target} is split over ranks, and read by more than the experts")
            elif node.target is ops.experts:
                self._experts(node, prefix)
            elif node.op == "call_function" and not _by_token(node):
                raise NotPerRank(f"{name_of(node)} may look across tokens")

    def _ranges(self, name: str) -> Any:
        spec = self.program.parameters.get(f"{self.path}.{name}")
        return None if spec is None else spec.ranges

    def _leaf(self, leaf: Leaf, name: str) -> None:
        if leaf.kind in ("Linear", "Conv1D", "LayerNorm", "Dropout"):
            return
        spec = self.program.parameters[f"{self.path}.{name}.weight"]
        kind, row = projection(leaf), leaf.kind.startswith("RowParallel")
        dim = int(row) if kind == "Linear" else 1 - int(row)
        size = (spec.full_shape or spec.shape)[dim]
        if spec.ranges is None or segments(spec.ranges, size) != (size,):
            raise NotPerRank(f"the parts of {name} are not equal runs, one per rank")
        if row and "bias" in leaf.parameters and not leaf.options.get("bias_share"):
            raise NotPerRank(f"rank 0 alone adds the bias of {name}")
        self.found.modules[name] = PerRankModule("TokenRow" if row else "TokenColumn", kind)

    def _experts(self, node: fx.Node, prefix: str) -> None:
        names = [_parameter(n) for n in args_of(node)[3:] if isinstance(n, fx.Node)]
        homes = {name.rpartition(".")[0] for name in names}
        if len(homes) != 1:
            raise NotPerRank(f"the weights of its experts stand in several modules: {', '.join(names)}")
        parts = []
        for name in names:
            inner = f"{prefix}.{name}" if prefix else name
            spec = self.program.parameters[f"{self.path}.{inner}"]
            if spec.ranges is None:  # a bias of the second projection: each rank adds its share
                parts.append(f'"{name.rpartition(".")[2]}": None')
                continue
            assert spec.dim is not None
            runs = segments(spec.ranges, (spec.full_shape or spec.shape)[spec.dim])
            if runs is None or len(set(runs)) != 1:
                raise NotPerRank(f"the parts of {inner} are not equal runs")
            parts.append(f'"{name.rpartition(".")[2]}": ({spec.dim}, {len(runs)})')
        home = f"{prefix}.{homes.pop()}" if prefix else homes.pop()
        self.found.modules[home] = PerRankModule("Experts", "", (("parts", f"{{{', '.join(parts)}}}"),))


def _parameter(node: fx.Node) -> str:
    """The name of the parameter that a value is made of."""
    while node.op != "get_attr":
        if len(node.all_input_nodes) != 1:
            raise NotPerRank(f"{node.name} is no parameter of the experts")
        node = node.all_input_nodes[0]
    return str(node.target)


def _by_token(node: fx.Node) -> bool:
    """Whether an operator gives each token what it would give that token alone."""
    if is_pointwise(node) or kind_of(node) in _ALONE or node.target in _KEEP_TOKENS:
        return True
    if not isinstance(value_of(node), (torch.Tensor, tuple, list)):
        return True  # a size
    source, dims = args_of(node)[0], dims_of(node)
    if kind_of(node) == "view":
        return _tokens_first(value_of(source)) and _tokens_first(value_of(node))
    if kind_of(node) not in _ALONG or not dims or not isinstance(value_of(source), torch.Tensor):
        return False
    return not any(dynamic(value_of(source).shape[d]) for d in dims)


def _tokens_first(value: torch.Tensor) -> bool:
    """Whether batch and length stand before every other dimension, so that a view keeps the order of tokens."""
    kinds = [dynamic(size) for size in value.shape]
    return kinds == sorted(kinds, reverse=True)
