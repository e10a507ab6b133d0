"""The form of a decoder layer, read from its own `forward`: which children are blocks, what stands before and after
each, and how the residual stream passes through. Layers of any family have the same few forms.

B blocks of a layer compute out_i = after_i(block_i(before_i(stream_i))), stream_{i+1} = stream_i + out_i. vLLM hands
the stream from layer to layer as one tensor [T, D], or as two whose sum it is: the last block's output, and the rest.
A block may be several children that read the same and whose outputs are added: attention beside a recurrent mixer,
experts beside a shared one.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from rewriter.output.sum_schedule import Unsupported

HIDDEN, RESIDUAL = "hidden_states", "residual"


class Given(Enum):
    """An argument of a child that is neither what it reads nor an input of the layer."""

    MEMORY = "memory"  # as large as what it reads, into which it writes its output
    NOTHING = "nothing"  # in place of a tensor that it hands on and does not use


@dataclass(frozen=True)
class ChildCall:
    """A call of a child that sums over ranks. `args` and `kwargs`: how the layer calls it; a string names an input of
    the layer, None is what the block reads. `entry`: factors of that, None for a copy. `exit`: factors of its output.
    `item`: which one of the values that it returns is the output, None where that is all it returns."""

    path: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    entry: tuple[float | None, ...] = ()
    exit: tuple[float, ...] = ()
    item: int | None = None

    @property
    def writes(self) -> bool:
        """True where the output is in memory that the child was given."""
        return any(value is Given.MEMORY for value in chain(self.args, dict(self.kwargs).values()))


@dataclass(frozen=True)
class BlockCall:
    """A block and what is around it. `calls`: of its children, whose outputs are added. `before`: the norms of what
    they read, the first of them `fused` where it also adds its first argument to its second. `after`: children, or
    factors, that the block's output passes."""

    calls: tuple[ChildCall, ...]
    before: tuple[str, ...]
    fused: bool
    after: tuple[str | float, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(call.path for call in self.calls)


@dataclass(frozen=True)
class LayerForm:
    """`inputs`: the parameters of the layer's forward in order. `paired`: the stream comes as two tensors. `spare`: it
    comes as one, and the layer returns another that no layer reads."""

    inputs: tuple[str, ...]
    paired: bool
    branches: tuple[BlockCall, ...]
    spare: bool = False

    @property
    def mergeable(self) -> bool:
        """True where only factors stand between blocks and the stream, the same after every block."""
        return len({b.after for b in self.branches}) == 1 and all(isinstance(a, float) for a in self.branches[0].after)

    def stream_of(self, given: Mapping[str, Any]) -> tuple[Any, Any]:
        """The stream in the arguments of the layer: two values, or one and None."""
        return given[HIDDEN], given.get(RESIDUAL) if self.paired else None

    def alone(self, stream: Any) -> Any:
        """The layer's results where its stream is one value."""
        return (stream, None) if self.spare else stream

    def with_factors(self, factors: Sequence[float]) -> LayerForm:
        """The form where what each block adds is multiplied by a number."""
        pairs = zip(self.branches, factors, strict=True)
        return replace(self, branches=tuple(replace(b, after=(*b.after, f)) if f != 1.0 else b for b, f in pairs))

    def with_norms(self, norms: Mapping[str, str]) -> LayerForm:
        """The form where these blocks read the stream through other norms. Raises Unsupported."""
        known = {path: branch for branch in self.branches for path in branch.paths}
        heads = {branch.before[0] for branch in self.branches if branch.before}
        if strange := {k: v for k, v in norms.items() if k not in known or v not in heads or not known[k].before}:
            raise Unsupported(f"config.json names {strange}, blocks and norms that vLLM's layer has otherwise")

        def changed(branch: BlockCall) -> BlockCall:
            named = {norms[path] for path in branch.paths if path in norms}
            return replace(branch, before=(*named, *branch.before[1:])) if len(named) == 1 else branch

        return replace(self, branches=tuple(map(changed, self.branches)))


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
    entry: tuple[float | None, ...] = ()  # factors and copies after the norms


@dataclass(frozen=True)
class _Output:
    """A block's output as children and factors pass it on: the sum of those of `calls`, by number."""

    calls: tuple[int, ...]
    after: tuple[str | float, ...] = ()


@dataclass(frozen=True, eq=False)
class _Memory:
    """Memory that a child may write into."""

    node: fx.Node


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
    reading = _Reading(layer, blocks, dtype)
    for node in graph.nodes:
        reading.read(node)
    return reading.form()


def hands_on(child: nn.Module, name: str, dtype: torch.dtype) -> bool:
    """True where `child` makes no use of its argument `name`: it returns it at most."""
    try:
        graph = _Tracer(dtype).trace(child)
    except Exception:  # nothing is known of it
        return False
    found = [node for node in graph.find_nodes(op="placeholder") if node.target == name]
    return bool(found) and all(user.op == "output" for user in found[0].users)


class _Reading:
    """Goes through the calls of a layer once and knows what every value is."""

    def __init__(self, layer: nn.Module, blocks: Collection[str], dtype: torch.dtype) -> None:
        self.layer, self.name, self.blocks, self.dtype = layer, type(layer).__name__, blocks, dtype
        self.values: dict[fx.Node, Any] = {}
        self.inputs: list[str] = []
        self.paired = False
        self.calls: list[ChildCall] = []
        self.sources: list[_Read] = []  # of each call
        self.added: dict[tuple[int, ...], tuple[str | float, ...]] = {}  # by block, what its output has passed
        self.result: Any = None

    def read(self, node: fx.Node) -> None:
        """Note the value of `node`. Raises Unsupported."""
        if node.op == "placeholder":
            self.values[node] = self._input(node)
        elif node.op == "call_module":
            self.values[node] = self._call(node)
        elif node.op == "output":
            self.result = self._value(node.args[0])
        elif node.args and all(isinstance(self._value(source), _Input) for source in node.all_input_nodes):
            self.values[node] = _Input("")
        elif node.users:
            self.values[node] = self._computed(node)

    def _computed(self, node: fx.Node) -> Any:
        """The value of what the layer itself computes."""
        match node.target, tuple(map(self._value, node.args)):
            case operator.getitem, (_Output() as output, int() as item):
                return self._item(output, item)
            case operator.getitem, (tuple() as value, int() as item):
                return value[item]
            case ((operator.add | operator.iadd), (a, b)):
                return self._sum(a, b)
            case ((operator.mul | operator.imul), (a, b)):
                return self._product(a, b)
            case torch.empty_like, (_Read() | _StreamTerms(),) if not node.kwargs:
                return _Memory(node)
            case "clone", (_Read() as read,) if not node.kwargs:
                return replace(read, entry=(*read.entry, None))
        raise self._strange(node.format_node() or node.name)

    def form(self) -> LayerForm:
        """The form, once all is read. Raises Unsupported where blocks do not come one after the other."""
        start = frozenset({-1, -2} if self.paired else {-1})
        ends = self.result if isinstance(self.result, tuple) else (self.result,)
        spare = not self.paired and len(ends) == 2
        if len(ends) != 1 + (self.paired or spare) or not all(isinstance(e, _StreamTerms | _Output) for e in ends):
            raise Unsupported(f"{self.name} returns something else than its residual stream")
        parts = [self._stream(end) for end in (ends[:1] if spare else ends)]
        for number, calls in enumerate(self.added):
            if self.sources[calls[0]].of.terms != start | set(range(number)):
                raise Unsupported(
                    f"{self.calls[calls[0]].path} of {self.name} does not read what all blocks before it have added"
                )
        complete = start | set(range(len(self.added)))
        whole = sum(len(part.terms) for part in parts) == len(complete)
        if not self.calls or not whole or len(self.calls) != sum(map(len, self.added)):
            raise Unsupported(f"what {self.name} returns is not the sum of what its blocks add")
        last = parts[0].terms
        if self.paired and last != {len(self.added) - 1}:
            raise Unsupported(f"{self.name} does not return the last block's output and the rest")
        branches = tuple(self._branch(calls, after) for calls, after in self.added.items())
        return LayerForm(tuple(self.inputs), self.paired, branches, spare)

    def _branch(self, calls: tuple[int, ...], after: tuple[str | float, ...]) -> BlockCall:
        read = self.sources[calls[0]]
        return BlockCall(tuple(self.calls[number] for number in calls), read.through, read.fused, after)

    def _input(self, node: fx.Node) -> Any:
        name = str(node.target)
        if name.startswith("*"):
            return ()
        self.inputs.append(name)
        if name == RESIDUAL and node.users:
            self.paired = True
            return _StreamTerms(frozenset({-2}))
        return _StreamTerms(frozenset({-1})) if name == HIDDEN else _Input(name)

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
            case (_Read() as read,) if not kwargs and not read.entry:
                return _Read(read.of, (*read.through, path), read.fused)
            case (_Output() as output,) if not kwargs:
                return _Output(output.calls, (*output.after, path))
        raise self._strange(f"a call of {path}")

    def _block(self, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Output | None:
        """Note the call of a child that sums over ranks: its output, None where it writes that into memory."""
        streams = (_StreamTerms, _Read, _Output)
        unused = [key for key, value in kwargs.items() if isinstance(value, _StreamTerms)]
        taken = [value for value in (*args, *kwargs.values()) if isinstance(value, streams)]
        if len(taken) > 1:  # a stream may be handed on beside what is read
            child = self.layer.get_submodule(path)
            kwargs = dict(kwargs) | {key: Given.NOTHING for key in unused if hands_on(child, key, self.dtype)}
            taken = [value for value in (*args, *kwargs.values()) if isinstance(value, streams)]
        if len(taken) != 1 or isinstance(taken[0], _Output) or any(call.path == path for call in self.calls):
            raise self._strange(f"the call of {path}")
        read = taken[0] if isinstance(taken[0], _Read) else _Read(taken[0], (), fused=False)
        memory = [value for value in (*args, *kwargs.values()) if isinstance(value, _Memory)]

        def plain(value: Any) -> Any:
            if value is taken[0]:
                return None
            if isinstance(value, _Memory) and len(memory) == 1:
                return Given.MEMORY
            if isinstance(value, Given):
                return value
            if isinstance(value, _Input) and value.name:
                return value.name
            raise self._strange(f"an argument of {path}")

        given = tuple((key, plain(value)) for key, value in kwargs.items())
        self.calls.append(ChildCall(path, tuple(map(plain, args)), given, read.entry))
        self.sources.append(replace(read, entry=()))
        output = _Output((len(self.calls) - 1,))
        if not memory:
            return output
        self.values[memory[0].node] = output
        return None

    def _item(self, output: _Output, item: int) -> _Output:
        """One of the values that a child returns."""
        call = self.calls[output.calls[0]]
        if len(output.calls) > 1 or output.after or call.writes or call.item not in (None, item):
            raise self._strange(f"a part of the output of {call.path}")
        self.calls[output.calls[0]] = replace(call, item=item)
        return output

    def _stream(self, value: Any) -> _StreamTerms:
        """A value of the stream; an output becomes one where it is added."""
        if isinstance(value, _StreamTerms):
            return value
        if not isinstance(value, _Output):
            raise self._strange("a sum")
        others = {number for calls in self.added if calls != value.calls for number in calls}
        if self.added.setdefault(value.calls, value.after) != value.after or others & set(value.calls):
            raise self._strange(f"two uses of the output of {self.calls[value.calls[0]].path}")
        return _StreamTerms(frozenset({list(self.added).index(value.calls)}))

    def _sum(self, a: Any, b: Any) -> Any:
        if isinstance(a, _Output) and isinstance(b, _Output) and self._side_by_side(a, b):
            for output in (a, b):
                for number in output.calls:
                    call = self.calls[number]
                    self.calls[number] = replace(call, exit=(*call.exit, *map(float, output.after)))
            return _Output((*a.calls, *b.calls))
        a, b = self._stream(a), self._stream(b)
        if a.terms & b.terms:
            raise self._strange("a sum that counts a block twice")
        return _StreamTerms(a.terms | b.terms)

    def _side_by_side(self, a: _Output, b: _Output) -> bool:
        """True where two outputs are of one block: their children read the same, and only factors follow them."""
        calls = (*a.calls, *b.calls)
        fresh = len(set(calls)) == len(calls) and not {n for added in self.added for n in added} & set(calls)
        factors = all(isinstance(one, float) for one in (*a.after, *b.after))
        return fresh and factors and len({self.sources[number] for number in calls}) == 1

    def _product(self, a: Any, b: Any) -> _Read | _Output:
        if isinstance(b, _Read | _Output):
            a, b = b, a
        if isinstance(a, _Read) and isinstance(b, int | float):
            return replace(a, entry=(*a.entry, float(b)))
        if not isinstance(a, _Output) or not isinstance(b, int | float):
            raise self._strange("a product")
        return _Output(a.calls, (*a.after, float(b)))

    def _strange(self, what: str) -> Unsupported:
        return Unsupported(f"{self.name} is no layer of blocks that add to a residual stream: {what}")
