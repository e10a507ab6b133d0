"""Hooks of mkdocs: reference pages are generated, and links out of docs/ lead to pages of those files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import links
import reference
from mkdocs.structure.files import File, Files


def on_config(config: Any) -> Any:
    """Pages in docs/ itself that the navigation does not name stand at its end."""
    named = str(config.nav)
    more = [p.name for p in sorted(Path(config.docs_dir).glob("*.md")) if f"'{p.name}'" not in named]
    if more:
        config.nav.append({"More": more})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages."""
    texts = {f"docs/{f.src_uri}": f.content_string for f in files.documentation_pages()}
    for place, text in (reference.pages() | links.pages(texts)).items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page; those of generated ones are right already."""
    place = page.file.src_uri
    return markdown if page.file.generated_by else links.rewritten(markdown, f"docs/{place}", place)
