"""Fabrics as files: measurements put into the YAML of `rewriter.fabric.schema`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rewriter.common.errors import RewriterError
from rewriter.common.files import require_place
from rewriter.common.yaml_documents import read
from rewriter.fabric.calls import Kind
from rewriter.fabric.nccl_tests import Log, per_node
from rewriter.fabric.schema import LIBRARY, fabrics, load_fabric, parse
from rewriter.fabric.tables import CurvePoint


def measured_points(points: Iterable[tuple[Kind, int, CurvePoint]]) -> list[dict[str, Any]]:
    """The rows of `measurements`, of (kind, ranks, point)."""
    return [
        {"kind": kind, "ranks": ranks, "bytes": point.nbytes, "seconds": short(point.seconds)}
        | {name: short(value) for name in ("cpu_seconds", "busy_seconds") if (value := getattr(point, name))}
        for kind, ranks, point in points
    ]


def short(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def imported(logs: list[Log], device_of: str, out: Path) -> str:
    """The YAML of a fabric measured by nccl-tests, with the device and the links of the shipped fabric `device_of`.

    Raises RewriterError where logs do not go together, or span nodes that this fabric does not join.
    """
    load_fabric(device_of)  # says what is wrong with the name
    if device_of not in fabrics():
        raise RewriterError(f"--device-of {device_of!r:.80}: expected a fabric that ships: {', '.join(fabrics())}.")
    data: dict[str, Any] = read((LIBRARY / f"{device_of}.yaml").read_text(encoding="utf-8"), "fabric").data
    versions = {log.version for log in logs}
    if len(versions) > 1:
        raise RewriterError(
            f"logs of several versions of NCCL: {', '.join(sorted(versions))}. Import those of one version."
        )
    names = ", ".join(Path(log.source).name for log in logs)[:400]
    source = f"nccl-tests, out-of-place times: {names}"
    node = per_node(logs)
    if any(log.ranks > node for log in logs) and "between" not in data:
        raise RewriterError(
            f"the logs span hosts, and {device_of} has no link between nodes. Take another --device-of."
        )
    if node > 1 and "inside" not in data:
        raise RewriterError(
            f"the logs' hosts have {node} ranks, and {device_of} has one per node. Take another --device-of."
        )
    kinds = ", ".join(sorted({log.kind for log in logs}))
    points = [(log.kind, log.ranks, CurvePoint(*row)) for log in logs for row in log.rows]
    spans = any(log.ranks > log.per_node for log in logs)
    for measured in ("tables", "fused"):
        data.pop(measured, None)
    data |= {
        "name": name_of(out),
        "summary": f"{kinds} as nccl-tests measured; devices and links of {device_of}",
        "modelled": False,
        "node": {"value": node if spans else max(node, data["node"]["value"]), "source": source},
        "model": "measured",
        "measurements": {
            "library": "nccl", "version": logs[0].version, "dtype": logs[0].dtype, "source": source,
            "points": measured_points(points),
        },
    }  # fmt: skip
    return to_yaml(data)


def name_of(out: Path) -> str:
    """A fabric's name, of its file's."""
    name = re.sub(r"[^a-z0-9]+", "-", out.stem.lower()).strip("-")[:64]
    return name or "fabric"


def to_yaml(data: Mapping[str, Any]) -> str:
    """The text of a fabric's file, checked. Raises RewriterError for data that make no fabric."""
    text: str = yaml.safe_dump(
        dict(data), sort_keys=False, allow_unicode=True, default_flow_style=None, width=float("inf")
    )
    parse(text, str(data.get("name")))
    return text


def check(out: Path) -> None:
    """Raises RewriterError where no fabric can be written at `out`, before anything is measured for it."""
    if out.suffix not in (".yaml", ".yml"):
        raise RewriterError(f"--out {out}: a fabric's file ends in .yaml.")
    require_place(out, "--out")
