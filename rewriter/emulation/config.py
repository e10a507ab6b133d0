"""Configuration of an emulated job: size of its world, real ranks, fabric."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rewriter.common.errors import RewriterError
from rewriter.common.processes import EMULATED
from rewriter.emulation.delay_cpu import Late
from rewriter.fabric import DelayModel, WhatIf, load_fabric

UNPACED = "unpaced"  # in the place of a fabric, in wire mode: no delays but those of the wire


class EmulationConfig(BaseModel):
    """An emulated job.

    `world_size`: ranks of the job. `real`: those that run as processes, one of each class of ranks with equal
    modules; all others are emulated. `fabric`: a name or a YAML file. `library`: whose collectives (nccl, vllm, …; the
    fabric's first if None). `graphed`: delays of collectives inside CUDA graphs. `what_if`: changes to the delays, as
    `all_reduce=+5us`. `timeout`: seconds, where a program names none. `seconds_file`: where a rank writes how long its
    job took.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    world_size: Annotated[int, Field(ge=1)]
    real: tuple[int, ...] = (0,)
    fabric: str = "h100-nvlink"
    library: str | None = None
    graphed: bool = False
    mode: Literal["delay", "wire"] = "delay"
    what_if: tuple[str, ...] = ()
    timeout: Annotated[float, Field(gt=0)] = 1800.0
    environment: str | None = None  # host:port of the environment process, in wire mode
    seconds_file: str | None = None

    @field_validator("real")
    @classmethod
    def _sorted(cls, real: tuple[int, ...]) -> tuple[int, ...]:
        if not real or len(set(real)) != len(real):
            raise ValueError(f"real ranks {list(real)}: expected at least one, each once")
        return tuple(sorted(real))

    @model_validator(mode="after")
    def _inside(self) -> EmulationConfig:
        outside = [rank for rank in self.real if not 0 <= rank < self.world_size]
        if outside:
            raise ValueError(f"real: rank {outside[0]}, expected 0 to {self.world_size - 1}")
        return self

    def delay_model(self) -> DelayModel:
        """The model of delays, with the time for which this rank waits for emulated ones.

        Raises RewriterError where the fabric or a change is not known.
        """
        fabric = load_fabric(self.fabric)
        model = WhatIf.parse(fabric.delay_model(self.library, self.graphed), self.what_if)
        overlap = model.overlap(fabric.overlap)
        if not (overlap.jitter or overlap.jitter_seconds):
            return model
        return Late(model, overlap, frozenset(self.real))

    def pace(self) -> DelayModel | None:
        """`delay_model`, or None where the wire alone sets the time."""
        return None if self.fabric == UNPACED else self.delay_model()

    def to_environment(self) -> str:
        return self.model_dump_json(exclude_defaults=True)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> EmulationConfig | None:
        """The configuration in REWRITER_EMULATE; None where that is not set. Raises RewriterError for a wrong one."""
        text = (os.environ if environment is None else environment).get(EMULATED)
        if not text:
            return None
        with _reported(EMULATED):
            return cls.model_validate_json(text)

    @classmethod
    def of(cls, **values: Any) -> EmulationConfig:
        """As the constructor, with RewriterError where it raises pydantic's."""
        with _reported("emulation"):
            return cls(**values)


@contextmanager
def _reported(what: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'value'}: {e['msg']}" for e in error.errors())
        raise RewriterError(f"{what}: {faults}") from None
