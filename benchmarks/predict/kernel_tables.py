"""Tables of measured kernels for `rewriter/fabric/data`, from the figures that NVIDIA's AIConfigurator publishes.

    git clone --bare https://github.com/ai-dynamo/aiconfigurator FROM
    python -m benchmarks.predict.kernel_tables FROM                # all systems
    python -m benchmarks.predict.kernel_tables FROM h100_sxm l40s

Needs pyarrow, which the project itself does not. A table holds the durations as published, in microseconds with four
digits; what follows from how they were measured is `rewriter.fabric.kernel_tables`' matter. Of its source it keeps
bfloat16, float8 and NVFP4 ("float4"); sizes of heads from 64 to 256; attention without windows; experts of one rank's
width, all of them on it, chosen by a power law (exponent 1.01), as trained routers choose. Where alike cases were
measured more than once (attention by its number of streams: sequences · heads of keys), the median counts.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMIT = "095f58a51c4ca8e61b66ec108d86f223f8d559ce"
ROOT = "aic-core/src/aiconfigurator_core/systems/data"
TARGET = Path(__file__).parents[2] / "rewriter/fabric/data"
HEADS = (64, 128, 256)
US = 1e3  # from the source's milliseconds

Row = dict[str, Any]


@dataclass(frozen=True)
class System:
    """Which library's measurements, and what the device promises. `replay`: seconds between two replays of a CUDA graph
    beyond the kernels in it (see `--replays`); where no pair of measurements says it, the median of the others."""

    device: str
    version: str
    bfloat16: float
    float8: float
    bandwidth: float
    l2: int
    replay: float
    float4: float = 0.0


SYSTEMS = {
    "a100_sxm": System("A100 SXM 80 GB", "0.14.0", 312e12, 0.0, 2.039e12, 40 << 20, 3.0e-6),
    "h100_sxm": System("H100 SXM", "0.24.0", 989e12, 1979e12, 3.35e12, 50 << 20, 3.1e-6),
    "h200_sxm": System("H200 SXM", "0.24.0", 989e12, 1979e12, 4.8e12, 50 << 20, 1.7e-6),
    "l40s": System("L40S", "0.24.0", 362e12, 733e12, 864e9, 96 << 20, 3.0e-6),
    "rtx_pro_6000_server": System(
        "RTX PRO 6000 Server", "0.24.0", 500e12, 1000e12, 1.597e12, 128 << 20, 3.0e-6, 2000e12
    ),
    "b200_sxm": System("B200 SXM", "0.24.0", 2250e12, 4500e12, 7.7e12, 126 << 20, 3.5e-6, 9000e12),
}


def rows(source: Path, path: str, columns: Sequence[str]) -> list[Row]:
    """The rows of one parquet file, with those `columns` that it has. Empty where there is no such file."""
    from pyarrow import parquet

    shown = subprocess.run(
        ["git", "-C", str(source), "show", f"{COMMIT}:{ROOT}/{path}"], capture_output=True, check=False
    )
    if shown.returncode:
        return []
    found = parquet.read_table(io.BytesIO(shown.stdout))
    listed: list[Row] = found.select([c for c in columns if c in found.column_names]).to_pylist()
    return listed


def grid(cells: Iterable[tuple[tuple[Any, ...], float]], axes: Sequence[str]) -> dict[str, Any]:
    """Cells of (place on each axis, µs) as axes and a flat list, the last axis running fastest; None where there is no
    measurement."""
    known: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for place, us in cells:
        known[place].append(us)
    places = [sorted({place[i] for place in known}) for i in range(len(axes))]
    values: list[float | None] = []

    def visit(before: tuple[Hashable, ...]) -> None:
        if len(before) == len(places):
            found = known.get(before)
            values.append(float(f"{statistics.median(found):.4g}") if found else None)
            return
        for value in places[len(before)]:
            visit((*before, value))

    visit(())
    return {**dict(zip(axes, places, strict=True)), "us": values}


def products(source: Path, system: str, version: str, library: str = "vllm") -> dict[str, Any]:
    found = rows(
        source, f"{system}/gemm/{library}/{version}/gemm_perf.parquet", ("gemm_dtype", "m", "n", "k", "latency")
    )
    return {
        dtype: grid(cells, ("columns", "depth", "rows"))
        for dtype, name in (("bfloat16", "bfloat16"), ("float8", "fp8"), ("float4", "nvfp4"))
        if (cells := [((r["n"], r["k"], r["m"]), r["latency"] * US) for r in found if r["gemm_dtype"] == name])
    }


def attention(source: Path, system: str, version: str, phase: str, library: str = "vllm") -> dict[str, Any]:
    """By size of a head, query heads per head of keys, streams, and tokens (of a prompt, or of the cache)."""
    columns = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "window_size", "latency")
    found = rows(
        source, f"{system}/attention/{library}/{version}/{phase}_attention_perf.parquet", (*columns, "kv_cache_dtype")
    )
    cells = []
    for r in found:
        if r.get("window_size", 0) or r["kv_cache_dtype"] != "bfloat16" or r["head_dim"] not in HEADS:
            continue
        heads = r["num_key_value_heads"]
        tokens = r["isl"] if phase == "context" else r["step"] + 1
        if r["num_heads"] % heads or r["num_heads"] // heads > 16:
            continue
        place = (r["head_dim"], r["num_heads"] // heads, r["batch_size"] * heads, tokens)
        cells.append((place, r["latency"] * US))
    # sizes of which only few were measured would leave most of the grid empty
    often = {v for v in {p[2] for p, _ in cells} if v & (v - 1) == 0}
    return {"bfloat16": grid([(p, us) for p, us in cells if p[2] in often], ("head_dim", "group", "streams", "tokens"))}


def experts(source: Path, system: str, version: str) -> dict[str, Any]:
    """By shape (width, width of an expert on a rank, chosen, experts) and tokens."""
    columns = (
        "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
        "distribution", "latency",
    )  # fmt: skip
    found = rows(source, f"{system}/moe/vllm/{version}/moe_perf.parquet", columns)
    tables = {}
    known = {r["moe_dtype"] for r in found}
    eight = "fp8_block" if "fp8_block" in known else "fp8"
    for dtype, name in (("bfloat16", "bfloat16"), ("float8", eight), ("float4", "nvfp4")):
        cells = []
        for r in found:
            whole = r["moe_ep_size"] == 1 and r["inter_size"] % r["moe_tp_size"] == 0
            if r["moe_dtype"] != name or r["distribution"] != "power_law_1.01" or not whole:
                continue
            shape = (r["hidden_size"], r["inter_size"] // r["moe_tp_size"], r["topk"], r["num_experts"])
            cells.append(((shape, r["num_tokens"]), r["latency"] * US))
        if cells:
            tables[dtype] = grid(cells, ("shapes", "tokens"))
    return tables


def glue(source: Path, system: str, version: str) -> dict[str, Any]:
    """What runs over memory once: a conversion to float8 with a known scale, and one that takes the largest value of
    each row first (its added time is published apart)."""
    columns = ("m", "k", "latency")
    plain = rows(source, f"{system}/quantize/vllm/{version}/scale_matrix_perf.parquet", columns)
    added = rows(source, f"{system}/quantize/vllm/{version}/computescale_perf.parquet", columns)
    more = {(r["m"], r["k"]): r["latency"] * US for r in added}
    if not plain:
        return {}
    cells = [((r["m"], r["k"]), r["latency"] * US) for r in plain]
    axes = ("rows", "columns")
    reduced = [(place, us + more[place]) for place, us in cells if place in more]
    return {"pointwise": grid(cells, axes), "reduction": grid(reduced, axes)}


def table(source: Path, name: str) -> dict[str, Any]:
    system = SYSTEMS[name]
    promised = {"bfloat16": system.bfloat16, "float8": system.float8, "float4": system.float4}
    flops = {dtype: rate for dtype, rate in promised.items() if rate}
    return {
        "system": name, "device": system.device, "library": "vllm", "version": system.version, "flops": flops,
        "bandwidth": system.bandwidth, "l2_bytes": system.l2, "replay_us": round(system.replay * 1e6, 2),
        "products": products(source, name, system.version),
        "prefill_attention": attention(source, name, system.version, "context"),
        "decode_attention": attention(source, name, system.version, "generation"),
        "experts": experts(source, name, system.version),
        "glue": glue(source, name, system.version),
    }  # fmt: skip


def replays(source: Path, name: str) -> dict[int, float]:
    """The gap between two replays, µs, by the number c of kernels to a graph: products of up to 128 rows were measured
    with six (vLLM), and with as many as it takes to fill the L2 cache, five at most (TensorRT-LLM). The same kernels
    (both call torch's) then differ by gap · (1 / c - 1 / 6)."""
    system, columns = SYSTEMS[name], ("gemm_dtype", "m", "n", "k", "latency")
    each: list[dict[tuple[int, int, int], float]] = []
    for library, version in (("trtllm", "1.3.0rc20"), ("vllm", system.version)):
        found = rows(source, f"{name}/gemm/{library}/{version}/gemm_perf.parquet", columns)
        each.append({(r["m"], r["n"], r["k"]): r["latency"] * US for r in found if r["gemm_dtype"] == "bfloat16"})
    differences: dict[int, list[float]] = defaultdict(list)
    for place in each[0].keys() & each[1].keys():
        weights = place[1] * place[2] * 2
        if place[0] <= 128 and weights < 3 * system.l2:
            differences[max(1, min(5, -(-system.l2 // weights)))].append(each[0][place] - each[1][place])
    return {c: statistics.median(differences[c]) / (1 / c - 1 / 6) for c in sorted(differences)}


def libraries(source: Path, name: str) -> dict[str, tuple[float, ...]]:
    """By how much other libraries' kernels differ from the table's, at 16, 50 and 84 %: products of up to 128 rows
    whose weights are above 4 MB, and attention of a decode step over more than 200 tokens; gaps between replays taken
    off."""
    system, found = SYSTEMS[name], {}
    for library, version in (("trtllm", "1.3.0rc20"), ("sglang", "0.5.14")):
        each: list[dict[tuple[int, ...], float]] = []
        for one, number in ((library, version), ("vllm", system.version)):
            made = rows(
                source, f"{name}/gemm/{one}/{number}/gemm_perf.parquet", ("gemm_dtype", "m", "n", "k", "latency")
            )
            cells: dict[tuple[int, ...], float] = {}
            for r in made:
                weights = r["n"] * r["k"] * 2
                turns = max(1, min(5, -(-system.l2 // weights))) if one == "trtllm" else 6
                if r["gemm_dtype"] == "bfloat16" and weights > 4e6 and r["m"] <= 128:
                    cells[r["m"], r["n"], r["k"]] = r["latency"] * US - system.replay * 1e6 / turns
            each.append(cells)
        found[f"products, {library}"] = spread(each[0], each[1])
        each = []
        for one, number in ((library, version), ("vllm", system.version)):
            columns = ("batch_size", "num_heads", "num_key_value_heads", "head_dim", "step", "window_size", "latency")
            path = f"{name}/attention/{one}/{number}/generation_attention_perf.parquet"
            made = rows(source, path, (*columns, "kv_cache_dtype"))
            kept = [r for r in made if r["kv_cache_dtype"] == "bfloat16" and not r["window_size"] and r["step"] > 200]
            each.append({tuple(r[c] for c in columns[:5]): r["latency"] * US for r in kept if r["head_dim"] == 128})
        found[f"attention, {library}"] = spread(each[0], each[1])
    return {what: parts for what, parts in found.items() if parts}


def spread(ours: dict[tuple[int, ...], float], others: dict[tuple[int, ...], float]) -> tuple[float, ...]:
    ratios = sorted(ours[place] / others[place] - 1 for place in ours.keys() & others.keys())
    return tuple(ratios[int(share * (len(ratios) - 1))] for share in (0.16, 0.5, 0.84)) if ratios else ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a clone of the repository")
    parser.add_argument("systems", nargs="*", default=list(SYSTEMS), help="which; all where none is named")
    parser.add_argument("--replays", action="store_true", help="print the gaps between replays instead")
    parser.add_argument("--libraries", action="store_true", help="print how other libraries' kernels differ instead")
    options = parser.parse_args()
    for name in options.systems:
        if options.replays:
            print(name, ", ".join(f"{c} to a graph {gap:.2f} µs" for c, gap in replays(options.source, name).items()))
            continue
        if options.libraries:
            for what, parts in libraries(options.source, name).items():
                print(f"{name:20} {what:20}", ", ".join(f"{100 * part:+.1f} %" for part in parts))
            continue
        text = json.dumps(table(options.source, name), separators=(",", ":")).encode()
        path = TARGET / f"kernels-{name}.json.gz"
        path.write_bytes(gzip.compress(text, 9, mtime=0))
        print(f"{path.name} {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
