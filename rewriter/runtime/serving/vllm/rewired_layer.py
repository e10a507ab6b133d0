"""A decoder layer of vLLM with another wiring: its own children, called in a rewritten model's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rewriter.output.sum_schedule import Sum, SumStep
from rewriter.runtime.serving.vllm import engine, sums
from rewriter.runtime.serving.vllm.layer_form import BlockCall, ChildCall, Given, LayerForm


@dataclass
class State:
    """The residual stream between two blocks: `stream` + Σ `ready` (+ `drift`, what this rank has added alone since the
    ranks last agreed). The newest block's output is not in it while `token` says that its sum is under way; `own` is
    this rank's part of that, `held` a part whose sum has not begun. All [T, D]; `token` [1]."""

    stream: Tensor
    ready: tuple[Tensor, ...] = ()
    token: Tensor | None = None
    own: Tensor | None = None
    drift: Tensor | None = None
    held: Tensor | None = None

    def settled(self) -> bool:
        return self.token is None and self.drift is None


class RewiredLayer(nn.Module):
    """Mixed into the class of a vLLM layer by `rewire`. B blocks run one after the other, as `steps` say."""

    form: LayerForm
    steps: tuple[SumStep, ...]
    # the layer before, whose last block's sum may end here; a tuple hides its weights
    previous: tuple[RewiredLayer, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output; between layers a tuple stands for what is under way."""
        given = dict(zip(self.form.inputs, args, strict=False)) | kwargs
        state = opened(*self.form.stream_of(given))
        last = [layer.of_last for layer in self.previous]
        for branch, step in zip(self.form.branches, self.steps, strict=True):
            if step.own and state.own is not None:
                state.own = last[-1](state.own)
            output = self.call(branch, self.read(branch, step, state), given)
            self.write(step, state, output, branch.after, last[-1] if last else None)
            last = [partial(self.passed, after=branch.after)]
        return closed(state, self.form)

    def of_last(self, output: Tensor) -> Tensor:
        """The output of the last block as it is added."""
        return self.passed(output, self.form.branches[-1].after)

    def read(self, branch: BlockCall, step: SumStep, state: State) -> Tensor:
        """The block's input, through its norms. Adds to the stream what is ready."""
        left_out: tuple[Tensor, ...] = ()
        if step.late and state.token is None:  # it is ready all the same: a pipeline stage begins here
            state.ready, left_out = state.ready[:-1], state.ready[-1:]
        extra = state.own if step.own else state.drift
        modules = [self.get_submodule(path) for path in branch.before]
        if branch.fused and state.ready and extra is None:
            state.stream = plus(state.stream, state.ready[:-1])
            value, state.stream = modules[0](state.ready[-1], state.stream)
            modules = modules[1:]
        else:
            state.stream = plus(state.stream, state.ready)
            value = state.stream if extra is None else state.stream + extra
        for module in modules:
            value = module(value)
        state.ready = left_out
        return value

    def call(self, branch: BlockCall, read: Tensor, given: dict[str, Any]) -> Tensor:
        """The block's output, of what it reads."""
        first, *others = (self.of_child(call, read, given) for call in branch.calls)
        return plus(first, tuple(others))

    def of_child(self, call: ChildCall, read: Tensor, given: dict[str, Any]) -> Tensor:
        """The part of the block's output that one child adds."""
        for factor in call.entry:
            read = read.clone() if factor is None else read * factor
        memory = torch.empty_like(read) if call.writes else None

        def value(of: Any) -> Any:
            if isinstance(of, Given):
                return memory if of is Given.MEMORY else None
            return read if of is None else given.get(of)

        returned = self.get_submodule(call.path)(*map(value, call.args), **{k: value(v) for k, v in call.kwargs})
        output: Any = memory if call.writes else returned if call.item is None else returned[call.item]
        for factor in call.exit:
            output = output * factor
        added: Tensor = output
        return added

    def write(
        self,
        step: SumStep,
        state: State,
        output: Tensor,
        after: tuple[str | float, ...],
        of_last: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """Add the block's output to the stream, or let its sum begin. `of_last` makes of the sum under way what is
        added."""
        match step.sum:
            case Sum.INSIDE:
                output = output if step.wire is None else sums.total(output, step.wire)
                state.ready = (*state.ready, self.passed(output, after))
            case Sum.BEGIN:
                state.token, state.stream = sums.begin(output, state.stream, step.wire)
                state.own = output
            case Sum.STEP | Sum.DRAIN:
                assert state.token is not None
                assert of_last is not None
                last, token = sums.step(output, state.token, step.wire)
                state.ready, state.token, state.own = (*state.ready, of_last(last)), token, output
                if step.sum is Sum.DRAIN:
                    state.ready = (*state.ready, self.passed(sums.finish(token, output), after))
                    state.token = state.own = None
            case Sum.HOLD:
                state.held = output
            case Sum.BOTH:
                assert state.held is not None
                total = sums.total(state.held + output, step.wire)
                state.ready, state.held = (*state.ready, self.passed(total, after)), None
            case _:
                self.desynced(step, state, self.passed(output, after))

    def desynced(self, step: SumStep, state: State, part: Tensor) -> None:
        """Desynced Residual (arXiv 2501.06589, section 5): what the rank adds alone, and how ranks agree again."""
        drift = part if state.drift is None else state.drift + part
        if step.sum is Sum.DROP:
            state.drift = drift
        elif step.sum is Sum.RESYNC_SUM:
            state.ready, state.drift = (*state.ready, sums.total(drift, step.wire)), None
        else:
            state.stream = plus(state.stream, state.ready)
            state.ready, ranks = (), engine.engine.ranks()
            carried = state.stream if state.drift is None else state.stream + state.drift
            state.stream, state.drift = engine.engine.all_reduce(part + carried / ranks), None

    def passed(self, output: Tensor, after: tuple[str | float, ...]) -> Tensor:
        """A block's output through what stands between it and the stream."""
        for one in after:
            output = output * one if isinstance(one, float) else self.get_submodule(one)(output)
        return output


def opened(hidden: Any, residual: Any) -> State:
    """The state that the layer before has returned."""
    if isinstance(residual, tuple):
        return State(*residual)
    if isinstance(hidden, tuple):
        return State(*hidden)
    return State(hidden) if residual is None else State(residual, (hidden,))


def closed(state: State, form: LayerForm) -> Any:
    """The state as the next layer, or the norm after the last, takes it."""
    whole = (state.stream, state.ready, state.token, state.own, state.drift)
    if not state.settled():
        return (state.stream, whole) if form.paired else form.alone(whole)  # models look at the shape of the first
    if not form.paired or not state.ready:
        stream = plus(state.stream, state.ready)
        return (torch.zeros_like(stream), stream) if form.paired else form.alone(stream)
    return state.ready[-1], plus(state.stream, state.ready[:-1])


def plus(stream: Tensor, outputs: tuple[Tensor, ...]) -> Tensor:
    """`stream` and what is to be added to it, in order."""
    for output in outputs:
        stream = stream + output
    return stream
