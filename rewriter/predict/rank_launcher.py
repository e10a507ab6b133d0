"""Starts real ranks, all of a world or one of an emulated one, and brings back the seconds that they measured."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.version import PACKAGE_PARENT
from rewriter.predict.rank_worker import Spec


@dataclass(frozen=True)
class Seconds:
    """Of one recipe's passes: medians over repetitions, each as long as its slowest rank takes. The silent ones are
    those whose collectives took no time, None where they were not asked for."""

    prefill: float
    decode: float
    silent_prefill: float | None = None
    silent_decode: float | None = None


def run(spec: Spec, ranks: Sequence[int], timeout: float) -> dict[str, Seconds]:
    """Start these ranks of `spec.world`, together, and return what each recipe's passes take.

    Raises RewriterError with the last output of a rank that failed, and after `timeout` seconds. No rank outlives this.
    """
    found = _results(spec, ranks, timeout)
    return {variant.recipe: _together([passes[variant.recipe] for passes in found]) for variant in spec.variants}


def calibrate(spec: Spec, timeout: float) -> tuple[str, float]:
    """The YAML of a fabric that all ranks of `spec.world` measure, and for which share of the time something
    else had their cores (see `calibration.calibrated`). Raises RewriterError as `run` does."""
    found = _results(spec, range(spec.world), timeout)[0]
    return found["fabric"], found["taken"]


def slowest(found: Sequence[Seconds]) -> Seconds:
    """Of ranks that ran in turn: a pass takes as long as the slowest."""
    largest: dict[str, float] = {}
    for seconds in found:
        for name, value in asdict(seconds).items():
            if value is not None:
                largest[name] = max(value, largest.get(name, value))
    return Seconds(**largest)


def _together(ranks: Sequence[Mapping[str, Sequence[float]]]) -> Seconds:
    """Of ranks that ran at once: in each repetition, the slowest."""
    return Seconds(
        **{
            name.replace(" ", "_"): median(map(max, zip(*(passes[name] for passes in ranks), strict=True)))
            for name in ranks[0]
        }
    )


def _results(spec: Spec, ranks: Sequence[int], timeout: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="rewriter-predict-") as name:
        scratch = Path(name)
        (scratch / "spec.json").write_text(replace(spec, store=str(scratch / "store")).to_json())
        return _started(scratch, ranks, timeout)


def _started(scratch: Path, ranks: Sequence[int], timeout: float) -> list[dict[str, Any]]:
    processes: list[subprocess.Popen[bytes]] = []
    logs = {rank: scratch / f"rank-{rank}.log" for rank in ranks}
    results = {rank: scratch / f"result-{rank}.json" for rank in ranks}
    deadline = time.monotonic() + timeout
    try:
        for rank in ranks:
            command = [sys.executable, "-m", "rewriter.predict.rank_worker", str(scratch / "spec.json"), str(rank)]
            with logs[rank].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*command, str(results[rank])], env=_environment(), stdin=subprocess.DEVNULL, stdout=log,
                        stderr=log,
                    )
                )  # fmt: skip
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        late = [process.poll() is None for process in processes]
        for process in processes:
            process.kill()
        status = [process.wait() for process in processes]
    failed = [rank for rank, code in zip(ranks, status, strict=True) if code > 0]
    if failed:
        code = status[ranks.index(failed[0])]
        raise RewriterError(f"rank {failed[0]} ended with status {code}: {_tail(logs[failed[0]])}")
    lacking = [rank for rank in ranks if not results[rank].is_file()]
    if lacking:
        what = f"gave no result in {timeout:g} s" if any(late) else "ended without a result"
        raise RewriterError(f"rank {lacking[0]} {what}: {_tail(logs[lacking[0]])}")
    return [json.loads(results[rank].read_text()) for rank in ranks]


def _tail(log: Path) -> str:
    """The error that a rank ended with, or its last words."""
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("rewriter.common.errors.RewriterError: ")]
    return errors[-1].partition(": ")[2] if errors else "\n".join(lines[-20:]) or "it said nothing"


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # A rank of its own world, whatever started this process.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "REWRITER_EMULATE"):
        environment.pop(name, None)
    package = str(PACKAGE_PARENT)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environment
