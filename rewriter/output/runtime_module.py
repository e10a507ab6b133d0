"""The runtime module of an output directory, as a rank that runs it reads rewrite.json.

Only what a rank needs is looked at, without the schema of the whole file (`rewriter.output.manifest`): importing
pydantic takes a fraction of a second, in every rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.files import read_json, refuse_adapter
from rewriter.output.names import MANIFEST, mesh_name, mesh_named, ranks_of


@dataclass(frozen=True)
class ModuleEntry:
    """The module of one mesh; files are names within `root`.

    `weights`: which ranges of the checkpoint each tensor-parallel rank holds; None where `ranks` are files that were
    written for them, with `headers` by which they are known (`rewriter.output.manifest.Runtime`). `sequence`: how
    tokens are shared, None where every rank holds all. `bound`: the function of the checkpoint is bound to the number
    of tensor-parallel ranks. `files`: the sha256 of every file of the directory. `positions`: those of the model's
    table of positions, None where it has none.
    """

    root: Path
    mesh: Mapping[str, int]
    module: str
    class_name: str
    weights: str | None
    ranks: list[str]
    headers: Mapping[str, Any]
    sequence: Mapping[str, Any] | None
    bound: bool
    files: Mapping[str, str]
    positions: int | None

    @property
    def name(self) -> str:
        """Name of the mesh."""
        return mesh_name(self.mesh)

    @property
    def tensor_ranks(self) -> int:
        return self.mesh["tp"]

    @property
    def sequence_ranks(self) -> int:
        return self.mesh.get("sp", 1)

    @property
    def processes(self) -> int:
        """Number of processes of one copy of the model."""
        return ranks_of(self.mesh)

    def path(self, name: str) -> Path:
        """The file `name` of the directory. Raises RewriterError where it is outside or missing."""
        path = self.root / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RewriterError(
                f"{self.root / MANIFEST}: {name!r} points outside the directory. It is not as `rewrite` wrote it"
            )
        if not path.is_file():
            raise RewriterError(f"{path}: no such file, but {MANIFEST} names it. Rewrite the model again")
        return path


def read_module_entry(root: Path, processes: int) -> ModuleEntry:
    """The module for a copy of the model on `processes` ranks; where there is none, that of the mesh of the manifest.

    Raises RewriterError for a manifest that is missing or not as `rewrite` wrote it, and where an adapter lies in the
    directory.
    """
    path = root / MANIFEST
    refuse_adapter(root)
    if not os.path.lexists(path):
        raise RewriterError(
            f"{root}: no {MANIFEST} in it. Give a directory that `rewrite` wrote, or a copy of it with your weights"
        )
    data = read_json(path, "Rewrite the model again")
    try:
        own = {axis: int(size) for axis, size in data["mesh"].items()}
        meshes = [{"tp": 1} | own, *map(mesh_named, data["runtime"])]
        mesh = next((mesh for mesh in meshes if ranks_of(mesh) == processes), meshes[0])
        entry, per_rank = data["runtime"][mesh_name(mesh)], data.get("per_rank")
        bound = None if per_rank is None else int(per_rank["ranks"])
        module = ModuleEntry(
            root, mesh, entry["module"], entry["class"], entry.get("weights"), list(entry.get("ranks") or ()),
            entry.get("headers") or {}, entry.get("sequence"), bound is not None, data.get("files") or {},
            data.get("positions"),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise no_module(root, error) from error
    names = [module.module, module.class_name, *(module.ranks if module.weights is None else [module.weights])]
    if not all(isinstance(name, str) for name in names):
        raise RewriterError(f"{path}: its runtime module or weights are no file names. Rewrite the model again")
    if module.weights is None and len(module.ranks) != module.tensor_ranks:
        raise RewriterError(
            f"{path}: it lists {len(module.ranks)} rank files for {module.tensor_ranks} ranks. Rewrite the model again"
        )
    if bound not in (None, module.tensor_ranks):
        raise RewriterError(
            f"{path}: this checkpoint is bound to tp={bound}, but its mesh has tp={module.tensor_ranks}. It is not as "
            "`rewrite` wrote it"
        )
    return module


def no_module(root: Path, error: Exception) -> RewriterError:
    """The error that says what in a manifest is no runtime module."""
    return RewriterError(
        f"{root / MANIFEST}: it describes no runtime module (at {error}). Rewrite the model with --tp N to get one"
    )
