"""How far good engines differ on the same hardware and model: what intervals of predictions must hold.

    git clone --bare https://github.com/ai-dynamo/aiconfigurator FROM
    python -m benchmarks.predict.engines FROM

From the figures that NVIDIA's AIConfigurator publishes; needs pyarrow, which the project itself does not. Two
quantities, which `rewriter/predict/uncertainty.py` keeps:

- **kernels**: a decode step (products, attention over the cache, all-reduces) added up from the kernels that each
  library was measured with, at the same sizes, over systems, models, ranks and batches.
- **servers**: mean times per output token of servers that were run end to end, at the same workload: model, system,
  precision, ranks, lengths and number of clients. Left out are models and weights that are not simulated (latent or
  linear attention, 4 bits; the backtest rejects them, too), rows that are points of the backtest, and every row of a
  model and system of which a point counts.

Where one engine's logarithm deviates from the typical one's by s, those of two differ by s · √2. So s is the root mean
square of the differences over √2; a mean over libraries or models that is not 0 counts as what it is, a difference.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import math
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.predict.backtest_points import Point, read_published
from benchmarks.predict.kernel_tables import COMMIT, SYSTEMS, attention, glue, products
from rewriter.fabric import Call, load_fabric
from rewriter.fabric.kernel_tables import KernelTable

SERVERS = "aic-core/src/aiconfigurator_core/systems/silicon_sample.csv"
LIBRARIES = {"trtllm": "1.3.0rc20", "sglang": "0.5.14"}
OF_A100 = {"trtllm": "1.0.0", "sglang": "0.5.10"}
FABRICS = {"a100_sxm": "a100-nvlink", "h100_sxm": "h100-nvlink", "h200_sxm": "h200-nvlink", "b200_sxm": "b200-nvlink"}
BATCHES, RANKS, KEYS = (1, 4, 16, 64), (1, 2, 4, 8), 1536
PRECISIONS = ("", "fp8")  # none is bfloat16; 4 bits are not simulated
MODELS = ("meta-llama/", "Qwen/Qwen3-")  # whose attention is simulated
WORKLOAD = (
    "model_path", "system", "precision", "isl", "osl", "batch_size", "tp_size", "pp_size", "attention_dp_size",
    "moe_tp_size", "moe_ep_size",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense model with heads of 128."""

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 128256


SHAPES = {
    "8B": Shape(4096, 14336, 32, 32, 8),
    "14B": Shape(5120, 17408, 40, 40, 8),
    "32B": Shape(5120, 25600, 64, 64, 8),
    "70B": Shape(8192, 28672, 80, 64, 8),
    "405B": Shape(16384, 53248, 126, 128, 8),
}


def library_table(source: Path, name: str, library: str, version: str) -> KernelTable:
    """A library's products and decode attention on a system, measured as the shipped table of vLLM's was."""
    system = SYSTEMS[name]
    found = products(source, name, version, library)
    if library == "trtllm":  # its products took as many turns as fill the L2 cache, five at most
        cells = found["bfloat16"]
        for i, (columns, depth, _) in enumerate(itertools.product(cells["columns"], cells["depth"], cells["rows"])):
            turns = max(1, min(5, -(-system.l2 // (columns * depth * 2))))
            if cells["us"][i] is not None:
                cells["us"][i] -= system.replay * 1e6 * (1 / turns - 1 / 6)
    return KernelTable(
        {
            "system": name, "device": system.device, "library": library, "version": version,
            "flops": {"bfloat16": system.bfloat16}, "bandwidth": system.bandwidth, "l2_bytes": system.l2,
            "replay_us": system.replay * 1e6, "products": {"bfloat16": found["bfloat16"]}, "prefill_attention": {},
            "decode_attention": attention(source, name, version, "generation", library), "experts": {},
            "glue": glue(source, name, system.version),
        }
    )  # fmt: skip


def step(table: KernelTable, sums: Any, shape: Shape, ranks: int, batch: int) -> float:
    """Seconds of a decode step's products, attention and all-reduces, the head's product among them."""
    heads, kv = shape.heads // ranks, max(1, shape.kv_heads // ranks)
    sizes = [
        ((heads + 2 * kv) * 128, shape.width), (shape.width, heads * 128),
        (2 * shape.hidden // ranks, shape.width), (shape.width, shape.hidden // ranks),
    ]  # fmt: skip

    def known(seconds: float | None) -> float:
        assert seconds is not None
        return seconds

    layer = sum(known(table.product(batch, columns, depth, "bfloat16")) for columns, depth in sizes)
    layer += known(table.attention(1, KEYS, 128, heads // kv, batch * kv, "bfloat16"))
    if ranks > 1:
        call = Call("all_reduce", batch * shape.width * 2, tuple(range(ranks)), "bfloat16", True)
        layer += 2 * sums.delay(call).seconds
    return shape.layers * layer + known(table.product(batch, shape.vocabulary // ranks, shape.width, "bfloat16"))


def step_pairs(source: Path) -> Iterator[tuple[str, float]]:
    """(which, log of the ratio of two libraries' steps)."""
    for name, fabric_name in FABRICS.items():
        fabric, system = load_fabric(fabric_name), SYSTEMS[name]
        others = OF_A100 if name == "a100_sxm" else LIBRARIES
        made: dict[str, dict[tuple[Any, ...], float]] = {}
        for library, version in {"vllm": system.version, **others}.items():
            table = library_table(source, name, library, version)
            sums = fabric.delay_model(library if library in fabric.libraries else None, graphed=True)
            made[library] = {
                (model, ranks, batch): step(table, sums, shape, ranks, batch)
                for model, shape in SHAPES.items() for ranks in RANKS for batch in BATCHES
            }  # fmt: skip
        for one, other in itertools.combinations(sorted(made), 2):
            for case in made[one]:
                yield f"{name} {one}/{other}", math.log(made[one][case] / made[other][case])


def server_pairs(source: Path) -> Iterator[tuple[str, float]]:
    """(which, log of the ratio of two servers' times per output token). Of repeated runs the median counts."""
    shown = subprocess.run(["git", "-C", str(source), "show", f"{COMMIT}:{SERVERS}"], capture_output=True, check=True)
    yield from paired(csv.DictReader(io.StringIO(shown.stdout.decode())), read_published().points)


def paired(rows: Iterable[Mapping[str, str]], points: Iterable[Point]) -> Iterator[tuple[str, float]]:
    """The pairs among `rows` of the file that share nothing with the backtest's `points`."""
    listed = [row for row in rows if row["mode"] == "agg"]
    counts = {point.entry.quote.partition(",")[0]: is_counted(point) for point in points}
    apart = {(row["model_path"], row["system"]) for row in listed if counts.get(row["id"])}
    runs: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in listed:
        clients = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
        simulated = row["precision"] in PRECISIONS and row["model_path"].startswith(MODELS)
        if clients and simulated and row["id"] not in counts and (row["model_path"], row["system"]) not in apart:
            case = (*(row[column] for column in WORKLOAD), clients[1])
            runs[case][row["backend"]].append(float(row["silicon_tpot_ms"]))
    for case, engines in runs.items():
        typical = {engine: statistics.median(times) for engine, times in engines.items()}
        for one, other in itertools.combinations(sorted(typical), 2):
            yield f"{' '.join(case[:3])} {one}/{other}", math.log(typical[one] / typical[other])


def is_counted(point: Point) -> bool:
    """Whether the backtest counts it, as far as its file says; weights of 8 bits are not simulated."""
    return not point.entry.not_counted and point.dtype != "float8"


def deviation(differences: Sequence[float]) -> float:
    """One standard deviation of an engine from the typical one, of logarithms' `differences` between two."""
    return math.sqrt(statistics.fmean(d * d for d in differences) / 2)


def report(what: str, pairs: Iterator[tuple[str, float]]) -> None:
    """By kind of pair, and of all: number, mean difference, one engine's standard deviation."""
    kinds: Mapping[str, list[float]] = defaultdict(list)
    for kind, difference in pairs:
        kinds[kind].append(difference)
    for kind, found in sorted(kinds.items()):
        print(f"  {kind:58} {len(found):4} pairs, mean {statistics.fmean(found):+.3f}, {deviation(found):.3f}")
    every = [difference for found in kinds.values() for difference in found]
    print(
        f"{what}: {len(every)} pairs of {len(kinds)} kinds, one engine deviates by {deviation(every):.3f}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a clone of the repository")
    options = parser.parse_args()
    report("kernels of a decode step", step_pairs(options.source))
    report("servers", server_pairs(options.source))


if __name__ == "__main__":
    main()
