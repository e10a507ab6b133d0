"""Files that a page prints: its blocks with a title, which is the file's name."""

from __future__ import annotations

from pathlib import Path

from page_blocks import blocks


def page_files(page: Path) -> dict[str, str]:
    """The text of each file by its name."""
    return {block.title: block.text for block in blocks(page) if block.title}


def install(name: str, version: str, points: str, place: Path) -> None:
    """Give `place`, a folder of sys.path, what pip writes of a package with the entry points `points`; no module."""
    folder = place / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text(f"[rewriter.passes]\n{points}\n", encoding="utf-8")
