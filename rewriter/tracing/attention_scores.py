"""The scores of attention written out by hand, read as a sum: one product q kᵀ, and terms.

Where the scale is applied, `baddbmm`, heads folded into the batch, casts, masks that are added, filled in or multiplied
with do not change the meaning. A term that depends on lengths and constants alone is evaluated, and what it hides
becomes a MaskSpec; everything else is a position bias.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from rewriter.ir import args_of
from rewriter.ir.op_semantics import aten, function_of, kind_of
from rewriter.ir.ops import MaskSpec
from rewriter.tracing.masks import HIDDEN, StaticGraph, seen_by

_SLOPE_LENGTHS, _FAR = (21, 5), (512, 256, 128, 64)  # at which a bias is looked at


class UnknownScores(Exception):
    """These scores are none that this module reads."""


@dataclasses.dataclass
class Term:
    """`factor` · `node` of the scores; `folded` says that heads are folded into its batch dimension."""

    node: fx.Node
    factor: float
    folded: bool


@dataclasses.dataclass
class Scores:
    """Scores taken apart: q and kᵀ are the `operands` of their product.

    `fills` are (condition, the truth value that hides), `zeroed` are 0/1 factors.
    """

    static: StaticGraph
    operands: tuple[fx.Node, fx.Node] | None = None
    scale: float = 1.0
    softcap: float | None = None
    terms: list[Term] = dataclasses.field(default_factory=list)
    fills: list[tuple[fx.Node, bool]] = dataclasses.field(default_factory=list)
    zeroed: list[fx.Node] = dataclasses.field(default_factory=list)

    def read(self, node: Any, factor: float, folded: bool) -> None:
        """Add what `factor` · `node` is made of. `node` holds the product q kᵀ. Raises UnknownScores."""
        if not isinstance(node, fx.Node) or node.op != "call_function" or self.operands is not None:
            raise UnknownScores
        args = args_of(node)
        if is_same(node):
            self.read(args[0], factor, folded)
        elif is_view(node):
            if not folds(args[0], node):
                raise UnknownScores
            self.read(args[0], factor, args[0].meta["val"].dim() == 3)
        elif kind_of(node) == "product":
            self._read_product(node, factor, folded)
        elif (reader := _READERS.get(function_of(node))) is not None:
            reader(self, node, factor, folded)
        else:
            raise UnknownScores

    def _read_product(self, node: fx.Node, factor: float, folded: bool) -> None:
        args = args_of(node)
        if is_matmul(node):
            self.operands, self.scale = args[:2], factor
        elif node.target is aten.baddbmm.default:
            beta, alpha = (float(node.kwargs.get(name, 1)) for name in ("beta", "alpha"))  # type: ignore[arg-type]
            added = self.static.of(args[0])
            zero = added is not None and not added.masks and not added.evaluate(5, None).any()
            if beta and not zero:
                self.terms.append(Term(args[0], factor * beta, folded))
            self.operands, self.scale = args[1:3], factor * alpha
        else:
            raise UnknownScores

    def _read_scaled(self, node: fx.Node, factor: float, folded: bool) -> None:
        x, other = args_of(node)[:2]
        divides = function_of(node) == "div"
        if (number := self.number(other)) is not None:
            if node.target is aten.mul.Tensor and (capped := self._capped(x, number)) is not None:
                self._read_capped(capped, number, factor, folded)
            else:
                self.read(x, factor / number if divides else factor * number, folded)
            return
        content, mask = _content(x, other)
        if divides or self.static.of(mask) is None:
            raise UnknownScores
        self.zeroed.append(mask)
        self.read(content, factor, folded)

    def _read_capped(self, node: fx.Node, cap: float, factor: float, folded: bool) -> None:
        if self.softcap is not None or factor != 1.0:
            raise UnknownScores
        before = (len(self.terms), len(self.fills))
        self.read(node, 1.0, folded)
        if before != (len(self.terms), len(self.fills)):
            raise UnknownScores  # a cap around a mask is no cap of scores
        self.softcap = cap

    def _read_sum(self, node: fx.Node, factor: float, folded: bool) -> None:
        alpha = float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
        sign = -alpha if function_of(node) == "sub" else alpha
        first, second = args_of(node)[:2]
        content, other = _content(first, second)
        own, others = (1.0, sign) if content is first else (sign, 1.0)
        self.add_terms(other, factor * others, folded)
        self.read(content, factor * own, folded)

    def _read_fill(self, node: fx.Node, factor: float, folded: bool) -> None:
        x, condition, value = args_of(node)[:3]
        self._fill(condition, True, value, factor)
        self.read(x, factor, folded)

    def _read_floor(self, node: fx.Node, factor: float, folded: bool) -> None:
        """A floor under what is hidden."""
        floor = self.number(args_of(node)[1])
        if floor is None or floor > HIDDEN:
            raise UnknownScores
        self.read(args_of(node)[0], factor, folded)

    def _read_where(self, node: fx.Node, factor: float, folded: bool) -> None:
        condition, a, b = args_of(node)[:3]
        if node.target is aten.where.self:
            content, other = _content(a, b)
        else:
            content, other = (a, b) if node.target is aten.where.ScalarOther else (b, a)
        self._fill(condition, content is b, other, factor)
        self.read(content, factor, folded)

    def _fill(self, condition: Any, hides: bool, value: Any, factor: float) -> None:
        number = self.number(value)
        if number is None or factor * number > HIDDEN or self.softcap is not None:
            raise UnknownScores
        self.fills.append((condition, hides))

    def add_terms(self, node: fx.Node, factor: float, folded: bool) -> None:
        """The summands of an operand that holds no product of queries and keys."""
        plain = node.target is aten.add.Tensor and not node.kwargs
        if plain and all(isinstance(n, fx.Node) and shape_of(n) == shape_of(node) for n in args_of(node)):
            for summand in args_of(node):
                self.add_terms(summand, factor, folded)
            return
        self.terms.append(Term(node, factor, folded))

    def number(self, x: Any) -> float | None:
        """A Python number, or a static tensor of one element, as a number."""
        if isinstance(x, (int, float)):
            return float(x)
        value = self.static.of(x) if isinstance(x, fx.Node) else None
        if value is None or x.meta["val"].dim() != 0 or value.masks:
            return None
        values = {float(value.evaluate(length, None)) for length in (5, 7)}
        return values.pop() if len(values) == 1 else None

    def _capped(self, node: Any, cap: float) -> fx.Node | None:
        """x, where `node` is tanh(x / cap)."""
        node = _uncast(node)
        if not isinstance(node, fx.Node) or function_of(node) != "tanh":
            return None
        inner = _uncast(args_of(node)[0])
        if function_of(inner) != "div" or self.number(args_of(inner)[1]) != cap:
            raise UnknownScores
        source = args_of(inner)[0]
        return source if isinstance(source, fx.Node) else None

    def slopes(self, biases: Sequence[Term], heads: int) -> tuple[torch.Tensor | None, list[Term]]:
        """(what `biases` add per step of distance, [heads], the others of them).

        A bias that grows by the same amount from key to key is such a one in any row: a number that is added to all
        scores of a query changes no weight.
        """
        total, others = torch.zeros(heads), []
        for term in biases:
            slopes = self._slopes(term, heads)
            if slopes is None:
                others.append(term)
            else:
                total = total + slopes
        return (None if len(others) == len(biases) else total), others

    def _slopes(self, term: Term, heads: int) -> torch.Tensor | None:
        value = self.static.of(term.node)
        if value is None or value.coarse:
            return None
        if value.masks and self._shown(term.node, partial(_is_hidden, term.factor)) is None:
            return None  # no rule says what its masks hide: without them, as below, it may be a line

        def line(length: int) -> torch.Tensor | None:
            """[H or 1]: what each of `length` keys adds, if all add the same."""
            values = value.evaluate(length, MaskSpec("bidirectional")).float() * term.factor
            return _line(values[0] if values.dim() == 4 and len(values) == 1 else values, length, heads)

        short, shorter = map(line, _SLOPE_LENGTHS)
        if short is None or shorter is None or not torch.allclose(short, shorter, rtol=1e-5, atol=0.0):
            return None
        for length in _FAR:  # the longest that the model's buffers have
            with contextlib.suppress(RuntimeError, IndexError):
                if value.evaluate(length, MaskSpec("bidirectional")).shape[-1] == length:
                    return None if line(length) is None else short.expand(heads)
        return short.expand(heads)

    def rule(self) -> tuple[MaskSpec, list[Term]]:
        """(what may be seen, the terms that are biases). Raises UnknownScores where MaskSpec has no such rule."""
        rule: MaskSpec | None = MaskSpec("bidirectional")
        biases: list[Term] = []
        for condition, hides in self.fills:
            shown = self._shown(condition, partial(_is_filled, hides))
            if shown is None or rule is None:
                raise UnknownScores  # what is filled in cannot be told from what is seen
            rule = rule.intersection(shown)
        for term in self.terms:
            shown = self._shown(term.node, partial(_is_hidden, term.factor))
            both = None if shown is None or rule is None else rule.intersection(shown)
            rule = rule if both is None else both
            if both is None or not self._only_hides(term):
                biases.append(term)  # with all it hides: -1e38 added hides as well as a rule does
        if rule is None:
            raise UnknownScores
        for factor in self.zeroed:
            shown = self._shown(factor, _zeros)
            if shown is None or rule.intersection(shown) != rule:
                raise UnknownScores
        return rule, biases

    def _shown(self, node: fx.Node, hidden: Callable[[torch.Tensor], torch.Tensor]) -> MaskSpec | None:
        """The rule for what a static value does not hide; None where there is none."""
        value = self.static.of(node)
        if value is None:
            return None
        return seen_by(lambda length, stand_in: hidden(value.evaluate(length, stand_in)), value)

    def _only_hides(self, term: Term) -> bool:
        """True if a static term is 0 wherever it does not hide."""
        value = self.static.of(term.node)
        assert value is not None
        values = [value.evaluate(length, None) * term.factor for length in (1, 21)]
        return not any(((each != 0) & (each > HIDDEN)).any() for each in values)


def _line(grid: torch.Tensor, length: int, heads: int) -> torch.Tensor | None:
    """[H or 1]: what each value of `grid` [H or 1, S or 1, T] adds to that of the key before, if all add the same."""
    if grid.dim() != 3 or len(grid) not in (1, heads) or grid.shape[1:] not in ((1, length), (length, length)):
        return None
    steps = (grid[..., -1:] - grid[..., :1]) / (length - 1)
    line = grid[..., :1] + steps * torch.arange(length)
    if not torch.allclose(grid, line, rtol=1e-5, atol=1e-5 * float(steps.abs().max())):
        return None
    return steps[:, 0, 0] if torch.allclose(steps, steps[:, :1].expand_as(steps), rtol=1e-5, atol=0.0) else None


_READERS: dict[str, Callable[[Scores, fx.Node, float, bool], None]] = {
    "mul": Scores._read_scaled,
    "div": Scores._read_scaled,
    "add": Scores._read_sum,
    "sub": Scores._read_sum,
    "masked_fill": Scores._read_fill,
    "floor": Scores._read_floor,
    "where": Scores._read_where,
}


def _is_filled(hides: bool, values: torch.Tensor) -> torch.Tensor:
    return values.bool() == hides


def _is_hidden(factor: float, values: torch.Tensor) -> torch.Tensor:
    return values * factor <= HIDDEN


def _zeros(values: torch.Tensor) -> torch.Tensor:
    if not ((values == 0) | (values == 1)).all():
        raise UnknownScores
    return values == 0


def _content(a: Any, b: Any) -> tuple[fx.Node, fx.Node]:
    """(the operand that holds the product of queries and keys, the other one)."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        raise UnknownScores
    holds = [_holds_product(a), _holds_product(b)]
    if holds[0] == holds[1]:
        raise UnknownScores
    return (a, b) if holds[0] else (b, a)


def _holds_product(node: fx.Node) -> bool:
    if kind_of(node) == "product":
        return is_matmul(node) or node.target is aten.baddbmm.default
    through = is_same(node) or is_view(node) or function_of(node) in ("tanh", *_READERS)
    return through and any(_holds_product(n) for n in node.all_input_nodes)


def _uncast(node: Any) -> Any:
    """The value of which `node` is a cast or a copy."""
    while isinstance(node, fx.Node) and kind_of(node) in ("cast", "copy"):
        node = args_of(node)[0]
    return node


def is_matmul(node: fx.Node) -> bool:
    """True if a node is the product of its first two arguments, which may have batch dimensions."""
    return node.target in (aten.matmul.default, aten.bmm.default)


def is_same(node: fx.Node) -> bool:
    """True if a node has the values of its first argument: a cast, a copy, an expand to the shape that is there."""
    copies = node.target is aten.expand.default and shape_of(args_of(node)[0]) == shape_of(node)
    return copies or kind_of(node) in ("cast", "copy")


def is_view(node: fx.Node) -> bool:
    """True if a node gives its argument other sizes, or makes it contiguous."""
    return kind_of(node) == "view" or node.target is aten.contiguous.default


def shape_of(node: fx.Node) -> tuple[str, ...]:
    """The sizes of a node's value; dynamic ones by their names."""
    return tuple(map(str, node.meta["val"].shape))


def folds(before: fx.Node, after: fx.Node) -> bool:
    """True if a view only folds heads into the batch, takes them apart again, or changes nothing."""
    a, b = shape_of(before), shape_of(after)
    return a == b or ({len(a), len(b)} == {3, 4} and a[-2:] == b[-2:])
