"""Fabrics as YAML files: their format, and those that ship. Every figure stands there with its source; units are
seconds, bytes, FLOP and bytes per second."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rewriter.common.errors import RewriterError, did_you_mean
from rewriter.common.yaml_documents import Document, Problem, read, read_file
from rewriter.fabric.alpha_beta import PLAIN, Wire, nccl
from rewriter.fabric.calls import Kind
from rewriter.fabric.fabric import NO_CODE, Fabric, TableChoice
from rewriter.fabric.links import Device, Link, kernel_systems
from rewriter.fabric.measured_delays import FusedSum
from rewriter.fabric.overlap import NONE, SOURCES, OverlapCosts
from rewriter.fabric.tables import Curve, CurvePoint, Table, TableKey

LIBRARY, DEVICES = (Path(__file__).parent / folder for folder in ("library", "devices"))
MAX_BYTES = 1 << 20
"""Size limit of a file, which may hold measurements."""

Text = Annotated[str, Field(min_length=1, max_length=2000)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
Word = Annotated[str, Field(pattern=r"^[^\s:]{1,64}$")]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1 << 40)]
Bytes = Annotated[int, Field(ge=1, le=1 << 60)]
Ranks = Annotated[int, Field(ge=2, le=1 << 20)]
Share = Annotated[float, Field(gt=0, le=1)]
V = TypeVar("V")
DType = Literal["float32", "bfloat16", "float16", "float8", "float4", "int8"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def values(self) -> dict[str, Any]:
        """Its fields that are set, figures by their values."""
        set_fields = ((name, value) for name, value in self if value is not None)
        return {name: value.value if isinstance(value, Figure) else value for name, value in set_fields}


class Figure(_Strict, Generic[V]):
    """A value, and who says so."""

    value: V
    source: Text


Time = Figure[Seconds]
Rate = Figure[Positive]
Fraction = Figure[Share]
Number = Figure[Count]
Named = Figure[Word]


class DeviceFile(_Strict):
    """See `rewriter.fabric.Device`."""

    name: Text
    flops: Annotated[dict[DType, Rate], Field(min_length=1)]
    efficiency: Fraction
    attention_flops: Rate
    memory_bytes: Number
    memory_bandwidth: Rate
    memory_efficiency: Fraction
    call_seconds: Time
    launch_seconds: Time
    graphed_launch_seconds: Time
    multiprocessors: Number
    kernels: Named | None = None
    l2_bytes: Number | None = None

    def device(self) -> Device:
        return Device(
            self.name, self.attention_flops.value, self.memory_bytes.value, self.call_seconds.value,
            {dtype: rate.value for dtype, rate in self.flops.items()}, self.efficiency.value,
            self.memory_bandwidth.value, self.memory_efficiency.value,
            self.launch_seconds.value, self.graphed_launch_seconds.value, self.multiprocessors.value,
            self.kernels.value if self.kernels else "", self.l2_bytes.value if self.l2_bytes else 0,
        )  # fmt: skip


class LinkFile(_Strict):
    latency: Time
    bandwidth: Rate
    shared: bool = False
    crossing: Time | None = None


class TableFile(_Strict):
    system: Word
    library: Word
    version: Word


class PointFile(_Strict):
    kind: Kind
    ranks: Ranks
    bytes: Bytes
    seconds: Positive
    cpu_seconds: Seconds = 0.0
    busy_seconds: Seconds = 0.0


class MeasurementsFile(_Strict):
    """Durations of one library's collectives: `points`, or as `curves`, by collective, ranks and bytes."""

    library: Word
    version: Text
    dtype: Word = "float32"
    source: Text
    most_bytes: Number | None = None
    points: tuple[PointFile, ...] = ()
    curves: dict[Kind, dict[Ranks, Annotated[dict[Bytes, Positive], Field(min_length=1)]]] = {}

    def table(self, system: str) -> Table:
        curves: dict[tuple[Kind, int], list[CurvePoint]] = defaultdict(list)
        for point in self.points:
            measured = CurvePoint(point.bytes, point.seconds, point.cpu_seconds, point.busy_seconds)
            curves[point.kind, point.ranks].append(measured)
        for kind, by_ranks in self.curves.items():
            for ranks, row in by_ranks.items():
                curves[kind, ranks] += [CurvePoint(nbytes, seconds) for nbytes, seconds in row.items()]
        key = TableKey(system, self.library, self.version, self.library, True, self.dtype)
        made = {what: Curve.of(points) for what, points in curves.items()}
        return Table(key, made, self.source, self.most_bytes.value if self.most_bytes else None)


class FusedFile(_Strict):
    """See `rewriter.fabric.measured_delays.FusedSum`."""

    library: Named
    added_seconds: Time
    most_bytes: Annotated[dict[Count, Bytes], Field(min_length=1)]


class FabricFile(_Strict):
    """A fabric's file. `inside` may be left out where a node is one rank. Overlap costs what is known of GPUs where the
    file names `blocks`, which GPUs have, and nothing elsewhere, but for what it says itself under `overlap`."""

    name: Name
    summary: Text
    link: Literal["nvlink", "pcie", "roce", "tcp"] | None = None
    modelled: bool
    device: DeviceFile
    node: Number
    inside: LinkFile | None = None
    between: LinkFile | None = None
    model: Text
    protocols: Wire | None = None
    blocks: dict[Word, Number] = {}
    overlap: dict[str, Time] = {}
    fused: FusedFile | None = None
    tables: tuple[TableFile, ...] = ()
    measurements: Annotated[
        tuple[MeasurementsFile, ...], BeforeValidator(lambda x: [x] if isinstance(x, dict) else x)
    ] = ()

    def faults(self) -> list[tuple[str, str]]:
        """(key, what is wrong) of values that do not go together."""
        faults = []
        if self.inside is None and (self.between is None or self.node.value > 1):
            faults.append(("node", "no link `inside`, which nodes of several ranks have."))
        if any(not one.points and not one.curves for one in self.measurements):
            faults.append(("measurements", "neither `points` nor `curves`."))
        if self.model == "measured" and not self.tables and not self.measurements:
            faults.append(("model", "measured, but there are neither `tables` nor `measurements`."))
        if ":" in self.model:
            faults.append(("model", f"{self.model!r:.60}.{NO_CODE}"))
        terms = tuple(SOURCES)
        faults += [("overlap", f"unknown {n!r:.40}. {did_you_mean(n, terms)}") for n in self.overlap if n not in terms]
        known = [*(one.library for one in self.measurements), *(table.library for table in self.tables)]
        if self.fused and self.fused.library.value not in known:
            faults.append(
                ("fused", f"{self.fused.library.value!r} is none of its tables: {', '.join(known) or 'none'}.")
            )
        if self.device.kernels and (name := self.device.kernels.value) not in kernel_systems():
            faults.append(("device", f"kernels of {name!r}: {did_you_mean(name, kernel_systems(), what='shipped')}"))
        return faults

    def fabric(self, sources: dict[str, str]) -> Fabric:
        inside, between = (Link(**link.values()) if link else None for link in (self.inside, self.between))
        first = inside or between
        assert first is not None  # `faults` refused it
        usual = OverlapCosts() if self.blocks else NONE
        tables: list[Table | TableChoice] = [measured.table(self.name) for measured in self.measurements]
        tables += [TableChoice(**table.values()) for table in self.tables]
        device = replace(self.device.device(), tile=16 if self.blocks else 1)
        return Fabric(
            self.name, device, self.node.value, first, between, self.summary, self.modelled, self.model,
            nccl(self.protocols) if self.protocols else (PLAIN,), tuple(tables),
            {library: number.value for library, number in self.blocks.items()},
            replace(usual, **{name: figure.value for name, figure in self.overlap.items()}),
            FusedSum(**self.fused.values()) if self.fused else None, self.link or "",
            ({f"overlap.{name}": said for name, said in SOURCES.items()} if self.blocks else {}) | sources,
        )  # fmt: skip


def parse(text: str, source: str) -> Fabric:
    """A fabric from YAML text; `source` names it in messages.

    Raises RewriterError with every fault of the text, each with its line.
    """
    document = _with_device(read(text, "fabric"))
    problems = list(document.problems)
    file: FabricFile | None = None
    try:
        file = FabricFile.model_validate(document.data)
        problems += [Problem(document.line((key,)), f"{key}: {what}") for key, what in file.faults()]
    except ValidationError as error:
        if document.data is not None or not problems:
            problems += [_explain(document, detail) for detail in error.errors()]
    if problems or file is None:
        lines = [str(problem) for problem in sorted(set(problems))]
        if len(lines) == 1:
            raise RewriterError(f"fabric {source}, {lines[0]}")
        raise RewriterError("\n  ".join([f"fabric {source} has {len(lines)} faults:", *lines]))
    return file.fabric(dict(_sources(document.data)))


def devices() -> tuple[str, ...]:
    """The names of the devices that ship."""
    return tuple(sorted(path.stem for path in DEVICES.glob("*.yaml")))


def _with_device(document: Document) -> Document:
    """The document, with the figures of a device that it names."""
    data = document.data
    name = data.get("device") if isinstance(data, dict) else None
    if not isinstance(name, str):
        return document
    if name not in devices():
        said = f"device: {name!r:.40}. {did_you_mean(name, devices(), what='shipped')} Or give its figures."
        problem = Problem(document.line(("device",)), said)
        return replace(document, data=None, problems=[*document.problems, problem])
    figures = read((DEVICES / f"{name}.yaml").read_text(encoding="utf-8"), "device").data
    return replace(document, data={**data, "device": figures})


def _explain(document: Document, detail: Any) -> Problem:
    location = tuple(part for part in detail["loc"] if part != "[key]")
    line = document.line(location)
    if not location:
        return Problem(line, "a fabric is a mapping with name, summary, modelled, device, node, inside and model.")
    path = ".".join(str(part) for part in location)
    if detail["type"] == "missing":
        extra = " Every figure is written {value: …, source: …}." if location[-1] in ("value", "source") else ""
        return Problem(line, f"{path} is missing.{extra}")
    if detail["type"] == "extra_forbidden":
        known = FabricFile.model_fields if len(location) == 1 else ()
        return Problem(line, f"unknown key {path}. " + (did_you_mean(str(location[0]), known) if known else ""))
    if detail["type"] == "model_type":
        return Problem(line, f"{path} must be a mapping such as {{value: …, source: …}}, not {detail['input']!r:.60}.")
    said = "must be a list" if detail["type"] == "tuple_type" else detail["msg"]
    return Problem(line, f"{path}: {said}, not {detail['input']!r:.60}.")


def _sources(data: Any, path: str = "") -> list[tuple[str, str]]:
    if not isinstance(data, dict):
        return []
    if "source" in data:
        return [(path, data["source"])]
    return [one for key, value in data.items() for one in _sources(value, f"{path}.{key}" if path else str(key))]


def fabrics() -> tuple[str, ...]:
    """The names of the fabrics that ship."""
    return tuple(sorted(path.stem for path in LIBRARY.glob("*.yaml")))


def load_fabric(name_or_path: str | os.PathLike[str]) -> Fabric:
    """A fabric that ships, by name, or one of a file that ends in .yaml.

    Raises RewriterError: no such fabric (with the nearest name), or all faults of the file, each with its line.
    """
    name = os.fspath(name_or_path)
    if name in fabrics():
        return _shipped(name)
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and len(path.parts) < 2 and isinstance(name_or_path, str):
        raise RewriterError(
            f"fabric {name!r:.80}: no such fabric. {did_you_mean(name, fabrics(), what='shipped')} "
            "A file of your own ends in .yaml."
        )
    return _read(path, name)


@cache
def _shipped(name: str) -> Fabric:
    return _read(LIBRARY / f"{name}.yaml", name)


def _read(path: Path, name: str) -> Fabric:
    return parse(read_file(path, "fabric", MAX_BYTES), name)
