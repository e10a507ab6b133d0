"""A command that needs several processes starts them itself, with torchrun's launcher, and tells why one failed."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence

_STARTED = "REWRITER_STARTED_BY_COMMAND"


def is_rank() -> bool:
    """Whether this process is one of several that a launcher started."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def is_first() -> bool:
    """Whether this process is the only one, or rank 0."""
    return os.environ.get("RANK", "0") == "0"


def start_ranks(arguments: Sequence[str], ranks: int) -> None:
    """Run `rewrite ARGUMENTS` on so many processes of this machine.

    Raises RewriterError with the message of the rank that failed first. The exit code of a failure is that rank's.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from rewriter.common.errors import RewriterError

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0}, local_addr="127.0.0.1", max_restarts=0,
    )  # fmt: skip
    os.environ[_STARTED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    try:
        elastic_launch(config, sys.executable)("-m", "rewriter.cli", *arguments)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        error = RewriterError(_told(failure.message, rank, failure.exitcode))
        error.exit_code = failure.exitcode if failure.exitcode > 0 else 1
        raise error from None
    finally:
        del os.environ[_STARTED]


def _told(message: object, rank: int, code: int) -> str:
    text = message.get("message") if isinstance(message, dict) else message
    return str(text) if text and code > 0 else f"rank {rank} ended with status {code} and said nothing."


def report_to_launcher(message: str) -> bool:
    """Hand a failure to `start_ranks`, if that started this process; whether it did."""
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if _STARTED not in os.environ or not place:
        return False
    told = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
    with open(place, "w", encoding="utf-8") as file:
        json.dump(told, file)
    return True
