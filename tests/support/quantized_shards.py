"""Quantized checkpoints of the zoo, written, and their ranks' shards."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from grouped import saving

from rewriter.convert.conversion import convert
from rewriter.ir import Program
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.tracing import trace


@functools.cache
def traced(source: Path) -> Program:
    return trace(source)


def sharded(source: Path) -> Program:
    program = traced(source)
    return TensorParallel().apply(program.with_(mesh={"tp": 2}, origin=program))


def write(source: Path, out: Path, recipe: str = "tensor-parallel", **options: Any) -> Path:
    convert(source, recipe, out=out, **saving(**{"tp": 2, "verify": "none"} | options))
    return out
