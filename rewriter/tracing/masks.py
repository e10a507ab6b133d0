"""Attention masks while a model is traced: as one operator with a rule, and found again in what a model makes of it.

transformers' mask functions are lifted: instead of a tensor filled with numbers they record `rewriter_trace::mask`,
whose MaskSpec was found by evaluating the mask function on sampled positions. A model may hand that tensor on, slice
it, invert it, or build its own masks from buffers and `torch.triu`. All of these are *static*: they depend on
lengths and constants alone. `StaticGraph` evaluates them on small lengths, and `seen_by` finds the rule they follow.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from rewriter.common.errors import RewriterError
from rewriter.ir import args_of, ops
from rewriter.ir.op_semantics import function_of, kind_of, operator_of
from rewriter.ir.ops import MaskSpec
from rewriter.tracing.meta_model import TRACE_DTYPE

# an additive score this low has a weight of exactly 0 in float32, unless every key has it
HIDDEN = -1000.0

library = torch.library.Library("rewriter_trace", "FRAGMENT")
library.define("mask(Tensor anchor, Tensor[] blocks, str kind, int? size, ScalarType dtype) -> Tensor")


@torch.library.register_fake("rewriter_trace::mask", lib=library)
def _mask(
    anchor: torch.Tensor, blocks: list[torch.Tensor], kind: str, size: int | None, dtype: torch.dtype
) -> torch.Tensor:
    batch, queries, keys = anchor.shape
    return anchor.new_empty(batch, 1, queries, keys, dtype=dtype)


def lifted_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    device: Any = "meta",
    **_: Any,
) -> torch.Tensor:
    """The mask function of transformers' AttentionMaskInterface, recorded as one operator: additive, [B, 1, S, T].

    A mask that follows no rule is an error only where attention uses it: some models make masks for layers that they
    do not have.
    """
    blocks: list[torch.Tensor] = []
    try:
        spec = find_mask_spec(mask_function, blocks)
        kind, size = str(spec.kind), spec.size
    except RewriterError as error:
        kind, size = str(error), None
    anchor = torch.zeros(batch_size, q_length, kv_length, dtype=torch.bool, device=device)  # gives the sizes
    return torch.ops.rewriter_trace.mask(anchor, blocks, kind, size, dtype)


def refuse_unknown_masks(graph: fx.Graph) -> None:
    """Raise RewriterError where a mask that follows no rule is used."""
    for node in graph.nodes:
        mask = node.kwargs.get("mask") if node.target is ops.additive_mask else None
        if isinstance(mask, MaskSpec) and mask.kind not in get_args(ops.MaskKind):
            raise RewriterError(mask.kind)


class _Index(np.ndarray):
    """An integer grid that mask functions take for a tensor; they are then evaluated outside of any trace."""

    device = "cpu"

    def new_ones(self, shape: Any, dtype: Any = None) -> np.ndarray:
        return np.ones(shape, dtype=bool).view(_Index)

    def new_zeros(self, shape: Any, dtype: Any = None) -> np.ndarray:
        return np.zeros(shape, dtype=bool).view(_Index)

    def to(self, *args: Any, **kwargs: Any) -> _Index:
        return self


_BLOCKS = "a mask lets tokens of a block see each other, and which block a text's tokens are in is not -1, none"
_FAR = 1 << 17  # beyond every window and chunk in use; a wider one equals causal up to here


class _NoBlock:
    """The blocks of tokens in which no token is."""

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.full(np.shape(index[-1]), -1).view(_Index)


def find_mask_spec(mask_function: Callable[..., Any], blocks: list[torch.Tensor] | None = None) -> MaskSpec:
    """The MaskSpec that agrees with `mask_function(batch, head, q, kv) -> bool`, checked on sampled positions.

    It is the rule of tokens that are in no block (of an image) whose tokens see each other. To `blocks` are added the
    tensors that tell the block of each token, of which -1, none, was assumed. Raises RewriterError when no rule of
    MaskSpec agrees (position biases, packed sequences, custom overlays).
    """
    mask_function = _of_plain_text(mask_function, [] if blocks is None else blocks)

    def evaluate(q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        zero = np.zeros((), dtype=np.int64).view(_Index)
        result = mask_function(zero, zero, q.view(_Index), kv.view(_Index))
        return np.broadcast_to(np.asarray(result, dtype=bool), np.broadcast_shapes(q.shape, kv.shape))

    try:
        keys = np.arange(_FAR + 2, dtype=np.int64)
        row = evaluate(np.int64(_FAR - 1).reshape(1), keys)
        if row[_FAR]:
            spec = MaskSpec("bidirectional")
        elif row[0]:
            spec = MaskSpec("causal")
        elif not row.any():  # a window of 0, which models make and hand to no layer
            spec = MaskSpec("window", 0)
        else:
            spec = MaskSpec("window", _FAR - int(np.argmax(row)))
            # the first query of a chunk does not see the key before it, with which a window larger than 1 begins
            previous = evaluate(keys[1:_FAR], keys[: _FAR - 1])
            if spec.size != 1 and not previous.all():
                spec = MaskSpec("chunk", int(np.argmin(previous)) + 1)
        rng = np.random.default_rng(0)
        size = spec.size or 64
        q = np.concatenate([rng.integers(0, _FAR, 4096), rng.integers(0, 3 * size, 4096)])
        kv = np.clip(q + np.concatenate([rng.integers(-3 * size, 4, 4096), rng.integers(-2 * size, 4, 4096)]), 0, None)
        expected = spec.visible(q[:, None], kv[:, None])[:, 0, 0]  # plain operators: numpy does as well as torch
        agrees = bool((evaluate(q, kv) == expected).all())
    except Exception as error:
        raise RewriterError(f"a mask function could not be evaluated ({type(error).__name__}: {error})") from error
    if not agrees:
        raise RewriterError("a mask is none of causal, window, chunk, bidirectional: its attention cannot be traced")
    return spec


def _of_plain_text(function: Any, blocks: list[torch.Tensor]) -> Any:
    """`function` with the tensors that transformers' mask functions close over, and inner ones, as of plain text: no
    left padding, and no blocks, which are added to `blocks`."""
    if isinstance(function, tuple):
        return tuple(_of_plain_text(each, blocks) for each in function)
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    cells = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        value = cell.cell_contents
        if name == "left_padding" and isinstance(value, torch.Tensor):
            value = np.zeros(1, dtype=np.int64)
        if name == "block_sequence_ids" and isinstance(value, torch.Tensor):
            blocks.append(value)
            value = _NoBlock()
        cells.append(types.CellType(_of_plain_text(value, blocks)))
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# --- masks that a model computes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Static:
    """A tensor that depends on lengths and constants alone.

    `evaluate(length, stand_in)` is its value for one row of `length` tokens; the lifted masks inside follow `stand_in`
    instead of their own rule where one is given. `masks` are those rules, `largest` is the largest number that stands
    in the computation (a window that short lengths would not show). `sized`: whether any number stands there
    from which a size could be computed; without one no window has a size. `coarse`: numbers were added or multiplied in
    the model's dtype, of which a short one rounds large numbers.
    """

    evaluate: Callable[[int, MaskSpec | None], Any]
    masks: frozenset[MaskSpec] = frozenset()
    largest: int = 0
    sized: bool = False
    coarse: bool = False


class StaticGraph:
    """Evaluates the static nodes of one cleaned graph. `buffers` by the names of its get_attr nodes; `inputs` are the
    static ones among its placeholders. A model's attention mask is all ones: nothing is padded."""

    def __init__(
        self, graph: fx.Graph, buffers: Mapping[str, torch.Tensor | None], inputs: Mapping[fx.Node, Static], length: int
    ) -> None:
        self.graph, self.buffers, self.inputs = graph, buffers, inputs
        self._known: dict[fx.Node, Static | None] = {}
        sizes = [s for n in graph.nodes if n.op == "placeholder" for s in getattr(n.meta.get("val"), "shape", ())]
        self._lengths = {str(s) for s in sizes if isinstance(s, torch.SymInt) and s.node.hint == length}

    def settle_blocks(self) -> None:
        """Let masks, in place, no longer read blocks in which no token is. Where one may be, the mask has no rule."""
        for node in self.graph.nodes:
            if node.target is ops.additive_mask and (blocks := node.kwargs.get("blocks")):
                found = [self.of(block) for block in blocks]
                none = all(f is not None and bool((f.evaluate(_SHORT, None) == -1).all()) for f in found)
                node.kwargs = {"mask": node.kwargs["mask"] if none else MaskSpec(_BLOCKS)}  # type: ignore[arg-type]

    def of(self, node: fx.Node) -> Static | None:
        """`node` as a static value, or None."""
        if node not in self._known:
            self._known[node] = self._find(node)
        return self._known[node]

    def _find(self, node: fx.Node) -> Static | None:
        if node in self.inputs:
            return self.inputs[node]
        if node.op == "get_attr":
            value = self.buffers.get(str(node.target))
            if value is None:
                return None
            return Static(lambda length, stand_in: value, largest=max((0, *value.shape)), sized=True)
        if node.op != "call_function" or node.target is ops.attention:
            return None
        if kind_of(node) == "size":
            size = node.meta["val"]
            sized = not (isinstance(size, torch.SymInt) and size.node.expr.is_Symbol)
            return Static(lambda length, stand_in: self._size(size, length), sized=sized)
        row = operator_of(node)
        if row is not None and row.kind == "creation_like" and row.is_filled:
            number = row.fill if row.fill_at is None else args_of(node)[row.fill_at]
            if not isinstance(number, fx.Node):
                return Static(lambda length, stand_in: self._filled(node, number, length), sized=_is_size(number))
        read = [args_of(node)[0]] if node.target is ops.type_as_model else node.all_input_nodes
        sources = {} if node.target is ops.additive_mask else {n: self.of(n) for n in read}
        if any(s is None for s in sources.values()):
            return None
        known: dict[fx.Node, Static] = {n: s for n, s in sources.items() if s is not None}
        masks = frozenset().union(*(s.masks for s in known.values()))
        leaves = tree_leaves((node.args, node.kwargs))
        numbers = [abs(x) for x in leaves if type(x) is int and abs(x) < 1 << 60]
        if node.target is ops.additive_mask:
            masks |= {node.kwargs["mask"]}  # type: ignore[arg-type]
        largest = max([0, *numbers, *(s.largest for s in known.values())])
        sized = any(map(_is_size, leaves)) or any(s.sized for s in known.values())

        arithmetic = function_of(node) in ("add", "sub", "mul", "div")
        coarse = (arithmetic and getattr(node.meta.get("val"), "dtype", None) == TRACE_DTYPE) or any(
            s.coarse for s in known.values()
        )

        def evaluate(length: int, stand_in: MaskSpec | None) -> Any:
            values: dict[fx.Node, Any] = {n: s.evaluate(length, stand_in) for n, s in known.items()}
            if node.target is ops.additive_mask:
                like = torch.empty(1, length)
                return ops.additive_mask(like, mask=stand_in or node.kwargs["mask"])
            if node.target is ops.type_as_model:
                return values[args_of(node)[0]].float()
            kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "layout", "pin_memory")}
            args, kwargs = fx.map_arg((node.args, kwargs), values.__getitem__)
            return node.target(*args, **kwargs)  # type: ignore[operator]

        return Static(functools.cache(evaluate), masks, largest, sized, coarse)

    def _filled(self, node: fx.Node, number: Any, length: int) -> torch.Tensor:
        """A tensor of one number, of which another one may only lend the size."""
        sizes = [self._size(s, length) if isinstance(s, torch.SymInt) else s for s in node.meta["val"].shape]
        kind = torch.float32 if node.meta["val"].is_floating_point() else node.meta["val"].dtype
        return torch.full(sizes, number, dtype=kind)

    def _size(self, size: Any, length: int) -> int:
        """A dynamic size for one row of `length` tokens."""
        expression = size.node.expr  # the sympy expression of a torch.SymInt, for which there is no public name
        values = {symbol: length if str(symbol) in self._lengths else 1 for symbol in expression.free_symbols}
        return int(expression.subs(values))


def _is_size(value: Any) -> bool:
    """True if a size could be computed from it. A number of 2^60 and more, such as a dtype's lowest, only hides."""
    return type(value) in (int, float) and 0 < abs(value) < 1 << 60


_STAND_INS = (MaskSpec("causal"), MaskSpec("window", 3), MaskSpec("chunk", 4), MaskSpec("bidirectional"))
_SHORT = 13
_LENGTHS = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16)


def seen_by(hidden: Callable[[int, MaskSpec | None], torch.Tensor], value: Static) -> MaskSpec | None:
    """The rule for the keys that are not hidden, or None when MaskSpec has none for it.

    `hidden(length, stand_in)` is a boolean tensor [..., S or 1, T or 1]: what `value` hides.
    """

    def visible(length: int, stand_in: MaskSpec | None) -> torch.Tensor | None:
        grid = hidden(length, stand_in)
        while grid.dim() > 2:
            if not (grid == grid[:1]).all():
                return None  # it differs by head
            grid = grid[0]
        return ~grid.expand(length, length)

    if not value.masks:
        return _own_rule(visible, None, value)
    if len(value.masks) > 1:
        return None
    (mask,) = value.masks
    if mask.kind not in get_args(ops.MaskKind):
        return None
    rest = visible(_SHORT, MaskSpec("bidirectional"))
    if rest is None:
        return None
    for spec in _STAND_INS:  # what the model hides itself, and what the mask hides
        grid = visible(_SHORT, spec)
        if grid is None or not torch.equal(grid, rest & _grid(spec, _SHORT)):
            return None
    own = _own_rule(visible, MaskSpec("bidirectional"), value)
    both = None if own is None else own.intersection(mask)
    return None if both is None or both.size == 0 else both


def _own_rule(
    visible: Callable[[int, MaskSpec | None], torch.Tensor | None], stand_in: MaskSpec | None, value: Static
) -> MaskSpec | None:
    largest = value.largest
    whole = {largest} if 1 < largest <= _LENGTHS[0] else set()  # a buffer shows all of its rule in full
    for length in sorted({*(_LENGTHS if value.sized else _LENGTHS[-1:]), *whole}, reverse=True):
        try:
            grid = visible(length, stand_in)
        except (RuntimeError, IndexError):  # longer than a buffer of the model
            continue
        if grid is None:
            return None
        if largest > length and not grid.all():
            return None  # a window of that size would not show
        last = grid[-1]
        sizes = {length - int(last.float().argmax()), int(grid[:, 0].float().argmin())} - {0, length}
        specs = [MaskSpec("bidirectional"), MaskSpec("causal")]
        specs += [MaskSpec(kind, size) for kind in ("window", "chunk") for size in sorted(sizes)]
        return next((s for s in specs if torch.equal(grid, _grid(s, length))), None)
    return None


def _grid(spec: MaskSpec, length: int) -> torch.Tensor:
    positions = torch.arange(length)
    return spec.visible(positions, positions)
