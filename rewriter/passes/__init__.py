"""The rewrites: one file, one pass, from a Program to a Program.

A pass that ships stands in `available`. An installed package registers others as entry points (`installed`). One of
neither is given to a recipe: `Recipe.load("mine.yaml").knowing(Mine)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rewriter.passes.base import Pass


def available() -> dict[str, type[Pass]]:
    """Every shipped pass by its recipe name."""
    from rewriter.passes.desync import Desync
    from rewriter.passes.drop_sync import DropSync
    from rewriter.passes.fit_ranks import FitRanks
    from rewriter.passes.fuse_projections import FuseProjections
    from rewriter.passes.ladder import Ladder
    from rewriter.passes.merge_reductions import MergeReductions
    from rewriter.passes.no_communication import NoCommunication
    from rewriter.passes.overlap import Overlap
    from rewriter.passes.parallel_block import ParallelBlock
    from rewriter.passes.permute import Permute
    from rewriter.passes.quantize_collectives import QuantizeCollectives
    from rewriter.passes.sequence_parallel import SequenceParallel
    from rewriter.passes.tensor_parallel import TensorParallel

    passes = (
        FitRanks, Permute, TensorParallel, ParallelBlock, MergeReductions, FuseProjections, Ladder, Desync, DropSync,
        Overlap, NoCommunication, SequenceParallel, QuantizeCollectives,
    )  # fmt: skip
    return {p.name: p for p in passes}


def find(name: str) -> type[Pass] | None:
    """The pass of that name, shipped or of an installed package; None if there is none.

    Raises RewriterError as `rewriter.passes.installed.find` does.
    """
    from rewriter.passes import installed

    return installed.find(name, available())


def known() -> tuple[str, ...]:
    """The names of all passes, shipped and of installed packages."""
    from rewriter.passes import installed

    return (*available(), *installed.names())
