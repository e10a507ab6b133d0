"""All-reduces that begin after a block and end after the next one: custom operators that stay inside a compiled
graph and inside a captured one.

The order of begins and ends is a dependence of data: every operator takes what the one before it returned. What is
under way is in a queue of this process: an operator may not return what it was given, and a compiler must not see a
tensor that changes later. On CUDA the engine's own all-reduce runs on a stream of higher priority. Where vLLM
captures a graph piece by piece (PIECEWISE), whose pieces cannot share an open stream, it runs inline. On a CPU small
sums need no thread, others run in one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rewriter.runtime.serving.vllm import engine

_library = torch.library.Library("rewriter_serving", "FRAGMENT")


# Of every all-reduce between its begin and its end, what gives the sum (on CUDA: to what this stream runs next).
_under_way: deque[Callable[[], Tensor]] = deque()


def _launch(x: Tensor) -> None:
    """Begin the all-reduce of a copy of `x`: the compiler gives the memory of `x` to others after this operator."""
    copy = x.clone()
    if engine.engine.ranks() == 1:
        _under_way.append(lambda: copy)
    elif x.device.type == "cpu":
        begun = engine.engine.begin(copy)
        _under_way.append(
            _thread().submit(_all_reduce, copy).result if begun is None else partial(_awaited, copy, begun)
        )
    elif engine.engine.in_pieces():
        result = _all_reduce(copy)
        _under_way.append(lambda: result)
    else:
        stream, here = _stream(x.device), torch.cuda.current_stream()
        # Whatever was freed before this is read before it: memory of this stream may be used again without a record.
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            result = _all_reduce(copy)
            ended = stream.record_event()
        _under_way.append(partial(_after, result, ended))


def _awaited(result: Tensor, work: Any) -> Tensor:
    work.wait()
    return result


def _after(result: Tensor, ended: torch.cuda.Event) -> Tensor:
    torch.cuda.current_stream().wait_event(ended)
    return result


def _all_reduce(x: Tensor) -> Tensor:
    with torch.inference_mode():  # which is a state of each thread
        return engine.engine.all_reduce_now(x)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rewriter-all-reduce")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


# --- operators. `token` [1] stands for what is under way; it is made anew by each, so that they stay in order


def _begin(new: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
    while _under_way:  # of a forward pass that has failed
        _under_way.popleft()()
    _launch(new)
    return new.new_empty(1), stream.clone()


def _step(new: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    _launch(new)
    return _under_way.popleft()(), new.new_empty(1)


def _finish(token: Tensor, like: Tensor) -> Tensor:
    return _under_way.popleft()()


# The shapes of what each operator returns are those of its argument: (name, schema, function, function of shapes).
_OPERATORS: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        "begin", "(Tensor new, Tensor stream) -> (Tensor, Tensor)", _begin,
        lambda new, stream: (new.new_empty(1), torch.empty_like(stream)),
    ),
    (
        "step", "(Tensor new, Tensor token) -> (Tensor, Tensor)", _step,
        lambda new, token: (torch.empty_like(new), new.new_empty(1)),
    ),
    ("finish", "(Tensor token, Tensor like) -> Tensor", _finish, lambda token, like: torch.empty_like(like)),
)  # fmt: skip
for _name, _schema, _run, _fake in _OPERATORS:
    _library.define(_name + _schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library._register_fake(_name, _fake)


def begin(new: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Begin the sum of `new` [T, D]: (a token, `stream`). Whoever reads the stream that is returned, reads it after."""
    begun: tuple[Tensor, Tensor] = (torch.ops.rewriter_serving.begin if is_compiling() else _begin)(new, stream)
    return begun


def step(new: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Begin the sum of `new` [T, D] and end the one that `token` stands for: (that sum, a token)."""
    stepped: tuple[Tensor, Tensor] = (torch.ops.rewriter_serving.step if is_compiling() else _step)(new, token)
    return stepped


def finish(token: Tensor, like: Tensor) -> Tensor:
    """The sum that `token` stands for, of the shape of `like`."""
    finished: Tensor = (torch.ops.rewriter_serving.finish if is_compiling() else _finish)(token, like)
    return finished
