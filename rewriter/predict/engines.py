"""Exact options of serving engines: what each does, where it is released, and how it is switched on (engines.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from rewriter.common.errors import RewriterError, did_you_mean

Text = Annotated[str, Field(min_length=1)]
OptionName = Literal[
    "one-shot-pcie", "one-shot-roce", "fused-norm", "l2-prefetch", "sequence-parallel", "quantized-prompt-sums",
    "pipeline", "replicas", "draft",
]  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Engine(_Strict):
    """`library`: whose all-reduce it has besides NCCL's, as fabrics call it. `serve`: the words of its command, which
    end in those for tensor-parallel ranks; {model} and {tp} are to be filled in."""

    version: Text
    library: Text
    serve: tuple[Text, ...] = ()


class Release(_Strict):
    """The switch of an engine's option and, where it is new, the first release that has it."""

    switch: Text
    since: str = ""


class ExactOption(_Strict):
    """`libraries`: the collectives that it stands for, as fabrics call them. `rounds`: sums are of fewer bits. `needs`:
    what it asks of machine and model; `source`: who says so."""

    title: Text
    does: Text
    engines: Mapping[str, Release]
    source: Text
    needs: str = ""
    libraries: tuple[Text, ...] = ()
    rounds: bool = False


class _File(_Strict):
    engines: Mapping[str, Engine]
    options: Mapping[OptionName, ExactOption]


@cache
def _read() -> _File:
    return _File.model_validate(yaml.safe_load((Path(__file__).parent / "engines.yaml").read_text(encoding="utf-8")))


def options() -> Mapping[OptionName, ExactOption]:
    """All exact options by name."""
    return _read().options


def engines() -> tuple[str, ...]:
    """The names of the engines that are known."""
    return tuple(_read().engines)


def engine_named(name: str) -> Engine:
    """An engine by name. Raises RewriterError for an unknown one, with the nearest name."""
    known = _read().engines
    if name not in known:
        raise RewriterError(f"--engine {name!r:.40}: {did_you_mean(name, tuple(known))}")
    return known[name]
