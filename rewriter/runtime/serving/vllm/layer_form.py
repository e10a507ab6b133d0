"""The form of a decoder layer, read from its own `forward`: which children are blocks, what stands before and after
each, and how the residual stream passes through. Layers of any family have the same few forms.

B blocks of a layer compute out_i = after_i(block_i(before_i(stream_i))), stream_{i+1} = stream_i + out_i. vLLM hands
the stream from layer to layer as one tensor [T, D], or as two whose sum it is: the last block's output, and the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from rewriter.output.sum_schedule import Unsupported

HIDDEN, RESIDUAL = "hidden_states", "residual"


@dataclass(frozen=True)
class BlockCall:
    """A block and what is around it. `before`: the norms of what it reads, the first of them `fused` where it also adds
    its first argument to its second. `args` and `kwargs`: how the layer calls it; a string names an input of the layer,
    None is what the block reads. `after`: children, or factors, that its output passes."""

    path: str
    before: tuple[str, ...]
    fused: bool
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    after: tuple[str | float, ...]


@dataclass(frozen=True)
class LayerForm:
    """`inputs`: the parameters of the layer's forward in order. `paired`: the stream comes as two tensors."""

    inputs: tuple[str, ...]
    paired: bool
    branches: tuple[BlockCall, ...]

    @property
    def mergeable(self) -> bool:
        """True where only factors stand between blocks and the stream, the same after every block."""
        return len({b.after for b in self.branches}) == 1 and all(isinstance(a, float) for a in self.branches[0].after)

    def with_factors(self, factors: Sequence[float]) -> LayerForm:
        """The form where what each block adds is multiplied by a number."""
        pairs = zip(self.branches, factors, strict=True)
        return replace(self, branches=tuple(replace(b, after=(*b.after, f)) if f != 1.0 else b for b, f in pairs))

    def with_norms(self, norms: Mapping[str, str]) -> LayerForm:
        """The form where these blocks read the stream through other norms. Raises Unsupported."""
        known = {branch.path: branch for branch in self.branches}
        heads = {branch.before[0] for branch in self.branches if branch.before}
        if strange := {k: v for k, v in norms.items() if k not in known or v not in heads or not known[k].before}:
            raise Unsupported(f"config.json names {strange}, blocks and norms that vLLM's layer has otherwise")
        changed = [replace(b, before=(norms[b.path], *b.before[1:])) if b.path in norms else b for b in self.branches]
        return replace(self, branches=tuple(changed))


@dataclass(frozen=True)
class _StreamTerms:
    """The sum of these outputs; -1 and -2 are what the layer is given."""

    terms: frozenset[int]


@dataclass(frozen=True)
class _Read:
    """A stream as children pass it on before a block takes it."""

    of: _StreamTerms
    through: tuple[str, ...]
    fused: bool


@dataclass(frozen=True)
class _Output:
    """A block's output as children and factors pass it on."""

    block: int
    after: tuple[str | float, ...]


@dataclass(frozen=True)
class _Input:
    """An input of the layer, or (`name` "") something that the layer has read from one, as its shape."""

    name: str


class _DtypeProxy(fx.Proxy):
    """A proxy that knows its dtype, so that a layer may ask for it."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tracer.dtype  # type: ignore[attr-defined]


class _Tracer(fx.Tracer):
    """Records the calls of a layer's children, and what the layer does with their results."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _DtypeProxy(node, self)

    def keys(self, obj: fx.Proxy) -> Any:
        return iter(())  # further keyword arguments of the layer: none


def form_of(layer: nn.Module, blocks: Collection[str], dtype: torch.dtype) -> LayerForm:
    """The form of `layer`, whose children named in `blocks` end in an all-reduce. Raises Unsupported, saying where the
    layer does something else."""
    name = type(layer).__name__
    try:
        graph = _Tracer(dtype).trace(layer)
    except Exception as error:  # whatever the layer does with a value that is not there
        raise Unsupported(f"the forward of {name} cannot be traced ({type(error).__name__}: {error})") from error
    reading = _Reading(name, blocks)
    for node in graph.nodes:
        reading.read(node)
    return reading.form()


class _Reading:
    """Goes through the calls of a layer once and knows what every value is."""

    def __init__(self, name: str, blocks: Collection[str]) -> None:
        self.name, self.blocks = name, blocks
        self.values: dict[fx.Node, Any] = {}
        self.inputs: list[str] = []
        self.branches: list[BlockCall] = []
        self.reads: list[_StreamTerms] = []  # of each branch
        self.after: dict[int, tuple[str | float, ...]] = {}  # by branch, what its output has passed
        self.result: Any = None

    def read(self, node: fx.Node) -> None:
        """Note the value of `node`. Raises Unsupported."""
        if node.op == "placeholder":
            self.values[node] = self._input(str(node.target))
        elif node.op == "call_module":
            self.values[node] = self._call(node)
        elif node.op == "output":
            self.result = self._value(node.args[0])
        elif node.args and all(isinstance(self._value(source), _Input) for source in node.all_input_nodes):
            self.values[node] = _Input("")
        elif node.op == "call_function" and node.target is operator.getitem:
            self.values[node] = self._value(node.args[0])[node.args[1]]
        elif node.op == "call_function" and node.target in (operator.add, operator.iadd):
            self.values[node] = self._sum(*map(self._value, node.args))
        elif node.op == "call_function" and node.target in (operator.mul, operator.imul):
            self.values[node] = self._product(*map(self._value, node.args))
        elif node.users:
            raise self._strange(node.format_node() or node.name)

    def form(self) -> LayerForm:
        """The form, once all is read. Raises Unsupported where blocks do not come one after the other."""
        paired = RESIDUAL in self.inputs
        start = frozenset({-1, -2} if paired else {-1})
        for number, branch in enumerate(self.branches):
            if self.reads[number].terms != start | set(range(number)):
                raise Unsupported(f"{branch.path} of {self.name} does not read what all blocks before it have added")
        ends = self.result if isinstance(self.result, tuple) else (self.result,)
        if len(ends) != (2 if paired else 1) or not all(isinstance(end, _StreamTerms | _Output) for end in ends):
            raise Unsupported(f"{self.name} returns something else than its residual stream")
        parts = [self._stream(end) for end in ends]
        complete = start | set(range(len(self.branches)))
        if not self.branches or sum(len(p.terms) for p in parts) != len(complete):
            raise Unsupported(f"what {self.name} returns is not the sum of what its blocks add")
        last = parts[0].terms
        if paired and last != {len(self.branches) - 1}:
            raise Unsupported(f"{self.name} does not return the last block's output and the rest")
        branches = (replace(branch, after=self.after.get(number, ())) for number, branch in enumerate(self.branches))
        return LayerForm(tuple(self.inputs), paired, tuple(branches))

    def _input(self, name: str) -> Any:
        if name.startswith("*"):
            return ()
        self.inputs.append(name)
        return {HIDDEN: _StreamTerms(frozenset({-1})), RESIDUAL: _StreamTerms(frozenset({-2}))}.get(name, _Input(name))

    def _value(self, of: Any) -> Any:
        if isinstance(of, fx.Node):
            return self.values[of]
        return tuple(map(self._value, of)) if isinstance(of, tuple | list) else of

    def _call(self, node: fx.Node) -> Any:
        path = str(node.target)
        args = tuple(map(self._value, node.args))
        kwargs = {key: self._value(value) for key, value in node.kwargs.items()}
        if path in self.blocks:
            return self._block(path, args, kwargs)
        match args:
            case (_StreamTerms() | _Output() as added, _StreamTerms() as stream) if not kwargs:
                total = self._sum(added, stream)
                return (_Read(total, (path,), fused=True), total)
            case (_StreamTerms() as stream,) if not kwargs:
                return _Read(stream, (path,), fused=False)
            case (_Read() as read,) if not kwargs:
                return _Read(read.of, (*read.through, path), read.fused)
            case (_Output() as output,) if not kwargs:
                return _Output(output.block, (*output.after, path))
        raise self._strange(f"a call of {path}")

    def _block(self, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Output:
        taken = [v for v in (*args, *kwargs.values()) if isinstance(v, _StreamTerms | _Read | _Output)]
        if len(taken) != 1 or isinstance(taken[0], _Output) or any(branch.path == path for branch in self.branches):
            raise self._strange(f"the call of {path}")
        read = taken[0] if isinstance(taken[0], _Read) else _Read(taken[0], (), fused=False)

        def plain(value: Any) -> Any:
            if value is taken[0]:
                return None
            if isinstance(value, _Input) and value.name:
                return value.name
            raise self._strange(f"an argument of {path}")

        given = tuple((key, plain(value)) for key, value in kwargs.items())
        self.branches.append(BlockCall(path, read.through, read.fused, tuple(map(plain, args)), given, after=()))
        self.reads.append(read.of)
        return _Output(len(self.branches) - 1, ())

    def _stream(self, value: Any) -> _StreamTerms:
        """A value of the stream; an output becomes one where it is added."""
        if isinstance(value, _StreamTerms):
            return value
        if not isinstance(value, _Output):
            raise self._strange("a sum")
        if self.after.setdefault(value.block, value.after) != value.after:
            raise self._strange(f"two uses of the output of {self.branches[value.block].path}")
        return _StreamTerms(frozenset({value.block}))

    def _sum(self, a: Any, b: Any) -> _StreamTerms:
        a, b = self._stream(a), self._stream(b)
        if a.terms & b.terms:
            raise self._strange("a sum that counts a block twice")
        return _StreamTerms(a.terms | b.terms)

    def _product(self, a: Any, b: Any) -> _Output:
        if isinstance(b, _Output):
            a, b = b, a
        if not isinstance(a, _Output) or not isinstance(b, int | float):
            raise self._strange("a product")
        return _Output(a.block, (*a.after, float(b)))

    def _strange(self, what: str) -> Unsupported:
        return Unsupported(f"{self.name} is no layer of blocks that add to a residual stream: {what}")
