"""Fabrics as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from rewriter.common.numbers import json_text
from rewriter.common.tables import WIDE, FittingTable, plain_table
from rewriter.fabric import Fabric
from rewriter.fabric.overlap import SHARES
from rewriter.fabric.tables import SOURCE


def print_fabrics(shown: Sequence[Fabric], as_json: bool) -> None:
    """One line each: what it is, and whether it was measured."""
    if as_json:
        typer.echo(json_text([_header(one) | {"median_error": _error(one)} for one in shown], indent=2))
        return
    rows = [
        {
            "fabric": f"[bold]{one.name}[/]",
            "what it is": ("[yellow]modelled[/]  " if one.modelled else "") + escape(one.summary),
            "collectives of": ", ".join(one.libraries) or "formulas",
            "error": _percent(_error(one)),
        }
        for one in shown
    ]
    console = Console(highlight=False)
    console.print(FittingTable([*rows[0]], rows, ("collectives of",), {"what it is": 40}, look=WIDE))
    console.print(
        "\nerror: of points left out of the tables, predicted by the others: the median.\n"
        "Figures and their sources: `rewrite fabrics show NAME`. Your own machine: `rewrite fabrics calibrate`."
    )


def print_fabric(fabric: Fabric, as_json: bool) -> None:
    """All figures with their sources, and of each table how well it predicts points left out of it."""
    content = _content(fabric)
    if as_json:
        typer.echo(json_text(content, indent=2))
        return
    console = Console(highlight=False)
    mark = "  [yellow]modelled: not measured as a whole[/]" if fabric.modelled else ""
    console.print(f"[bold]{fabric.name}[/]{mark}\n{escape(fabric.summary)}\n")
    names = ("figure", "value", "source")
    figures = plain_table(None, *names, fold=names, whole=names[:1], **WIDE)
    for row in content["figures"]:
        figures.add_row(row["figure"], escape(row["text"]), f"[dim]{escape(row['source'])}[/]")
    console.print(figures)
    if content["kernels"]:
        kernels = plain_table(None, "kernels", "points", "error", "90 % of them", "worst", numbers=("points",), **WIDE)
        for row in content["kernels"]["errors"]:
            shown = (_percent(row[f"{name}_error"]) for name in ("median", "most", "worst"))
            kernels.add_row(row["what"], f"{row['points']:,}", *shown)
        console.print(
            f"\nKernels as measured on {escape(content['kernels']['table'])}; sizes between are interpolated."
        )
        console.print(kernels)
        console.print("error: of each size between two others, predicted by these two.")
    else:
        console.print("\nNo measured kernels: computing is by roofline.")
    if not content["curves"]:
        console.print("\nNo measurements: durations are by formula (α-β).")
        return
    rows = []
    last = ""
    for row in content["curves"]:
        rows.append(
            {
                "table": escape(row["table"]) if row["table"] != last else "",
                "collective": row["collective"], "ranks": str(row["ranks"]), "sizes": str(row["sizes"]),
                "smallest": _time(row["latency_seconds"]), "error": _percent(row["median_error"]),
                "worst": _percent(row["worst_error"]),
            }
        )  # fmt: skip
        last = row["table"]
    look = WIDE | {"numbers": ("sizes", "smallest", "error", "worst")}
    curves = FittingTable([*rows[0]], rows, ("sizes", "worst"), {"table": 26}, look=look)
    console.print()
    console.print(curves)
    console.print(
        "\nerror: of each size between the first and the last, predicted by all others (leave one out): the median. "
        f"Of all: {_percent(content['median_error'])}."
    )


def _header(fabric: Fabric) -> dict[str, Any]:
    known = {name: getattr(fabric, name) for name in ("name", "summary", "modelled")}
    return {**known, "libraries": list(fabric.libraries)}


def _error(fabric: Fabric) -> float | None:
    return _median([error for table in fabric.chosen_tables() for error in table.errors()])


def _median(errors: Sequence[float]) -> float | None:
    return statistics.median(errors) if errors else None


def _content(fabric: Fabric) -> dict[str, Any]:
    curves: list[dict[str, Any]] = []
    for table in fabric.chosen_tables():
        for (kind, ranks), curve in table.curves.items():
            errors = curve.errors()
            curves.append(
                {
                    "table": str(table.key), "source": table.source, "collective": kind, "ranks": ranks,
                    "sizes": len(curve.points), "latency_seconds": curve.latency,
                    "median_error": _median(errors),
                    "worst_error": max(errors, default=None),
                }
            )  # fmt: skip
    return {
        **_header(fabric),
        "model": fabric.model,
        "figures": figures_of(fabric),
        "kernels": _kernels(fabric),
        "curves": curves,
        "median_error": _error(fabric),
    }


def _kernels(fabric: Fabric) -> dict[str, Any] | None:
    """The measured kernels that stand for the device's, and their held-out errors."""
    if not fabric.device.kernels:
        return None
    from rewriter.fabric.kernel_tables import kernel_table  # numpy, which other commands need not load

    table = kernel_table(fabric.device.kernels)
    rows = []
    for what, errors in table.errors().items():
        ordered = sorted(errors.tolist())
        most = ordered[int(0.9 * (len(ordered) - 1))]
        rows.append(
            {"what": what, "points": len(ordered), "median_error": statistics.median(ordered), "most_error": most,
             "worst_error": ordered[-1]}
        )  # fmt: skip
    return {"table": table.name, "errors": rows}


def figures_of(fabric: Fabric) -> list[dict[str, Any]]:
    """Each figure by its place in the file: `figure`, `value`, `text` with its unit, `source`."""
    device = fabric.device
    shown: dict[str, tuple[Any, str]] = {
        **{f"device.flops.{dtype}": (rate, _rate(rate, "FLOP/s")) for dtype, rate in device.peak.items()},
        "device.efficiency": (device.efficiency, _percent(device.efficiency)),
        "device.attention_flops": (device.flops, _rate(device.flops, "FLOP/s")),
        "device.memory_bytes": (device.memory, _rate(device.memory, "B")),
        "device.memory_bandwidth": (device.bandwidth, _rate(device.bandwidth, "B/s")),
        "device.memory_efficiency": (device.memory_efficiency, _percent(device.memory_efficiency)),
        "device.call_seconds": (device.call, _time(device.call)),
        "device.launch_seconds": (device.launch, _time(device.launch)),
        "device.graphed_launch_seconds": (device.launch_graphed, _time(device.launch_graphed)),
        "device.multiprocessors": (device.multiprocessors, str(device.multiprocessors)),
        "device.kernels": (device.kernels, device.kernels),
        "node": (fabric.node, f"{fabric.node} ranks"),
    }
    for name, link in (("inside", fabric.inside), ("between", fabric.between)):
        if link is not None:
            shown[f"{name}.latency"] = (link.latency, _time(link.latency))
            shared = ", shared" if link.shared else ""
            shown[f"{name}.bandwidth"] = (link.bandwidth, _rate(link.bandwidth, "B/s") + shared)
    for name, value in asdict(fabric.overlap).items():
        shown[f"overlap.{name}"] = (value, _percent(value) if name in SHARES else _time(value))
    shown |= {f"blocks.{library}": (blocks, f"at most {blocks}") for library, blocks in fabric.blocks.items()}
    rows = [
        {"figure": name, "value": value, "text": text, "source": fabric.sources[name]}
        for name, (value, text) in shown.items()
        if name in fabric.sources
    ]
    for table in fabric.chosen_tables():
        if table.source != SOURCE:
            rows.append({"figure": "measurements", "value": None, "text": str(table.key), "source": table.source})
    return rows


def _rate(value: float, unit: str) -> str:
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.4g} {letter}{unit}"
    return f"{value:.4g} {unit}"


def _time(seconds: float) -> str:
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
