"""A decoder layer of vLLM that computes rewired tokens by another wiring and all others by its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from rewriter.output.sum_schedule import Sum, SumStep
from rewriter.runtime.serving.vllm import engine, sums
from rewriter.runtime.serving.vllm.layer_form import LayerForm
from rewriter.runtime.serving.vllm.phases import Rows
from rewriter.runtime.serving.vllm.rewired_layer import RewiredLayer, State, closed, opened

EXACT = SumStep(late=False, own=False, sum=Sum.INSIDE)


class Exit(Protocol):
    """The place in a block that sums over ranks."""

    def reduce(self, yes: bool) -> None:
        """Let it sum, or leave it out."""


@dataclass
class BothStates:
    """The residual streams of rewired tokens [R, D] and of all others [E, D] (None without any) between two layers."""

    rewired: State
    exact: State | None


class PhasedLayer(RewiredLayer):
    """Mixed into the class of a vLLM layer by `rewire`, where passes rewire tokens of the prompt alone.

    A batch without rewired tokens is computed by the layer's own forward. In any other, blocks run once over all
    tokens. Their sums at rewired tokens go as `steps` say, and are waited for at once at all others.
    """

    own_form: LayerForm  # of vLLM's own layer
    exits: tuple[tuple[Exit, ...], ...]  # of each block, where it leaves out its sum at rewired tokens

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output; between layers a `BothStates` stands for what is under way."""
        rows: Rows | None = engine.engine.rows
        if rows is None:
            return super(RewiredLayer, self).forward(*args, **kwargs)
        given = dict(zip(self.form.inputs, args, strict=False)) | kwargs
        both = _opened(*self.form.stream_of(given), rows)
        last = [layer.of_last for layer in self.previous]
        blocks = zip(self.form.branches, self.own_form.branches, self.steps, self.exits, strict=True)
        for branch, own, step, leaving in blocks:
            if step.own and both.rewired.own is not None:
                both.rewired.own = last[-1](both.rewired.own)
            exact = None if both.exact is None else self.read(own, EXACT, both.exact)
            read = rows.join(self.read(branch, step, both.rewired), exact)
            with _left_out(leaving):
                output = self.call(branch, read, given)
            if step.unreduced and exact is not None:
                output, step = self.after_last(both.rewired, output, step, last)
            part, exact = rows.split(output)
            if exact is not None and both.exact is not None:
                summed = engine.engine.all_reduce(exact) if step.unreduced else exact
                self.write(EXACT, both.exact, summed, own.after, None)
            self.write(step, both.rewired, part, branch.after, last[-1] if last else None)
            last = [partial(self.passed, after=branch.after)]
        return _closed(both, rows, self.form)

    def after_last(
        self, state: State, output: Tensor, step: SumStep, last: Sequence[Callable[[Tensor], Tensor]]
    ) -> tuple[Tensor, SumStep]:
        """End the sum under way, if any: a group sums one tensor after the other, and that of exact tokens is next. The
        block's output, and its step from there on."""
        if state.token is not None and state.own is not None:
            state.ready = (*state.ready, last[-1](sums.finish(state.token, state.own)))
            state.token = state.own = None
        match step.sum:
            case Sum.DRAIN if step.wire is None:
                return engine.engine.all_reduce(output), replace(step, sum=Sum.INSIDE)
            case Sum.DRAIN:
                return output, replace(step, sum=Sum.INSIDE)
            case Sum.STEP:
                return output, replace(step, sum=Sum.BEGIN)
        return output, step


@contextmanager
def _left_out(exits: tuple[Exit, ...]) -> Iterator[None]:
    """Let a block return a rank's part of its sum meanwhile."""
    for exit in exits:
        exit.reduce(False)
    try:
        yield
    finally:
        for exit in exits:
            exit.reduce(True)


def _opened(hidden: Any, residual: Any, rows: Rows) -> BothStates:
    """The states that the layer before has returned."""
    for whole in (hidden, residual):
        if isinstance(whole, BothStates):
            return whole
    (hidden, exact), (residual, other) = rows.split(hidden), (None, None) if residual is None else rows.split(residual)
    return BothStates(opened(hidden, residual), None if exact is None else opened(exact, other))


def _closed(both: BothStates, rows: Rows, form: LayerForm) -> Any:
    """The states as the next layer, or the norm after the last, takes them."""
    if not both.rewired.settled():
        return (both.rewired.stream, both) if form.paired else form.alone(both)
    rewired = closed(both.rewired, form)
    exact = None if both.exact is None else closed(both.exact, form)
    if not form.paired:
        if form.spare:
            rewired, exact = rewired[0], None if exact is None else exact[0]
        return form.alone(rows.join(rewired, exact))
    return tuple(rows.join(one, None if exact is None else exact[i]) for i, one in enumerate(rewired))
