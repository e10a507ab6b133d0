"""Bytes and time of quantized collectives beside exact ones, over a link between two nodes of two ranks each.

    sudo python -m benchmarks.collectives.run [--quick] [--json]
    python -m benchmarks.collectives.run --cuda         # NCCL, all GPUs of this machine as two nodes: no limit on links

Each node is a network namespace with two ranks, which talk to each other without a limit; a veth pair with a limit in
both directions joins the nodes. Exact collectives are gloo's own, of bf16; quantized ones are in two hops.
The predicted ratio is that of the bytes which pass the link, those of exact collectives as its interface
counted them, those of quantized ones as the collectives do; the measured ratio is that of the times. "hidden" is the
part of an all-reduce's time that passes while as much computation stands between its start and its wait.

Exit code: 0 where, at the slower rate, every measured ratio is at least GOAL of the predicted one; 1 below it, or where
an interface and a collective disagree about the bytes; 2 where it cannot be measured.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.collectives.rank import AXES, EXACT, measure
from benchmarks.support.link_ranks import launch
from benchmarks.support.namespaces import QUEUE, Link, LinkError
from rewriter.common.errors import RewriterError

GOAL = 0.75
HEADERS = 0.08  # of the bytes counted: TCP, IP and Ethernet headers, acknowledgements, barriers
RATES = (1e6, 8e6)  # bytes per second: at the first the link dominates
RANKS = 4
FORMATS = ["int8", "int4-hadamard", "int8/int4-hadamard"]
LARGEST_ERROR = {"int8": 0.02, "int4-hadamard": 0.25, "int8/int4-hadamard": 0.25}
LAUNCH_SECONDS = 300.0
BURST = 16 << 10  # bytes that the link may pass at once after a pause: little beside the shortest message


class SlowLink(Link):
    """Slow enough that cutting up large segments costs nothing."""

    def _bucket(self, rate: float) -> tuple[int, int]:
        return BURST, QUEUE


@dataclass(frozen=True)
class Row:
    """A collective in a format at a rate. Bytes are what a node sends to the other in one call; `exposed` is the part
    of the time that remains where as much computation stands between start and wait."""

    collective: str
    format: str
    rate: float | None
    seconds: float
    counted: int
    interface: int
    error: float
    exposed: float | None


def rows(results: list[dict[str, Any]], rate: float | None) -> list[Row]:
    """Of what all ranks measured. A call lasts from its first rank's begin to its last one's end."""
    found = []
    for case in results[0]:
        collective, format = case.split(" ", 1)
        ranks = [result[case] for result in results]
        steps = zip(*(r["times"] for r in ranks), strict=True)
        times = [max(end for _, end in step) - min(begin for begin, _ in step) for step in steps]
        counted = sum(r["sent"] for r in ranks[: len(ranks) // 2])
        interface = round(statistics.median(ranks[0]["link"]))
        error = max(r["error"] for r in ranks)
        if format != EXACT and not error <= LARGEST_ERROR[format]:
            raise RewriterError(f"collectives: {case} is off by {error:.3f}, limit {LARGEST_ERROR[format]}")
        exposed = max(statistics.median(r["exposed"]) for r in ranks) if "exposed" in ranks[0] else None
        found.append(Row(collective, format, rate, statistics.median(times), counted, interface, error, exposed))
    return found


def on_link(link: Link, rate: float, elements: int, repetitions: int) -> list[Row]:
    """Start four ranks at the two ends of the link and let them measure."""
    link.set_rate(rate)
    spec = {"elements": elements, "formats": FORMATS, "repetitions": repetitions}
    return rows(launch(link, "benchmarks.collectives.rank", spec, RANKS, local=2, timeout=LAUNCH_SECONDS), rate)


def on_gpus(elements: int, repetitions: int) -> list[Row]:
    """The same over NCCL, the GPUs of this machine as two nodes."""
    gpus = torch.cuda.device_count() // 2 * 2
    if gpus < 2:
        raise LinkError(
            f"--cuda needs two GPUs, here is {torch.cuda.device_count()}: a collective of one rank is a copy"
        )
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(_gpu, (gpus, directory, elements, repetitions), gpus)
        return rows([json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(gpus)], None)


def _gpu(rank: int, ranks: int, directory: str, elements: int, repetitions: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, store=dist.FileStore(f"{directory}/store", ranks))
    mesh = init_device_mesh("cuda", (2, ranks // 2), mesh_dim_names=AXES)
    result = measure(mesh, elements, FORMATS, repetitions, lambda: 0)
    Path(directory, f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def ratios(found: list[Row], row: Row) -> tuple[float, float]:
    """(predicted from bytes, measured) of the exact collective to this one."""
    (exact,) = (r for r in found if (r.collective, r.format, r.rate) == (row.collective, EXACT, row.rate))
    return exact.interface / row.counted, exact.seconds / row.seconds


def show(console: Console, found: list[Row]) -> None:
    table = Table("collective", "format", "MB/s", "MB", "error", "seconds", "predicted", "measured", "hidden")
    for row in found:
        exact = row.format == EXACT
        predicted, measured = (1.0, 1.0) if exact else ratios(found, row)
        table.add_row(
            row.collective,
            row.format,
            "any" if row.rate is None else f"{row.rate / 1e6:.0f}",
            f"{(row.interface if exact else row.counted) / 1e6:.2f}",
            f"{row.error:.4f}",
            f"{row.seconds:.3f}",
            f"{predicted:.2f} ×",
            f"{measured:.2f} ×",
            "" if row.exposed is None else f"{1 - row.exposed:.0%}",
            end_section=row.format == FORMATS[-1],
        )
    console.print(table)


def missed(found: list[Row], rate: float) -> list[str]:
    """What is not as it should be."""
    wrong = []
    for row in found:
        if row.format == EXACT:
            continue
        if not row.counted <= row.interface <= row.counted * (1 + HEADERS):
            wrong.append(
                f"{row.collective} {row.format}: {row.counted} bytes counted, {row.interface} at the interface"
            )
        predicted, measured = ratios(found, row)
        if row.rate == rate and measured < GOAL * predicted:
            wrong.append(f"{row.collective} {row.format}: × {measured:.2f} of × {predicted:.2f} predicted")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small tensors, once: does it run?")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--cuda", action="store_true", help="NCCL on the GPUs of this machine")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json, width=120)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces are deleted on the way out
    elements, repetitions = (1 << 16, 1) if arguments.quick else (1 << 20, 2)
    try:
        if arguments.cuda:
            found = on_gpus(elements * 64, repetitions * 5)
        else:
            with SlowLink() as link:
                found = [row for rate in RATES for row in on_link(link, rate, elements, repetitions)]
    except (LinkError, RewriterError) as error:
        console.print(f"[red]{error}[/red]")
        return 2
    show(console, found)
    if arguments.json:
        print(json.dumps([asdict(row) for row in found]))
    wrong = [] if arguments.quick or arguments.cuda else missed(found, RATES[0])
    for line in wrong:
        console.print(f"[red]{line}[/red]")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
