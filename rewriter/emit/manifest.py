"""Manifest entries that the compiler knows: the mesh of a program, and the versions at work."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from rewriter.common.packages import VERSION

if TYPE_CHECKING:
    from rewriter.ir import Program


def mesh_of(program: Program) -> dict[str, int]:
    """The mesh of a program as a manifest has it."""
    sequence = program.mesh.get("sp", 1)
    return {"tp": program.mesh.get("tp", 1), **({"sp": sequence} if sequence > 1 else {})}


def versions() -> dict[str, str]:
    """Versions that the output was made with."""
    import torch
    import transformers

    return {
        "rewriter": VERSION,
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
