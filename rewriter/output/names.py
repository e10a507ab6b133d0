"""Names in an output directory: of its manifest, and of the meshes that it has runtime modules for."""

from __future__ import annotations

from collections.abc import Mapping

MANIFEST = "rewrite.json"


def mesh_name(mesh: Mapping[str, int]) -> str:
    """The folder of a mesh under runtime/, and its key in the manifest: tp2, sp4, sp4-tp2."""
    return "-".join(f"{axis}{mesh[axis]}" for axis in ("sp", "tp") if mesh.get(axis, 1) > 1) or "tp1"


def ranks_of(mesh: Mapping[str, int]) -> int:
    """The number of processes that run one copy of the model."""
    return mesh.get("tp", 1) * mesh.get("sp", 1)


def mesh_named(name: str) -> dict[str, int]:
    """The mesh {axis: ranks} of a name that `mesh_name` gave. Raises ValueError for other texts."""
    return {"tp": 1} | {part[:2]: int(part[2:]) for part in name.split("-")}
