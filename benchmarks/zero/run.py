"""What ZeRO++ and weights that stay in the node save over slow links between nodes, and what they cost in loss.

    sudo python -m benchmarks.zero.run [--part volume] [--part steps] [--part loss] [--quick] [--json]

Four ranks as two nodes of two: each node is a network namespace, a rate-limited veth pair joins them, and neighbours
talk over the namespace's own loopback. Ranks of a node share a core.

    volume   bytes between nodes per step, as what a node receives from the other ÷ (1 − 1/nodes), in M (the bytes of
             the 16-bit parameters), counted by the interface and by our own events
    steps    the time of a step at two rates, against the time without a limit plus those bytes ÷ rate (the paper's
             figure 10)
    loss     on text that was not seen, with weights at 16, 8, 6, 4 and 2 bits, scales by block and by tensor, and with
             weights that stay in the node (figure 9, tables 2 and 3 in small); needs no namespaces

Exit code: 0 if the quantized steps are faster than the plain one by what bytes predict within 25 %, and within the
volumes that the paper promises; 1 if not, 2 where it cannot be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.link_ranks import launch
from benchmarks.support.namespaces import Link, LinkError
from rewriter.common.errors import RewriterError

RANKS, NODES, LOCAL = 4, 2, 2
TOLERANCE = 0.25
SECONDS = 900.0  # of one launch
SLOWER = (8.0, 2.0)  # rates: a plain step's bytes take so many times as long as the step without a limit

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4}
SYSTEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, hierarchical": {"gather": "hierarchical", "reduce": "hierarchical"},
    "qwZ int8": {"weights": "int8"},
    "hpZ": {"secondary": LOCAL},
    "qgZ int8/int4": {"gradients": "int8/int4"},
    "all three": {"weights": "int8", "gradients": "int8/int4", "secondary": LOCAL},
    "node-local int4": {"node local": {"weights": "int4", "gradients": "int4-hadamard"}},
}
PLAIN = {  # what FSDP2's own collectives could be; gloo's gathers go round a ring
    "plain, direct gathers": {"gather": "direct"},
    "plain, hierarchical gathers": {"gather": "hierarchical"},
}
PROMISED = {"all three": 0.77, "node-local int4": 0.55}  # M between nodes

TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
WHOLE = 4096  # a block that holds any rank's part of any of that model's tensors: one scale for each
LOSSES: dict[str, dict[str, Any]] = {
    "16 bits": {},
    **{name: {"weights": name} for name in ("int8", "int6", "int4", "int4-hadamard@32", "int2", "int2-hadamard@32")},
    **{f"{name}, by tensor": {"weights": f"{name}@{WHOLE}"} for name in ("int8", "int6", "int4", "int2")},
    "all three 8, 8/4": {"weights": "int8", "gradients": "int8/int4-hadamard", "secondary": LOCAL},
    "all three 6, 8/4": {"weights": "int6", "gradients": "int8/int4-hadamard", "secondary": LOCAL},
    "node-local 4, 4": {"node local": {"weights": "int4", "gradients": "int4-hadamard"}},
    "node-local 2, 2": {"node local": {"weights": "int2", "gradients": "int2-hadamard"}},
}


def start(
    spec: dict[str, Any], link: Link | None = None, prepare: Callable[[int, list[dict[str, Any]]], None] | None = None
) -> list[Any]:
    """Start all ranks with `spec`, at the ends of the link, if there is one; returns what each found. `prepare` is
    called before every phase with its number and what rank 0 has found so far."""
    cores = sorted(os.sched_getaffinity(0))
    by_rank = [(cores[0], cores[-1])[rank // LOCAL] for rank in range(RANKS)]
    phase = 0

    def tick(scratch: Path) -> None:
        nonlocal phase
        ready = scratch / f"ready-{phase}"
        if prepare is not None and ready.is_file():
            prepare(phase, json.loads(ready.read_text()))
            (scratch / f"go-{phase}").touch()
            phase += 1

    spec = {"cores": by_rank, "lr": 3e-3, **spec}
    return launch(link, "benchmarks.zero.rank", spec, RANKS, local=LOCAL, timeout=SECONDS, tick=tick)


Figures = dict[str, dict[str, float]]


def steps(link: Link, systems: dict[str, dict[str, Any]], quick: bool, slower: Sequence[float]) -> list[Figures]:
    """One phase without a limit, one for each of `slower`: at the rate at which a plain step's bytes take so many times
    as long as it takes without a limit; and one without again, as the first phase of a process is slower than others.

    By system, those without a limit as one: seconds of the fastest step (the machine has disturbed others), median
    bytes that a node received by its interface, bytes by our count, M, and the rate in bytes per second (0: none).
    """
    rates: list[float] = []
    dropped: list[int] = []

    def prepare(phase: int, found: list[dict[str, Any]]) -> None:
        if rates:
            dropped.append(link.dropped())
        if phase > len(slower):
            link.set_rate(None)
        elif phase > 0:
            plain = found[0]["plain"]
            needed = statistics.median(plain["arrived"]) / min(plain["seconds"])
            rates.append(needed / slower[phase - 1])
            link.set_rate(rates[-1])

    spec = {
        "mode": "steps",
        "phases": 2 + len(slower) if slower else 1,
        "systems": systems,
        "sizes": {**SIZES, "num_hidden_layers": 1 if quick else 3},
        "tokens": 32,
        "repetitions": 2 if quick else 4,
    }
    found = start(spec, link, prepare)
    if any(dropped):
        raise RewriterError(f"the link's limit dropped {dropped} segments: nothing can be said")
    return [
        {
            name: {
                "seconds": min(
                    min(map(max, *(rank[again][name]["seconds"] for rank in found)))
                    for again in ((0, -1) if phase == 0 else (phase,))
                ),
                "arrived": statistics.median(found[0][phase][name]["arrived"]),
                "counted": sum(rank[phase][name]["counted"][0] for rank in found[:LOCAL]),
                "m": found[0][phase][name]["m"][0],
                "rate": rate,
            }
            for name in systems
        }
        for phase, rate in enumerate([0.0, *rates])
    ]


def volume(console: Console, link: Link, quick: bool) -> dict[str, Any]:
    (found,) = steps(link, {**SYSTEMS, **PLAIN}, quick, [])
    table = Table("system", "interface", "our count", "promised", title="bytes between nodes per step, in M")
    missed = []
    for name, result in found.items():
        by_interface, by_count = (result[which] / (1 - 1 / NODES) / result["m"] for which in ("arrived", "counted"))
        limit = PROMISED.get(name)
        if limit is not None and by_count > limit:
            missed.append(f"{name}: {by_count:.3f} M, promised {limit}")
        counted = f"{by_count:.3f}" if by_count else ""
        table.add_row(name, f"{by_interface:.3f}", counted, "" if limit is None else f"{limit:.2f}")
    console.print(table)
    return {"volume": found, "missed": missed}


def times(console: Console, link: Link, quick: bool) -> dict[str, Any]:
    """A step takes what it takes without a limit, and what its bytes take at the rate."""
    free, *limited = steps(link, SYSTEMS, quick, SLOWER)
    missed = []
    for found in limited:
        rate = found["plain"]["rate"]
        title = f"{rate / 1e6:.1f} MB/s in each direction: seconds of a step, and × as fast as plain"
        table = Table("system", "no limit", "predicted", "measured", "× predicted", "× measured", title=title)
        predicted = {name: free[name]["seconds"] + found[name]["arrived"] / rate for name in SYSTEMS}
        for name in SYSTEMS:
            expected = predicted["plain"] / predicted[name]
            measured = found["plain"]["seconds"] / found[name]["seconds"]
            if abs(measured / expected - 1) > TOLERANCE:
                missed.append(f"{name} at {rate / 1e6:.1f} MB/s: × {measured:.2f}, predicted × {expected:.2f}")
            figures = (free[name]["seconds"], predicted[name], found[name]["seconds"], expected, measured)
            table.add_row(name, *(f"{figure:.2f}" for figure in figures))
        console.print(table)
    return {"steps": [free, *limited], "missed": missed}


def loss(console: Console, quick: bool) -> dict[str, Any]:
    total = 40 if quick else 300
    spec = {"mode": "losses", "interface": "lo", "systems": LOSSES, "sizes": TINY, "steps": total, "every": total // 4}
    found = start(spec)[0]
    table = Table("weights", *(f"step {total // 4 * k}" for k in range(1, 5)), "to 16 bits", title="loss, unseen text")
    last = found["16 bits"][-1]
    for name, losses in found.items():
        table.add_row(name, *(f"{x:.4f}" for x in losses), f"{100 * (losses[-1] / last - 1):+.2f} %")
    console.print(table)
    return {"loss": found, "missed": []}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", action="append", choices=("volume", "steps", "loss"), help="default: all")
    parser.add_argument("--quick", action="store_true", help="a small model, to see whether it runs")
    parser.add_argument("--json", action="store_true", help="print figures as JSON, tables to stderr")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json)
    parts = arguments.part or ["volume", "steps", "loss"]
    results: dict[str, Any] = {}
    try:
        if {"volume", "steps"} & set(parts):
            with Link() as link:
                if "volume" in parts:
                    results["volume"] = volume(console, link, arguments.quick)
                if "steps" in parts:
                    results["steps"] = times(console, link, arguments.quick)
        if "loss" in parts:
            results["loss"] = loss(console, arguments.quick)
    except (LinkError, RewriterError) as error:
        print(error, file=sys.stderr)
        return 2
    missed = [line for part in results.values() for line in part["missed"]]
    if arguments.json:
        print(json.dumps(results))
    for line in missed:
        console.print(f"missed: {line}")
    return 1 if missed and not arguments.quick else 0


if __name__ == "__main__":
    raise SystemExit(main())
