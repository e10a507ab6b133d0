"""Logits of what was emitted, computed where its users compute them: in processes of their own.

`load_huggingface.py` loads the adapted checkpoint where `rewriter` cannot be
imported, `rewriter.runtime.logits_worker` runs the module on real ranks. Requests are JSON, results safetensors.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rewriter.common.errors import VerificationError

HERE = Path(__file__).resolve().parent
TIMEOUT = 900.0


def emitted_logits(
    directory: Path, ranks: int | None, batches: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Both at once, since most of the time goes to imports: (huggingface_logits, rank_logits or nothing)."""
    with ThreadPoolExecutor(2) as pool:
        single = pool.submit(huggingface_logits, directory, batches)
        parallel = None if ranks is None else pool.submit(rank_logits, directory, ranks, batches)
        return single.result(), [] if parallel is None else parallel.result()


def huggingface_logits(directory: Path, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Logits [B, S, vocabulary] (fp32) of the adapted checkpoint in `directory` for each batch of ids [B, S].

    Loaded by AutoModelForCausalLM with trust_remote_code, in fp32, without `rewriter`. Raises VerificationError when it
    does not load, or when names are missing or surplus.
    """
    command = [sys.executable, "-P", str(HERE / "load_huggingface.py")]
    return _run(command, directory, batches, "the adapted checkpoint", {})


def rank_logits(directory: Path, ranks: int, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Logits [B, S, vocabulary] (fp32) of the sharded module in `directory` on `ranks` gloo processes.

    Raises VerificationError when they fail, or when ranks end with different logits.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={_free_port()}"]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    }
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # ranks of one machine need no name that resolves to it
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    return _run(
        [*torchrun, "-m", "rewriter.runtime.logits_worker"],
        directory,
        batches,
        f"the module on {ranks} ranks",
        environment,
    )


def _run(
    command: Sequence[str], directory: Path, batches: Sequence[torch.Tensor], what: str, environment: dict[str, str]
) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="rewriter-verify-") as scratch:
        request, result = Path(scratch, "request.json"), Path(scratch, "logits.safetensors")
        request.write_text(
            json.dumps({"directory": str(directory.resolve()), "batches": [b.tolist() for b in batches]})
        )
        inherited = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
        }
        # Generated files are imported from a cache of their own, so that nothing of a failed run stays behind.
        own = {"HF_MODULES_CACHE": str(Path(scratch, "modules")), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        log = Path(scratch, "log")
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, str(request), str(result)],
                env={**inherited, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
            try:
                status: int | None = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _stop(process)
        if status != 0 or not result.is_file():
            ended = f"gave no result in {TIMEOUT:.0f} s" if status is None else f"failed (status {status})"
            raise VerificationError(f"{what} {ended}: {_reason(log.read_text(errors='replace'))}")
        found = load_file(result)
        return [found[str(index)] for index in range(len(batches))]


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # torchrun passes it on to its ranks
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _reason(output: str) -> str:
    """The line that says why: of a traceback the first exception that was raised in a rank, not torchrun's own."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    plain = [line.split("]: ", 1)[-1] if line.startswith("[rank") else line for line in lines]
    errors = [line for line in plain if re.match(r"[\w.]*(Error|Exception): ", line)]
    if os.environ.get("REWRITER_DEBUG", "0") not in ("", "0"):
        sys.stderr.write(output)
    return (errors or plain or ["it printed nothing"])[0 if errors else -1][:600]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
