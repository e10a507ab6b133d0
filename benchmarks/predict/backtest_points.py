"""Public measurements of time per token, and the models measured: what points.yaml and models.yaml hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import AutoConfig

from rewriter.fabric import Fabric, fabrics, load_fabric
from rewriter.ir import Program
from rewriter.tracing import trace_skeleton
from rewriter.tracing.meta_model import build_skeleton

HERE = Path(__file__).parent
POINTS, MODELS = (HERE / "points.yaml", HERE / "points_pcie.yaml"), HERE / "models.yaml"

Text = Annotated[str, Field(min_length=3)]
Count = Annotated[int, Field(ge=1)]
Measured = Literal["step", "generation", "server", "prefill"]
Unit = Literal["ms", "s", "tokens/s", "prompt tokens/s"]
LinkKind = Literal["nvlink", "pcie", "roce", "tcp"]
DType = Literal["bfloat16", "float16", "float8"]
AllReduce = Literal["nccl", "custom"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Design(_Strict):
    """What runs beside the recipe, where it is not what servers have: `attention` and `all_logits` as
    `rewriter.api.predict` takes them; `whole_head`: embedding and head are whole on every rank."""

    attention: Literal["fused", "plain"] = "fused"
    all_logits: bool = False
    whole_head: bool = False


class PointEntry(_Strict):
    """One figure. `value` in the source's `unit`; `quote` is the line that holds it. `dtype` and `all_reduce` override
    the source's; `not_counted` says why a figure is shown, and not counted."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")]
    model: Text
    gpus: Count
    batch: Count
    prompt: Count
    generate: Count
    value: Annotated[float, Field(gt=0)]
    quote: Text
    dtype: DType | None = None
    all_reduce: AllReduce | None = None
    recipe: Text = "tensor-parallel"
    not_counted: Text | None = None


class Source(_Strict):
    """Where figures stand and how they were measured. See the head of points.yaml for `measured`."""

    name: Text
    where: Text
    date: Text
    device: Text
    fabric: Text
    software: Text
    launch: Literal["graphed", "eager"]
    measured: Measured
    unit: Unit
    dtype: DType
    notes: Text
    points: Annotated[tuple[PointEntry, ...], Field(min_length=1)]
    link: LinkKind = "nvlink"
    all_reduce: AllReduce | None = None
    kv: Literal["float8"] | None = None
    cache: Literal["static", "paged"] = "static"
    chunk: Count | None = None
    served: bool = False
    compiled: bool = True
    design: Design = Design()


class Side(_Strict):
    """What a gain is over, where it is not standard tensor parallelism on the same machine. `library`: whose
    all-reduce."""

    recipe: Text = "tensor-parallel"
    fabric: Text | None = None
    gpus: Count | None = None
    library: Text | None = None


class Gain(_Strict):
    """Tokens per second of `recipe` over those of `over`, prefill included, or of decode steps or a prefill alone, as
    `of` says. `standard`: those of the latter, where they are published."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")]
    model: Text
    fabric: Text
    gpus: Count
    batch: Count
    prompt: Count
    generate: Count
    recipe: Text = "tensor-parallel"
    over: Side = Side()
    of: Literal["generation", "decode", "prefill"] = "generation"
    all_reduce: AllReduce = "nccl"
    library: Text | None = None
    value: Annotated[float, Field(gt=0)]
    where: Text
    quote: Text
    standard: Annotated[float, Field(gt=0)] | None = None
    kv: Literal["float8"] | None = None
    design: Design = Design()

    @property
    def saved(self) -> float | None:
        """Seconds per token by which the recipe is faster, as published."""
        return None if self.standard is None else self.batch / self.standard * (1 - 1 / self.value)

    def __str__(self) -> str:
        over, machine = self.over, ", ".join(x for x in (self.fabric, self.library) if x)
        others = [x for x in (over.fabric, over.library) if x] + ([f"{over.gpus} GPUs"] if over.gpus else [])
        names = [one for one in (self.recipe, over.recipe) if one != "tensor-parallel"]
        what = " over ".join(names) or "standard"
        return f"{what}, {self.model}, `{machine}`" + (f" over {', '.join(f'`{x}`' for x in others)}" if others else "")


class Rejected(_Strict):
    """Figures that were read and left out, and why."""

    what: Text
    why: Text


class PointsFile(_Strict):
    sources: tuple[Source, ...]
    gains: tuple[Gain, ...] = ()
    rejected: tuple[Rejected, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> PointsFile:
        ids = [entry.id for source in self.sources for entry in source.points] + [gain.id for gain in self.gains]
        if twice := {one for one in ids if ids.count(one) > 1}:
            raise ValueError(f"ids that stand twice: {', '.join(sorted(twice))}")
        for source in self.sources:
            for entry in source.points:
                if entry.gpus > 1 and not (entry.all_reduce or source.all_reduce):
                    raise ValueError(f"{entry.id}: {entry.gpus} GPUs, and no all_reduce")
        return self


@dataclass(frozen=True)
class Point:
    """One measurement with its source. `seconds` is the published time per token of each sequence, or of a prefill."""

    entry: PointEntry
    source: Source

    @property
    def dtype(self) -> DType:
        return self.entry.dtype or self.source.dtype

    @property
    def all_reduce(self) -> AllReduce | None:
        return (self.entry.all_reduce or self.source.all_reduce) if self.entry.gpus > 1 else None

    @property
    def seconds(self) -> float:
        entry, value = self.entry, self.entry.value
        if self.source.unit in ("ms", "s"):
            seconds = value * (1e-3 if self.source.unit == "ms" else 1.0)
            return seconds / entry.generate if self.source.measured == "generation" else seconds
        return entry.batch * (entry.prompt if self.source.unit == "prompt tokens/s" else 1) / value

    @property
    def fabric(self) -> Fabric:
        return fabric_of(self.source.fabric)


@dataclass(frozen=True)
class Published:
    """All that the files of points hold."""

    points: tuple[Point, ...]
    gains: tuple[Gain, ...]
    rejected: tuple[Rejected, ...]


def read_published() -> Published:
    """Raises pydantic.ValidationError for a file that is not as it should be."""
    data = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in POINTS]
    merged = {key: [one for part in data for one in part.get(key) or ()] for key in PointsFile.model_fields}
    file = PointsFile.model_validate(merged)
    points = tuple(Point(entry, source) for source in file.sources for entry in source.points)
    return Published(points, file.gains, file.rejected)


def fabric_of(name: str) -> Fabric:
    """A fabric that ships, or one of `fabrics/` that stands for machines of a source."""
    return load_fabric(name if name in fabrics() else HERE / "fabrics" / f"{name}.yaml")


def traced(model: str, dtype: str) -> Program:
    """The program of a model of models.yaml, as `rewriter.api.predict` takes it; of 8 bits as checkpoints say it."""
    fields = dict(read_models()[model])
    eight = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    config = AutoConfig.for_model(
        fields.pop("model_type"), **fields, **(eight if dtype == "float8" else {}),
        dtype="bfloat16" if dtype == "float8" else dtype,
    )  # fmt: skip
    return trace_skeleton(build_skeleton(config))


def read_models() -> Mapping[str, Mapping[str, Any]]:
    """Fields of configs by name."""
    models: dict[str, dict[str, Any]] = yaml.safe_load(MODELS.read_text(encoding="utf-8"))
    return models
