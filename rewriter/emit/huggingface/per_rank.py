"""Changes inside a child of a decoder layer so that it computes every rank on one device.

They are few. Inside a block, what rank r holds of a split value (its heads, its channels) is a part of the full value,
so all ranks' parts together are the value that the source's own code computes: attention, its cache and activations
stay as they are. Only the projections at the ends compute per rank: a column-parallel one reads each rank's own input
for the outputs that the rank holds, a row-parallel one returns each rank's partial sum. `per_rank_child` walks a
rank-local body and either finds these projections or refuses, naming what else would have to compute per rank.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from rewriter.ir import Body, Leaf, Module, Parameter, Program, args_of, ops
from rewriter.ir.labels import dynamic, is_tensor, reduced_shape, value_of
from rewriter.ir.op_semantics import argument, aten, data_of, dims_of, function_of, is_pointwise, is_sum, kind_of
from rewriter.passes.placement.units import Ranges

_PIECES = frozenset({aten.slice.Tensor, aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default})
_PROJECTIONS = ("Linear", "Conv1D")


@dataclass(frozen=True)
class PerRankModule:
    """One module that computes per rank. `role` is that of a class of the generated file, `kind` the source's class
    (empty: it is found when the model is built); `options` are the attributes that it needs, as Python."""

    role: Literal["Column", "Row", "TokenColumn", "TokenRow", "Experts", "Norm"]
    kind: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def role_class(self) -> str:
        """The generated class of what modules of this role do."""
        return f"PerRank{self.role}"

    @property
    def class_name(self) -> str:
        """The generated class of this module: PerRankColumnLinear, PerRankRMSNorm."""
        return f"PerRank{self.kind}" if self.role == "Norm" else f"PerRank{self.role}{self.kind}"


@dataclass
class PerRankChild:
    """The modules of one child that compute per rank, by path relative to it.

    `groups` are the query heads per key/value head of attention modules, where ranks together hold more key/value heads
    than the source has. `tokens` says that each rank's values are tokens of the child (see `per_rank_tokens`).
    """

    modules: dict[str, PerRankModule] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    tokens: bool = False

    def add(self, child: PerRankChild, path: str) -> None:
        """Add what was found of the child at `path`."""
        self.modules |= {f"{path}.{name}" if name else path: module for name, module in child.modules.items()}
        self.groups |= {f"{path}.{name}" if name else path: count for name, count in child.groups.items()}


def computes_partial(module: Module) -> bool:
    """True if a rank's result is a part of a sum: some projection is split by its inputs."""
    if isinstance(module, Leaf):
        return module.kind.startswith("RowParallel")
    if not isinstance(module, Body):
        return False
    return any(n.target is ops.experts for n in module.graph.nodes) or any(
        computes_partial(m) for m in module.modules.values()
    )


def is_entry(module: Module) -> bool:
    """True if it is a projection of which ranks hold a part of the outputs."""
    return isinstance(module, Leaf) and module.kind.startswith("ColumnParallel")


def token_by_token(module: Module) -> bool:
    """True if it maps each token's vector alone, so that the source's module takes [B, S, ranks, D] as it is."""
    if isinstance(module, Leaf):
        return module.kind in ("Linear", "Conv1D", "LayerNorm", "Dropout")
    if not isinstance(module, Body):
        return False
    for node in module.graph.nodes:
        if node.op == "call_module":
            if not token_by_token(module.modules[str(node.target)]):
                return False
        elif node.op == "get_attr":
            name = str(node.target)
            shape = module.parameters[name] if name in module.parameters else module.buffers[name].shape
            if len(shape) > 1 and not all(u.target is aten.linear.default for u in node.users):
                return False
        elif node.op == "call_function" and not (
            is_pointwise(node)
            or node.target is aten.linear.default
            or (node.target is aten.layer_norm.default and len(args_of(node)[1]) == 1)
            or (is_sum(node) and _dims(node) == {-1} and args_of(node)[2:] == (True,))
        ):
            return False
    return True


def per_rank_child(program: Program, path: str, inputs: Sequence[bool], needs_parts: bool) -> PerRankChild:
    """The modules of `path`, a split child of a layer, that compute per rank.

    `inputs` says which of its inputs differ by rank; `needs_parts` whether each rank's partial sum is needed, and not
    just their total. Raises NotPerRank with the reason where that is not enough.
    """
    walk = _ProjectionWalk(program, path, needs_parts)
    results = walk.module(program.modules[path], "", [_PER_RANK if differs else _FULL for differs in inputs])
    result, *handed_on = results if isinstance(results, tuple) else (results,)
    if any(value.kind != "full" for value in handed_on):
        raise NotPerRank("it hands values on to later layers that differ by rank")
    if needs_parts and result.kind != "partial":
        raise NotPerRank("its output is not a sum of the ranks' parts")
    return walk.child


class NotPerRank(Exception):
    """Something else would have to compute per rank."""


@dataclass(frozen=True)
class _Value:
    """Meaning of a value in the source's own code.

    full: what it is in the source. per_rank: all ranks' inputs, packed. partial: each rank's part of a sum. heads: the
    source's, but `count` rows of heads, one rank's after the other's, stand in dimension `dim` (-1: packed with the
    head size).
    """

    kind: Literal["full", "per_rank", "partial", "heads"]
    count: int = 0
    dim: int = -1


_FULL, _PER_RANK, _PARTIAL = _Value("full"), _Value("per_rank"), _Value("partial")


class _ProjectionWalk:
    def __init__(self, program: Program, path: str, needs_parts: bool) -> None:
        self.program, self.path, self.needs_parts = program, path, needs_parts
        self.ranks = program.mesh["tp"]
        self.child = PerRankChild()

    def module(self, module: Module, prefix: str, inputs: Sequence[_Value]) -> _Value | tuple[_Value, ...]:
        """The value that the module returns, or several."""
        if isinstance(module, Leaf):
            return self._leaf(module, prefix, inputs[0])
        if not isinstance(module, Body):
            raise NotPerRank(f"{prefix or self.path} is the source's own module, which was not traced")
        given = iter(inputs)
        env: dict[fx.Node, _Value] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given, _FULL)
            elif node.op == "get_attr":
                env[node] = _FULL
            elif node.op == "output":
                returned = args_of(node)[0]
                return env[returned] if isinstance(returned, fx.Node) else tuple(env[n] for n in returned)
            elif node.op == "call_module":
                name = str(node.target)
                inner = f"{prefix}.{name}" if prefix else name
                made = self.module(module.modules[name], inner, [env[n] for n in node.all_input_nodes])
                several, env[node] = (made, _FULL) if isinstance(made, tuple) else ((), made)
                env |= {user: several[args_of(user)[1]] for user in node.users if several}
            elif node not in env:  # the results of a call are there already
                env[node] = self._function(node, env, prefix, module)
        raise AssertionError("a graph without output")

    # --- modules

    def _leaf(self, leaf: Leaf, name: str, source: _Value) -> _Value:
        if leaf.kind == "Dropout":
            return source
        if not leaf.kind.endswith(_PROJECTIONS):
            if source.kind == "full" or (source.kind == "heads" and source.dim != -1 and leaf.kind == "LayerNorm"):
                return source
            raise NotPerRank(f"{name} ({leaf.kind}) reads {_WORDS[source.kind]}")
        if leaf.kind.startswith("RowParallel"):
            return self._row(leaf, name, source)
        if source.kind == "full":
            return _FULL
        if source.kind != "per_rank":
            raise NotPerRank(f"{name} reads {_WORDS[source.kind]}")
        return self._column(leaf, name)

    def _column(self, leaf: Leaf, name: str) -> _Value:
        spec = self._weight(name)
        kind = projection(leaf)
        size = (spec.full_shape or spec.shape)[0 if kind == "Linear" else 1]
        ranges = spec.ranges or (((0, size),),) * self.ranks
        runs = segments(ranges, size)
        if runs is not None:
            options = (("segments", f"[{', '.join(map(str, runs))}]"),) if len(runs) > 1 else ()
            self.child.modules[name] = PerRankModule("Column", kind, options)
            return _FULL
        if any(len(r) != 1 for r in ranges):
            raise NotPerRank(
                f"{name or self.path} makes outputs of each rank alone beside some that ranks have in common"
            )
        rows = ", ".join(f"({a}, {b})" for ((a, b),) in ranges)
        self.child.modules[name] = PerRankModule("Column", kind, (("rows", f"[{rows}]"),))
        return _Value("heads", sum(b - a for ((a, b),) in ranges))

    def _row(self, leaf: Leaf, name: str, source: _Value) -> _Value:
        if source.kind != "full":
            raise NotPerRank(f"{name} reads {_WORDS[source.kind]}")
        if not self.needs_parts:
            return _FULL
        spec = self._weight(name)
        assert spec.ranges is not None
        kind = projection(leaf)
        size = (spec.full_shape or spec.shape)[1 if kind == "Linear" else 0]
        if segments(spec.ranges, size) != (size,):
            raise NotPerRank(f"the inputs of {name} are not equal runs, one per rank")
        if "bias" in leaf.parameters and not leaf.options.get("bias_share"):
            raise NotPerRank(f"rank 0 alone adds the bias of {name}")
        self.child.modules[name] = PerRankModule("Row", kind)
        return _PARTIAL

    def _weight(self, name: str) -> Parameter:
        return self.program.parameters[".".join(filter(None, (self.path, name, "weight")))]

    # --- functions

    def _function(self, node: fx.Node, env: Mapping[fx.Node, _Value], prefix: str, body: Body) -> _Value:
        target = node.target
        states = [env[n] for n in data_of(node)]
        kinds = {s.kind for s in states}
        if target in (ops.all_reduce, ops.all_reduce_start):
            if kinds != {"full"} or "per_rank" in {s.kind for s in env.values()}:
                raise NotPerRank(f"it reduces over the ranks inside, at {node.name}")
            return _FULL
        if target is ops.copy_to_group:
            return states[0]
        if target is ops.attention:
            return self._attention(node, env, prefix, body)
        if target is ops.experts:
            if self.needs_parts or kinds != {"full"}:
                raise NotPerRank("its experts would have to compute per rank")
            return _FULL
        if kinds <= {"full"}:
            return _FULL
        if "per_rank" in kinds:
            if target is aten.sym_size.int and args_of(node)[1] in (0, 1):
                return _FULL
            raise NotPerRank(f"{name_of(node)} reads what differs by rank, beside the projections")
        if "partial" in kinds:
            return self._partial(node, states)
        return self._heads(node, env)

    def _partial(self, node: fx.Node, states: list[_Value]) -> _Value:
        function = function_of(node)
        scaled = function in ("mul", "div") and len(states) == 1 and isinstance(args_of(node)[0], fx.Node)
        added = function == "add" and [s.kind for s in states] == ["partial"] * 2
        if scaled or added or function == "neg" or kind_of(node) in ("copy", "cast"):
            return _PARTIAL
        raise NotPerRank(f"{name_of(node)} reads the ranks' parts of a sum")

    def _heads(self, node: fx.Node, env: Mapping[fx.Node, _Value]) -> _Value:
        """Glue on more heads than the source has: allowed where no size of theirs is written in the source's code."""
        source = next(n for n in node.all_input_nodes if env[n].kind == "heads")
        state, args = env[source], args_of(node)
        rank = value_of(source).dim() if is_tensor(source) else 0
        refused = NotPerRank(f"{name_of(node)} fixes the number of key/value heads")
        kind, dims = kind_of(node), [d % rank for d in dims_of(node) if isinstance(d, int)]
        if kind == "copy" or node.target is operator.getitem:
            return state
        if kind == "view" and isinstance(args[1], (list, tuple)) and state.dim == -1:
            sizes = list(args[1])
            if len(sizes) == rank + 1 and sizes[-2] == -1 and sizes.count(-1) == 1:
                return _Value("heads", state.count // int(sizes[-1]), rank - 1)
        elif kind == "size" and args[1] % rank != state.dim % rank:
            return _FULL
        elif state.dim == -1:
            raise NotPerRank(
                f"{name_of(node)} reads a projection that every rank makes in full, of the rank's own input"
            )
        elif node.target in (aten.transpose.int, aten.permute.default):
            # of a tensor whose sizes say which dimension is which
            moved: Any = node.target
            places = moved(torch.empty(tuple(range(rank)), device="meta"), *args[1:]).shape
            return _Value("heads", state.count, list(places).index(state.dim))
        elif node.target in _PIECES:
            if dims != [state.dim]:
                return state
        elif kind in ("join", "stack"):
            place = (argument(node, "dim") or 0) % (rank + (kind == "stack"))
            apart = place > state.dim if kind == "stack" else place != state.dim
            if apart and {env[n] for n in args[0]} == {state}:
                return state
        elif node.target is aten.flatten.using_ints:
            if argument(node, "start_dim") % rank > state.dim:
                return state
        elif is_sum(node):
            if args[2:] == (True,) and state.dim not in dims:
                return state
        elif is_pointwise(node) and all(_fits(n, env[n], state, rank) for n in node.all_input_nodes if is_tensor(n)):
            return state
        raise refused

    def _attention(self, node: fx.Node, env: Mapping[fx.Node, _Value], prefix: str, body: Body) -> _Value:
        q, k, v = args_of(node)[:3]
        states = [env[n] for n in (q, k, v)]
        if any(env[n].kind != "full" for n in node.all_input_nodes if n not in (k, v)):
            raise NotPerRank("its queries are not those of the source")
        if [s.kind for s in states] == ["full"] * 3:
            return _FULL
        if [s.kind for s in states] != ["full", "heads", "heads"] or {s.dim for s in states[1:]} != {1}:
            raise NotPerRank("its keys and values do not have the same heads")
        if states[1].count != states[2].count:
            raise NotPerRank("its keys and values have different numbers of heads")
        heads = reduced_shape(value_of(q))[1]
        if "num_key_value_groups" not in _source_of(self.program, body):
            raise NotPerRank(
                f"ranks hold {states[1].count} key/value heads together, and {body.class_name} has no "
                "num_key_value_groups to say so"
            )
        self.child.groups[prefix] = heads // states[1].count
        return _FULL


def segments(ranges: Sequence[Ranges], size: int) -> tuple[int, ...] | None:
    """The sizes of runs that follow each other and are each split evenly over the ranks; None where they are not."""
    if len({len(r) for r in ranges}) != 1:
        return None
    sizes, end = [], 0
    for parts in zip(*ranges, strict=True):
        length = parts[0][1] - parts[0][0]
        if list(parts) != [(end + i * length, end + (i + 1) * length) for i in range(len(parts))]:
            return None
        sizes.append(length * len(parts))
        end += sizes[-1]
    return tuple(sizes) if end == size else None


def projection(leaf: Leaf) -> str:
    return next(kind for kind in _PROJECTIONS if leaf.kind.endswith(kind))


def _dims(node: fx.Node) -> set[int]:
    rank = value_of(args_of(node)[0]).dim()
    return {d % rank - rank for d in args_of(node)[1]}


def _fits(node: fx.Node, state: _Value, heads: _Value, rank: int) -> bool:
    """True if an operand has these heads where `heads` has them, or is the same for all of them."""
    shape = reduced_shape(value_of(node))
    place = heads.dim - rank
    if state.kind == "heads":
        return state.count == heads.count and state.dim - len(shape) == place
    return -place > len(shape) or shape[place] == 1


def _source_of(program: Program, body: Body) -> str:
    cls = getattr(importlib.import_module(program.source.module), body.class_name, None)
    return "" if cls is None else inspect.getsource(cls)


_WORDS = {
    "full": "a full value",
    "per_rank": "what differs by rank",
    "partial": "the ranks' parts of a sum",
    "heads": "key/value heads of all ranks",
}


def name_of(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", None) or str(node.target)


# --- children that treat tokens one by one


# operators that leave elements with their tokens by kind or name, and those that look along dimensions that they name
_ALONE = ("copy", "creation_like", "size")
_KEEP_TOKENS = frozenset({aten.linear.default, aten.unsqueeze.default, aten.expand.default, operator.getitem})
_ALONG = ("reduction", "scan", "top", "lookup", "scatter", "piece")


def has_experts(module: Module) -> bool:
    """True if some experts are called inside."""
    return isinstance(module, Body) and (
        any(n.target is ops.experts for n in module.graph.nodes) or any(map(has_experts, module.modules.values()))
    )


def token_child(program: Program, path: str) -> PerRankChild:
    """The modules of `path` that compute per rank when it is called with every rank's tokens.

    Raises NotPerRank where something in it looks across tokens, or depends on ranks in a way that is not known.
    """
    walk = _TokenWalk(program, path)
    walk.module(program.modules[path], "")
    return walk.child


class _TokenWalk:
    def __init__(self, program: Program, path: str) -> None:
        self.program, self.path = program, path
        self.child = PerRankChild(tokens=True)

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
        self.child.modules[name] = PerRankModule("TokenRow" if row else "TokenColumn", kind)

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
        self.child.modules[home] = PerRankModule("Experts", "", (("parts", f"{{{', '.join(parts)}}}"),))


def _parameter(node: fx.Node) -> str:
    """The name of the parameter that a value is made of."""
    while node.op != "get_attr":
        if len(node.all_input_nodes) != 1:
            raise NotPerRank(f"{node.name} is no parameter of the experts")
        node = node.all_input_nodes[0]
    return str(node.target)


def _by_token(node: fx.Node) -> bool:
    """True if an operator gives each token what it would give that token alone."""
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
    """True if batch and length stand before every other dimension, so that a view keeps the order of tokens."""
    kinds = [dynamic(size) for size in value.shape]
    return kinds == sorted(kinds, reverse=True)
