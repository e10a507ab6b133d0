"""Marks: facts about a node of a graph, by analyses and passes: one typed, frozen record per node.

A record is replaced, never changed, so that copies of graphs may share it. Nodes without one have the default record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

from rewriter.ir.structure import PythonCall

_KEY = "marks"
IN_MAPPING = -1  # the place of what a layer hands on through a mapping that all layers are given
UNSCHEDULED: Literal["unscheduled"] = "unscheduled"


@dataclass(frozen=True)
class Mode:
    """Wiring of a block of the residual stream. The pass that wires it so declares it, next to its own code.

    `sentence` says it in a card and in generated code, without a subject.
    `prefix` begins the name of a class of such layers in a runtime module.
    `reads`: the newest stream value, the one before ("earlier"), or that one and what this rank has added since.
    `coefficients`: those of K and b in X' = K(X) + b(X) ⊗ F (`rewriter.ir.coefficients`) are computed from the newest
    stream value or, as what the block reads, from the one before ("earlier").
    `sum`: the block's sum over ranks is completed by an all-reduce, left out (every rank goes on with its own part),
    completed with all that the ranks have added since they last agreed ("all_since"), or replaced by the mean of the
    ranks' residuals.
    `own_residual`: ranks hold different values after the block, or did so before it.
    `outcome`: what became of the reduction, where that differs between blocks of one mode. `word` names a kind of layer
    after it.
    """

    name: str
    sentence: str = "as in the original"
    prefix: str = ""
    reads: Literal["newest", "earlier", "earlier_and_own"] = "newest"
    coefficients: Literal["newest", "earlier"] = "newest"
    own_residual: bool = False
    sum: Literal["all_reduce", "left_out", "all_since", "mean"] = "all_reduce"
    outcome: str = ""
    word: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        """The mode in a table of blocks: its outcome, else its name."""
        return self.outcome or self.name


STANDARD = Mode("standard")


@dataclass(frozen=True)
class Marks:
    """The marks of one node; None where nothing is known.

    Of wiring nodes:
    `layer`: the decoder layer, None outside the layers.
    `hidden`: the hidden state that the first layer is given. `argument`: the argument by which layers are given a value
    from outside that they compute with themselves. `handed_on`: the place of a value in the tuple that its layer
    returns, where later layers read it beside the hidden state (or IN_MAPPING).
    `stream`: this value is number 0 (what the first block reads), 1, 2, … of the residual stream.
    `mode`, on a stream value: how the block that wrote it is wired, where a pass changed that.
    `local`, on a stream value: ranks do not share the block that wrote it, so that it has no sum over them.
    `block`: the residual block that a node between two stream values belongs to.
    `carry`: the block which carries the stream on by this value, or scales what it writes by it: made of the newest
    value of the stream, whatever the block reads. With `block` as well, the block also reads through it.
    `writes`: the block whose write into the stream this node carries.
    `reads`, on a value that a pass made for blocks to read: the stream value that it stands for.
    `alike`: a result of a split module that every rank computes in full.
    `dropped`: a rank's own part of a sum whose reduction a pass left out.
    `runs_in`: the layer that runs the node where a pass rescheduled it (None: after the last), else UNSCHEDULED.
    `reduction`: the all-reduce that this start or wait was made from.
    `beside`: runs in a branch next to the next block of its layer, which does not need it.
    `python`: how the source's layer calls this child.
    `role`: what an emitted module calls the value. `tag`: the name of a traced region in emitted code.
    `returned`, while tracing: how many values a child returns.

    Of nodes inside a body: `local_q_heads` and `local_kv_heads` of an attention are a rank's heads, `local_channels` of
    a recurrence or convolution a rank's heads or channels.
    """

    layer: int | None = None
    hidden: bool = False
    argument: str | None = None
    handed_on: int | None = None
    stream: int | None = None
    mode: Mode | None = None
    local: bool = False
    block: int | None = None
    carry: int | None = None
    writes: int | None = None
    reads: int | None = None
    alike: bool = False
    dropped: bool = False
    runs_in: int | Literal["unscheduled"] | None = UNSCHEDULED
    reduction: str | None = None
    beside: bool = False
    python: PythonCall | None = None
    role: str | None = None
    tag: str | None = None
    returned: Any = None
    local_q_heads: int | None = None
    local_kv_heads: int | None = None
    local_channels: int | None = None

    def only(self, *names: str) -> Marks:
        """A record with these marks alone."""
        return Marks(**{name: getattr(self, name) for name in names})


_NONE = Marks()


def marks(node: fx.Node) -> Marks:
    """The marks of `node`."""
    record: Marks = node.meta.get(_KEY, _NONE)
    return record


def mark(node: fx.Node, **changes: Any) -> None:
    """Replace some marks of `node`. Raises TypeError for a name that Marks does not have."""
    node.meta[_KEY] = replace(marks(node), **changes)


def set_marks(node: fx.Node, record: Marks) -> None:
    """Give `node` this record in place of its own."""
    node.meta[_KEY] = record


def new_call(graph: fx.Graph, record: Marks, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A call with these marks, where the graph inserts."""
    node = graph.call_function(target, args, kwargs)
    set_marks(node, record)
    return node


def running_layer(node: fx.Node) -> int | None:
    """The decoder layer that runs the node: its own, unless a pass rescheduled it."""
    own = marks(node)
    return own.layer if own.runs_in == UNSCHEDULED else own.runs_in


def block_of(node: fx.Node) -> int | None:
    """The residual block of a node: that it belongs to, or whose write it carries; None outside of blocks."""
    own = marks(node)
    return own.writes if own.block is None else own.block


def in_stream(node: fx.Node) -> bool:
    """True if the value is one of the residual stream."""
    return marks(node).stream is not None


def layer_of(node: fx.Node) -> int:
    """The decoder layer of a node that is known to stand in one."""
    layer = marks(node).layer
    assert layer is not None, f"{node.name} stands in no layer"
    return layer


def stream_index(node: fx.Node) -> int:
    """The number of a value that is known to be of the residual stream."""
    index = marks(node).stream
    assert index is not None, f"{node.name} is no value of the residual stream"
    return index
