"""Quantized collectives of what is not finite, wrong uses, errors between messages, and the end of a process."""

from __future__ import annotations

import atexit
import os
import signal
import time
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quantized_oracle import numbers, place, relative
from ranks import refusal, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from rewriter.runtime import all_reduce_wait
from rewriter.runtime.collectives import exchange
from rewriter.runtime.collectives.exchange import Transfer
from rewriter.runtime.quantized import background, schedules
from rewriter.runtime.quantized.launch import all_reduce_start as flat_all_reduce_start
from rewriter.runtime.quantized.launch import quantized_all_reduce, quantized_all_reduce_start, reduce_scatter


def broken(group):
    """What is said, for each way to run programs, by the next call after one that failed between messages."""
    x, said = torch.ones(3000), {}
    ways = {
        "started early": lambda: quantized_all_reduce_start(x, group, format="int8"),
        "now": lambda: flat_all_reduce_start(x, group, "int8", wait=True),
        "one message": lambda: reduce_scatter(x, group, "int8"),
    }

    def fails(*_: Any) -> None:
        raise RuntimeError("the link is down")

    for way, start in ways.items():
        exchange._interrupted.clear()
        waited(start())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schedules.Summands, "total", fails)
            patch.setattr(schedules.Summands, "requantized", fails)
            with pytest.raises(RuntimeError, match="the link is down"):
                waited(start())
        for after, later in ways.items():
            said[way, after] = refusal(lambda later=later: waited(later()))
    return said


def waited(started):
    return started.wait() if isinstance(started, Transfer) else all_reduce_wait(started)


def odd(group):
    dist.new_group([0])  # ranks belong to different numbers of groups, of which torch makes the names of new ones
    rank, mesh = group.rank(), place(group, (2, 1))
    x = numbers(0, 700)
    x[300 + 200 * rank] = float("nan") if rank else float("inf")
    found = [quantized_all_reduce(x, where, format=f) for where in (group, mesh) for f in ("int8", "int4-hadamard")]
    compiled = torch.compile(lambda: quantized_all_reduce(x, group, format="int8"), fullgraph=True, backend="eager")()
    found.append(compiled)
    cube = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    wrong = {
        "format": lambda: quantized_all_reduce(x, group, format="int5", name="mlp"),
        "hops": lambda: quantized_all_reduce(x, group, format="int8/int4"),
        "dtype": lambda: quantized_all_reduce_start(x.double(), group, format="int8"),
        "integers": lambda: quantized_all_reduce(x.int(), group, format="int8"),
        "mesh": lambda: quantized_all_reduce(x, cube, format="int8"),
        "ranks": lambda: quantized_all_reduce(x, 2, format="int8"),
        "dithered": lambda: reduce_scatter(x, group, "fp8", seed=1),
        "divide": lambda: reduce_scatter(x[:699], group, "int8"),
    }
    messages = {name: refusal(call) for name, call in wrong.items()}
    return found, messages, ended_in_a_fork(), broken(group)


def ended_in_a_fork():
    """The exit status of a process forked from this one, whose thread has run, with a collective under way at its
    end: 0 if that ended first."""
    process = os.fork()
    if not process:
        signal.alarm(300)
        job = background.start(lambda: time.sleep(0.2))
        atexit._run_exitfuncs()
        os._exit(not job.finished.is_set())
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@cache
def launched():
    return run_ranks(odd, 2)


def test_what_is_not_finite_and_what_cannot_be_done():
    """Blocks of 128 that one rank could not quantize are NaN on all, the others are what they are."""
    expected = 2 * numbers(0, 700)
    expected[256:512] = float("nan")
    for found, messages, *_ in launched():
        for total in found:
            assert torch.equal(total.isnan(), expected.isnan())
            assert relative(total.nan_to_num(), expected.nan_to_num().double()) < 0.15
        for name, words in {
            "format": "quantized_all_reduce mlp: format 'int5': expected one of int8, ",
            "hops": '"int8/int4" is a format inside nodes and one between them, but there is one group of 2 ranks',
            "dtype": "quantized_all_reduce: x is torch.float64, expected bfloat16, float16 or float32",
            "integers": "quantized_all_reduce: x is torch.int32",
            "mesh": "a mesh of 3 dimensions (a 1, b 2, c 1)",
            "ranks": "expected a ProcessGroup or a DeviceMesh, not int",
            "dithered": "quantized_reduce_scatter: format 'fp8': its levels are not uniform",
            "divide": "699 elements do not divide by 2 ranks",
        }.items():
            assert words in messages[name], name


def test_an_error_between_messages_is_not_forgotten():
    """Every later call would sum what has yet to arrive for this one."""
    for *_, said in launched():
        assert len(said) == 9
        for words in said.values():
            assert "an earlier call in this process ended in RuntimeError(the link is down) with messages" in words


def test_collectives_end_before_their_process_does():
    """Otherwise it would abort. A fork has its own thread."""
    assert all(status == 0 for _, _, status, _ in launched())
