"""Runs a test's function on real ranks: N processes, gloo, loopback.

    results = run_ranks(function, 4, argument)      # function(group, argument) on each; results by rank

Processes come from a fork server that has imported torch and what else modules of tests import, once, so a call costs
a fraction of a second and starts clean.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rewriter import RewriterError

_context = multiprocessing.get_context("forkserver")
# What functions of tests import. A rank is forked with it, and would otherwise spend most of its time on imports.
_context.set_forkserver_preload(
    [
        "hypothesis",
        "datasets",
        "peft",
        "pytest",
        "rewriter.adapt.adaptation",
        "rewriter.api",
        "rewriter.convert.conversion",
        "rewriter.emit.module",
        "rewriter.emulation.config",
        "rewriter.recipes.apply",
        "rewriter.tracing",
        "rewriter.training",
        "rewriter.ir.simulate",
        "torch.distributed.fsdp",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
        "transformers.models.mixtral.modeling_mixtral",
        "transformers.pytorch_utils",
        "transformers.trainer",
    ]
)


class RankError(AssertionError):
    """A rank raised, died, or ran past the limit."""


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 300.0) -> list[Any]:
    """`function(group, *arguments)` on `ranks` processes; returns what each returned, in rank order.

    `function` is found by name, so it stands at the top of a module; arguments and results are tensors and plain
    values. Raises RankError with the traceback of the rank that failed first, and stops all ranks after `timeout`
    seconds.
    """
    with tempfile.TemporaryDirectory() as scratch:
        store = os.path.join(scratch, "store")
        pipes = [_context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            _context.Process(target=_rank, args=(function, rank, ranks, store, _packed(arguments), send), daemon=True)
            for rank, (_, send) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, send in pipes:
            send.close()
        try:
            return _collect([receive for receive, _ in pipes], processes, time.monotonic() + timeout, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def refusal(call: Callable[[], Any]) -> str:
    """The message of the RewriterError that `call()` raises: exceptions themselves do not leave a rank."""
    try:
        call()
    except RewriterError as error:
        return str(error)
    return "nothing was refused"


def _collect(receivers: list[Any], processes: list[Any], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(receivers))) - set(results))
            raise RankError(f"ranks {missing} gave no result in {timeout} s")
        for receiver in ready:
            rank = receivers.index(receiver)
            try:
                ok, packed = receiver.recv()
            except EOFError:
                processes[rank].join(5)
                raise RankError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if not ok:
                raise RankError(f"rank {rank} failed:\n{packed}")
            results[rank] = torch.load(io.BytesIO(packed), weights_only=False)
    return [results[rank] for rank in range(len(receivers))]


def _packed(value: Any) -> bytes:
    """Bytes instead of shared memory, which would vanish with the process that made it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _rank(function: Callable[..., Any], rank: int, ranks: int, store: str, arguments: bytes, send: Any) -> None:
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if Path("/sys/class/net/lo").exists() else "lo0"
        dist.init_process_group(
            "gloo", rank=rank, world_size=ranks, store=dist.FileStore(store, ranks), timeout=timedelta(seconds=300)
        )
        result = function(dist.group.WORLD, *torch.load(io.BytesIO(arguments), weights_only=False))
        send.send((True, _packed(result)))
        dist.barrier()
    except BaseException:
        send.send((False, traceback.format_exc()))
