"""Starts the ranks of one machine with torchrun, and brings back their result or the reason for there being none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.version import PACKAGE_PARENT

# How long torchrun gets to stop its ranks before it is killed (the ranks then notice and end by themselves).
GRACE_SECONDS = 15.0


def launch(
    directory: str | os.PathLike[str],
    nproc: int,
    request: Mapping[str, Any],
    *,
    command: str = "generate",
    options: Sequence[str] = (),
    timeout: float | None = None,
) -> dict[str, Any]:
    """Run `rewriter.runtime.generate_worker command` on `nproc` ranks of this machine and return rank 0's JSON result.

    `request` goes to the ranks as JSON (for generate: prompts as lists of token ids, and arguments of
    `rewriter.runtime.generate`); `options` are further arguments, such as `--compile`. Raises RewriterError with the
    message of the rank that failed first, or its traceback, and after `timeout` seconds. No rank outlives this call.
    """
    with tempfile.TemporaryDirectory(prefix="rewriter-") as scratch:
        sent, result = Path(scratch, "request.json"), Path(scratch, "result.json")
        sent.write_text(json.dumps(dict(request)), encoding="utf-8")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={nproc}"]
        torchrun += [
            "--master-addr=127.0.0.1",
            f"--master-port={_free_port()}",
            "-m",
            "rewriter.runtime.generate_worker",
        ]
        arguments = [command, f"--dir={Path(directory).resolve()}", f"--request={sent}", f"--result={result}", *options]
        with Path(scratch, "log").open("w+b") as log:
            process = subprocess.Popen(
                [*torchrun, *arguments], env=_environment(nproc), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
            try:
                status: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _stop(process)
            log.seek(0)
            output = log.read().decode("utf-8", "replace")
        if status is None:
            raise RewriterError(f"{directory}: {nproc} ranks gave no result in {timeout} s, and were stopped")
        if status != 0 or not result.is_file():
            raise RewriterError(_reason(directory, Path(scratch), status, output))
        answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return answer


def _environment(nproc: int) -> dict[str, str]:
    environment = dict(os.environ)
    # A launch from within a rank must not inherit that rank's place in the world.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    package = str(PACKAGE_PARENT)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        # Ranks of one machine need no name that resolves to it.
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _reason(directory: str | os.PathLike[str], scratch: Path, status: int | None, output: str) -> str:
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in scratch.glob("result.json.error-*[0-9]")]
    if not errors:
        tail = "\n".join(output.splitlines()[-30:])
        return f"{directory}: the ranks ended with status {status} and no result. Their last output:\n{tail}"
    first = min(errors, key=lambda error: error["time"])
    if first["message"] is not None:
        return str(first["message"])
    return f"{directory}: rank {first['rank']} failed:\n{first['traceback']}"
