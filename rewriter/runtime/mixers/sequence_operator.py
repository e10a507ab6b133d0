"""Recurrences over whole sequences as operators of torch, opaque to its compiler: no graph depends on how many tokens
there are.

Sequences are computed in pieces, which bounds the memory that the matrices of a piece take. The gradient computes each
piece again, from the state before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Form = Callable[..., tuple[Tensor, Tensor]]


def sequence_operator(
    form: Form, fake: Form, tokens: Mapping[str, int], piece: int, kernel: Callable[..., Any] = lambda *given: None
) -> Form:
    """`form` as the operator rewriter::NAME, with a gradient in all its tensors but `state`.

    `form` takes tensors, or None, of which `tokens` gives the dimension of tokens where there is one, `state`, that
    before the first token or None for zeros, and options. It returns outputs, of which tokens are where its first
    argument has them, and the state after the last token; no gradient goes through that. `fake` returns empty tensors
    like them. At most `piece` tokens are computed at once. `kernel` is asked first, of the same arguments, and
    answers None where it computes nothing; the gradient is always that of `form`.
    """
    schema = torch.library.infer_schema(form, mutates_args=())
    name, pieces = f"rewriter::{form.__name__.strip('_')}", _Pieces(form, tokens, piece, kernel)
    forward = torch.library.custom_op(name, pieces.forward, mutates_args=(), schema=schema)
    backward = torch.library.custom_op(
        f"{name}_backward",
        pieces.backward,
        mutates_args=(),
        schema=f"(Tensor d_out, {schema[1:].partition(') -> ')[0]}) -> Tensor[]",
    )
    forward.register_fake(fake)
    backward.register_fake(lambda d_out, *given: [x.new_empty(x.shape) for x in pieces.tensors(given).values()])

    def gradients_by(function: Callable[..., list[Tensor]]) -> Callable[..., tuple[Tensor | None, ...]]:
        def gradients(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
            given = [x if other is None else other for x, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
            found = dict(zip(pieces.tensors(given), function(d_out, *given), strict=True))
            return tuple(found.get(i) for i in range(len(given)))

        return gradients

    forward.register_autograd(gradients_by(backward), setup_context=_keep)

    class Eager(torch.autograd.Function):
        """The same without the operators, whose first call imports Dynamo: that takes a second, in every rank."""

        forward = staticmethod(pieces.forward)
        setup_context = staticmethod(_keep)
        backward = staticmethod(gradients_by(pieces.backward))

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = (forward if torch.compiler.is_compiling() else Eager.apply)(*given)
        return result

    return run


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]


class _Pieces:
    """A form over pieces of a sequence, one after the other."""

    def __init__(self, form: Form, tokens: Mapping[str, int], piece: int, kernel: Callable[..., Any]) -> None:
        names = list(inspect.signature(form).parameters)
        self.form, self.kernel, self.piece, self.state = form, kernel, piece, names.index("state")
        self.tokens = {names.index(name): dimension for name, dimension in tokens.items()}

    def tensors(self, given: Sequence[Any]) -> dict[int, Tensor]:
        """The tensors that have a gradient, by their places among the arguments."""
        return {i: x for i, x in enumerate(given) if isinstance(x, Tensor) and i != self.state}

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        state, out = given[self.state], []
        with torch.autocast(given[0].device.type, enabled=False):
            if (made := self.kernel(*given)) is not None:
                return made[0].contiguous(), made[1].contiguous()
            for start in self._starts(given):
                of_piece, state = self.form(*self._cut(given, start, state))
                out.append(of_piece)
        return (out[0] if len(out) == 1 else torch.cat(out, self.tokens[0])).contiguous(), state.contiguous()

    def backward(self, d_out: Tensor, *given: Any) -> list[Tensor]:
        starts, states = list(self._starts(given)), [given[self.state]]
        with torch.autocast(d_out.device.type, enabled=False):
            for start in starts[:-1]:
                states.append(self.form(*self._cut(given, start, states[-1]))[1])
            found: dict[int, list[Tensor]] = {i: [] for i in self.tensors(given)}
            d_state: Tensor | None = None
            for start, state in reversed(list(zip(starts, states, strict=True))):
                d_piece, d_state = self._of_piece(self._cut(given, start, state), self._part(d_out, 0, start), d_state)
                for i, pieces in found.items():
                    pieces.insert(0, d_piece[i])
        return [
            (torch.cat(pieces, self.tokens[i]) if i in self.tokens else torch.stack(pieces).sum(0)).contiguous()
            for i, pieces in found.items()
        ]

    def _of_piece(
        self, given: list[Any], d_out: Tensor, d_state: Tensor | None
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Gradients of the tensors of a piece, and of the state before it, of those of what it returns."""
        places = [i for i, x in enumerate(given) if isinstance(x, Tensor)]

        def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            return self.form(*({**dict(enumerate(given)), **dict(zip(places, tensors, strict=True))}.values()))

        # autograd by its functional form: within an operator, nothing is recorded
        (_, state), vjp, *_ = torch.func.vjp(run, *(given[i] for i in places))
        found = dict(zip(places, vjp((d_out, torch.zeros_like(state) if d_state is None else d_state)), strict=True))
        return found, found.get(self.state)

    def _starts(self, given: Sequence[Any]) -> range:
        return range(0, given[0].shape[self.tokens[0]], self.piece)

    def _cut(self, given: Sequence[Any], start: int, state: Tensor | None) -> list[Any]:
        cut = [self._part(x, i, start) if i in self.tokens and x is not None else x for i, x in enumerate(given)]
        cut[self.state] = state
        return cut

    def _part(self, x: Tensor, argument: int, start: int) -> Tensor:
        dimension = self.tokens[argument]
        return x.narrow(dimension, start, min(self.piece, x.shape[dimension] - start))
