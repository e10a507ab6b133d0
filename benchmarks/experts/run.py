"""What the order of expert-parallel ranks moves between nodes, and what that costs in time: E+D against D+E.

    sudo python -m benchmarks.experts.run [--quick] [--json]

Eight ranks as four nodes of two, on one switch: each node is a network namespace whose port is limited, and neighbours
talk over the namespace's own loopback. A small Mixtral with 8 experts, sharded over 2 ranks and replicated on 4, trains
on few tokens, as its experts have far more gradients than tokens have activations. With E+D neighbours hold different
experts and every sum over replicas leaves the node on each hop; with D+E neighbours are replicas.

Bytes that nodes send to others per step: by their interfaces, with frames' headers, and by our count, exact for tokens
and that of a ring for sums, which gloo's all-reduce is. `--quick`: four ranks as two nodes.

Exit code: 0 if expert gradients between nodes fall by the node's size, interfaces agree with our count within 10 %, and
D+E is faster at the rate; 1 if not, 2 where it cannot be measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.link_ranks import launch
from benchmarks.support.namespaces import Bridge, LinkError
from rewriter.common.errors import RewriterError

LOCAL, EXPERT_RANKS = 2, 2
ORDERS = ("E+D", "D+E")
RATE = 20e6  # bytes per second of a node's port, in each direction
SECONDS = 300.0
AGREEMENT = 0.1
SIZES = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}


def phases(bridge: Bridge, spec: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """By rank what each found, phase by phase. The second phase begins at RATE."""

    def tick(scratch: Path) -> None:
        if (scratch / "ready").exists() and not (scratch / "go").exists():
            bridge.set_rate(RATE)
            (scratch / "go").touch()

    ranks = spec["nodes"] * LOCAL
    return launch(bridge, "benchmarks.experts.rank", spec, ranks, local=LOCAL, timeout=SECONDS, tick=tick)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four ranks as two nodes")
    parser.add_argument("--json", action="store_true", help="print figures as JSON, tables to stderr")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json)
    nodes = 2 if arguments.quick else 4
    spec = {
        "nodes": nodes,
        "local": LOCAL,
        "ep": EXPERT_RANKS,
        "orders": ORDERS,
        "sizes": SIZES,
        "tokens": 32,
        "repetitions": 5,
    }
    try:
        with Bridge(nodes) as bridge:
            found = phases(bridge, spec)
            if bridge.dropped():
                raise RewriterError(f"the limit dropped {bridge.dropped()} segments: nothing can be said")
    except (LinkError, RewriterError) as error:
        print(error, file=sys.stderr)
        return 2
    results: dict[str, dict[str, float]] = {}
    for order in ORDERS:
        free, limited = ([rank[phase][order] for rank in found] for phase in range(2))
        results[order] = {
            # a node's interface counts for all of its ranks
            **{key: sum(rank[key] for rank in free[::LOCAL]) for key in ("tokens sent", "gradients sent")},
            **{key: sum(rank[key] for rank in free) for key in ("experts", "others", "tokens")},
            "seconds, no limit": max(rank["seconds"] for rank in free),
            "seconds": max(rank["seconds"] for rank in limited),
        }
    title = f"MB between {nodes} nodes of {LOCAL} per step, and seconds of a step, at {RATE / 1e6:.0f} MB/s"
    table = Table("", *ORDERS, "E+D ÷ D+E", title=title)
    for key in results["E+D"]:
        scale = 1.0 if key.startswith("seconds") else 1e-6
        e_d, d_e = (results[order][key] * scale for order in ORDERS)
        table.add_row(key, f"{e_d:.2f}", f"{d_e:.2f}", f"{e_d / d_e:.2f}" if d_e else "")
    console.print(table)
    missed = misses(results, nodes)
    if arguments.json:
        print(json.dumps(results))
    for line in missed:
        console.print(f"missed: {line}")
    return 1 if missed else 0


def misses(results: dict[str, dict[str, float]], nodes: int) -> list[str]:
    e_d, d_e = (results[order] for order in ORDERS)
    replicas = nodes * LOCAL // EXPERT_RANKS
    missed = []
    expected = 0.0 if replicas <= LOCAL else e_d["experts"] / LOCAL  # replicas that fit a node send nothing
    if abs(d_e["experts"] - expected) > 1e-6 * e_d["experts"]:
        missed.append(f"expert gradients: {d_e['experts'] / 1e6:.2f} MB, expected {expected / 1e6:.2f}")
    if d_e["tokens"] <= e_d["tokens"]:
        missed.append("tokens do not travel more with D+E")
    for order, found in results.items():
        counted, sent = found["experts"] + found["others"], found["gradients sent"]
        if abs(sent / counted - 1) > AGREEMENT:
            missed.append(f"{order}: interfaces sent {sent / 1e6:.2f} MB of gradients, counted {counted / 1e6:.2f}")
    if d_e["seconds"] >= e_d["seconds"]:
        missed.append(f"D+E takes {d_e['seconds']:.2f} s, E+D {e_d['seconds']:.2f} s")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
