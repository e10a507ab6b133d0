"""Real ranks at the ends of a link: `launch` starts them, and a rank's script calls `main`.

results = launch(link, "benchmarks.overlap.rank", spec, 2, timeout=300)  # what each rank returned
main(measure)                                                          # there: measure(spec, rank)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.namespaces import INTERFACE, Network
from rewriter.common.processes import environment, rank_main, run_ranks

ROOT = Path(__file__).resolve().parents[2]


def variables(network: Network | None, **own: str) -> dict[str, str]:
    """The environment of a rank with one thread that speaks over the link, or over loopback where there is none."""
    interface = {} if network is None else {"GLOO_SOCKET_IFNAME": INTERFACE}
    path = os.pathsep.join([str(ROOT), environment()["PYTHONPATH"]])
    return environment(**{"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **interface, **own})


def launch(
    network: Network | None,
    module: str,
    spec: Mapping[str, Any],
    ranks: int,
    *,
    timeout: float,
    local: int = 1,
    tick: Callable[[Path], None] = lambda scratch: None,
    **own: str,
) -> list[Any]:
    """The result of each rank; `local` neighbours share an end. `own` are further variables. Raises RewriterError with
    the reason of the rank that failed first."""

    def before(rank: int) -> list[str]:
        return [] if network is None else network.inside(rank // local)

    return run_ranks(
        [sys.executable, "-m", module], {"interface": INTERFACE, **spec, "ranks": ranks}, range(ranks),
        timeout=timeout, variables=lambda rank: variables(network, **own), before=before, tick=tick,
    )  # fmt: skip


def main(measure: Callable[[dict[str, Any], int], Any]) -> None:
    """Join the other ranks over gloo, on the core that the spec names, if any; `measure(spec, rank)` is the result.

    With `emulation`, values of an `EmulationConfig`, each rank is the only real one, and its peers are emulated, unless
    these name the real ones.
    """

    def work(spec: dict[str, Any], rank: int) -> Any:
        if "cores" in spec:
            os.sched_setaffinity(0, {spec["cores"][rank]})  # before any thread exists: gloo's own threads inherit it
        torch.set_num_threads(1)
        if "emulation" in spec:
            from rewriter.emulation import EmulationConfig

            values = {"real": (rank,), **spec["emulation"]}
            options: Any = EmulationConfig(world_size=spec["ranks"], **values)
            together = len(values["real"]) > 1
            backend = "emulated"
            store = dist.FileStore(spec["store"], spec["ranks"]) if together else dist.HashStore()
        else:
            options, backend, store = None, "gloo", dist.FileStore(spec["store"], spec["ranks"])
        dist.init_process_group(backend, rank=rank, world_size=spec["ranks"], store=store, pg_options=options)
        found = measure(spec, rank)
        dist.barrier()
        dist.destroy_process_group()
        return found

    rank_main(work)


def passed_bytes(interface: str = INTERFACE, direction: str = "tx") -> int:
    """Bytes that have left ("tx") or reached ("rx") this network namespace, headers of frames and segments included."""
    return int(Path(f"/sys/class/net/{interface}/statistics/{direction}_bytes").read_text())
