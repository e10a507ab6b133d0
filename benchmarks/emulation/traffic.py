"""Does a real rank with emulated peers send what it sends to real ones? Bytes of every collective, gloo and emulated.

    sudo python -m benchmarks.emulation.traffic [--ranks N]

N gloo ranks in network namespaces on one switch, each interface counting what it sends (jumbo frames, so that headers
are few); then each of them alone, in wire mode, its environment process in another namespace. Reported per collective
and rank: bytes sent, in units of the tensor. Exit code: 0 where all agree within 1.5 % of the tensor; 1 otherwise; 2
where it cannot be measured. No times: a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.link_ranks import passed_bytes
from benchmarks.support.namespaces import INTERFACE, Bridge, LinkError
from rewriter.common.errors import RewriterError
from rewriter.common.processes import Processes, environment

NUMEL = 3 * 5 * (1 << 16)  # float32; shards of 2 to 6 ranks are whole
CALLS = 4
TOLERANCE = 0.015
PORT = 29600


def rank_main(store: str, result: str) -> None:
    """One rank, real or emulated around: an unmodified program."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = {}
    for name, call in calls(dist, torch.ones(NUMEL), rank, ranks).items():
        call()
        dist.barrier()
        before = passed_bytes()
        for _ in range(CALLS):
            call()
        dist.barrier()
        found[name] = (passed_bytes() - before) / CALLS / NUMEL / 4
    Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def calls(dist: Any, whole: Any, rank: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """Every collective of the tensor `whole`, and a message round the ring."""
    shard = whole[: NUMEL // ranks].clone()
    parts = [shard.clone() for _ in range(ranks)]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    other = whole.clone()

    def message() -> None:
        sent = dist.isend(whole, (rank + 1) % ranks)
        dist.recv(other, (rank - 1) % ranks)
        sent.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: scatter(shard, whole),
        "all_gather": lambda: gather(whole, shard),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "gather": lambda: dist.gather(shard, parts if rank == 0 else None, dst=0),
        "scatter": lambda: dist.scatter(shard, parts if rank == 0 else None, src=0),
        "send and receive": message,
    }


def measure(bridge: Bridge, ranks: int, directory: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """By rank, real and emulated."""
    script = [str(Path(__file__).resolve()), "--rank-of"]
    launcher = [sys.executable, "-m", "rewriter.emulation"]

    def result(what: str, rank: int) -> str:
        return str(directory / f"{what}-{rank}.json")

    def script_of(what: str, rank: int) -> list[str]:
        return [*script, str(directory / f"store-{what}-{rank * (what != 'real')}"), result(what, rank)]

    own = [{"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
    run([[*bridge.inside(rank), sys.executable, *script_of("real", rank)] for rank in range(ranks)], own)
    for rank in range(ranks):
        peer = (rank + 1) % ranks
        address = f"10.0.0.{peer + 1}:{PORT}"
        options = ["--world-size", str(ranks), "--real", str(rank), "--mode", "wire", "--fabric", "unpaced"]
        run(
            [
                [*bridge.inside(rank), *launcher, *options, "--environment", address, *script_of("emulated", rank)],
                [*bridge.inside(peer), *launcher, "--serve", address, "--fabric", "unpaced"],
            ],
            [{}],
        )
    real, emulated = (
        [json.loads(Path(result(what, rank)).read_text()) for rank in range(ranks)] for what in ("real", "emulated")
    )
    return real, emulated


def run(commands: Sequence[Sequence[str]], own: Sequence[dict[str, str]]) -> None:
    """Run all until those that have variables of their own, the first, have ended. Raises RewriterError where one of
    these failed."""
    with Processes() as job:
        for rank, command in enumerate(commands):
            given = own[rank] if rank < len(own) else {}
            job.start(f"rank {rank}", command, environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=INTERFACE, **given))
        failure = job.wait(300, but=[f"rank {rank}" for rank in range(len(own), len(commands))])
    if failure is not None:
        raise RewriterError(f"{failure.name}: {failure.details}")


def main() -> int:
    if sys.argv[1:2] == ["--rank-of"]:
        rank_main(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description="Bytes of emulated collectives against real ones.")
    parser.add_argument("--ranks", type=int, default=3, choices=(2, 3, 4, 5, 6), help="real gloo ranks (default 3)")
    options = parser.parse_args()
    console = Console(highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="emulation-") as name, Bridge(options.ranks) as bridge:
            real, emulated = measure(bridge, options.ranks, Path(name))
    except (LinkError, RewriterError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    shown = Table(title="sent by each rank, in units of the tensor: real / emulated")
    shown.add_column("collective")
    for rank in range(options.ranks):
        shown.add_column(f"rank {rank}", justify="right")
    off = 0.0
    for what in real[0]:
        pairs = [(r[what], e[what]) for r, e in zip(real, emulated, strict=True)]
        shown.add_row(what, *(f"{r:.3f} / {e:.3f}" for r, e in pairs))
        off = max(off, *(abs(r - e) for r, e in pairs))
    console.print(shown)
    console.print(f"largest difference {off:.2%} of the tensor", style="" if off <= TOLERANCE else "red")
    return 0 if off <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
