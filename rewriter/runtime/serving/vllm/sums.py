"""All-reduces that begin after a block and end after the next one: custom operators that stay inside a compiled
graph and inside a captured one.

The order of begins and ends is a dependence of data: every operator takes what the one before it returned. What is
under way is in a queue of this process: an operator may not return what it was given, and a compiler must not see a
tensor that changes later. On CUDA the engine's own all-reduce runs on a stream of higher priority. Where vLLM
captures a graph piece by piece (PIECEWISE), whose pieces cannot share an open stream, it runs inline, as every sum does
with REWRITER_OVERLAP=0. On a CPU small sums need no thread, others run in one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rewriter.output.sum_schedule import Wire
from rewriter.runtime.serving.vllm import engine

_library = torch.library.Library("rewriter_serving", "FRAGMENT")


# Of every all-reduce between its begin and its end, what gives the sum (on CUDA: to what this stream runs next).
_under_way: deque[Callable[[], Tensor]] = deque()


@cache
def overlaps() -> bool:
    """False if REWRITER_OVERLAP=0 in this worker's environment: each sum ends where it begins. For comparisons."""
    return os.environ.get("REWRITER_OVERLAP", "1") != "0"


def _launch(x: Tensor, format: str, min_bytes: int) -> None:
    """Begin the all-reduce of a copy of `x`: the compiler gives the memory of `x` to others after this operator."""
    copy, format = x.clone(), _format_of(x, format, min_bytes)
    if engine.engine.ranks() == 1:
        _under_way.append(lambda: copy)
    elif not overlaps() or engine.engine.in_pieces():
        result = _all_reduce(copy, format)
        _under_way.append(lambda: result)
    elif x.device.type == "cpu":
        begun = None if format else engine.engine.begin(copy)
        _under_way.append(
            _thread().submit(_all_reduce, copy, format).result if begun is None else partial(_awaited, copy, begun)
        )
    else:
        stream, here = _stream(x.device), torch.cuda.current_stream()
        # Whatever was freed before this is read before it: memory of this stream may be used again without a record.
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            result = _all_reduce(copy, format)
            ended = stream.record_event()
        _under_way.append(partial(_after, result, ended))


def _awaited(result: Tensor, work: Any) -> Tensor:
    work.wait()
    return result


def _after(result: Tensor, ended: torch.cuda.Event) -> Tensor:
    torch.cuda.current_stream().wait_event(ended)
    return result


def _format_of(x: Tensor, format: str, min_bytes: int) -> str:
    """The format in which `x` travels, "" for as it is: short messages take as long as their latency."""
    return format if x.nbytes >= min_bytes and engine.engine.ranks() > 1 else ""


def _all_reduce(x: Tensor, format: str) -> Tensor:
    with torch.inference_mode():  # which is a state of each thread
        return engine.engine.quantized_sum_now(x, format) if format else engine.engine.all_reduce_now(x)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rewriter-all-reduce")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


# --- operators. `token` [1] stands for what is under way; it is made anew by each, so that they stay in order


def _begin(new: Tensor, stream: Tensor, format: str, min_bytes: int) -> tuple[Tensor, Tensor]:
    while _under_way:  # of a forward pass that has failed
        _under_way.popleft()()
    _launch(new, format, min_bytes)
    return new.new_empty(1), stream.clone()


def _step(new: Tensor, token: Tensor, format: str, min_bytes: int) -> tuple[Tensor, Tensor]:
    _launch(new, format, min_bytes)
    return _under_way.popleft()(), new.new_empty(1)


def _finish(token: Tensor, like: Tensor) -> Tensor:
    return _under_way.popleft()()


def _total(new: Tensor, format: str, min_bytes: int) -> Tensor:
    return _all_reduce(new.clone(), _format_of(new, format, min_bytes))


# The shapes of what each operator returns are those of its argument: (name, schema, function, function of shapes).
_OPERATORS: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        "begin", "(Tensor new, Tensor stream, str format, int min_bytes) -> (Tensor, Tensor)", _begin,
        lambda new, stream, *_: (new.new_empty(1), torch.empty_like(stream)),
    ),
    (
        "step", "(Tensor new, Tensor token, str format, int min_bytes) -> (Tensor, Tensor)", _step,
        lambda new, token, *_: (torch.empty_like(new), new.new_empty(1)),
    ),
    ("finish", "(Tensor token, Tensor like) -> Tensor", _finish, lambda token, like: torch.empty_like(like)),
    (
        "total", "(Tensor new, str format, int min_bytes) -> Tensor", _total,
        lambda new, *_: torch.empty_like(new),
    ),
)  # fmt: skip
for _name, _schema, _run, _fake in _OPERATORS:
    _library.define(_name + _schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library._register_fake(_name, _fake)


def begin(new: Tensor, stream: Tensor, wire: Wire | None = None) -> tuple[Tensor, Tensor]:
    """Begin the sum of `new` [T, D]: (a token, `stream`). Whoever reads the stream that is returned, reads it after."""
    run = torch.ops.rewriter_serving.begin if is_compiling() else _begin
    begun: tuple[Tensor, Tensor] = run(new, stream, *_said(wire))
    return begun


def step(new: Tensor, token: Tensor, wire: Wire | None = None) -> tuple[Tensor, Tensor]:
    """Begin the sum of `new` [T, D] and end the one that `token` stands for: (that sum, a token)."""
    run = torch.ops.rewriter_serving.step if is_compiling() else _step
    stepped: tuple[Tensor, Tensor] = run(new, token, *_said(wire))
    return stepped


def finish(token: Tensor, like: Tensor) -> Tensor:
    """The sum that `token` stands for, of the shape of `like`."""
    finished: Tensor = (torch.ops.rewriter_serving.finish if is_compiling() else _finish)(token, like)
    return finished


def total(new: Tensor, wire: Wire | None) -> Tensor:
    """The sum of `new` [T, D], waited for; the engine's own where there is no `wire`. Nothing may be under way."""
    run = torch.ops.rewriter_serving.total if is_compiling() else _total
    summed: Tensor = engine.engine.all_reduce(new) if wire is None else run(new, *_said(wire))
    return summed


def _said(wire: Wire | None) -> tuple[str, int]:
    return ("", 0) if wire is None else (wire.format, wire.min_bytes)
