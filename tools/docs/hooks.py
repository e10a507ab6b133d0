"""Hooks of mkdocs: reference pages and notebooks become pages, and links out of docs/ lead to pages of those files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import links
import notebooks
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
    for place, text in (reference.pages() | notebooks.pages() | links.pages(texts)).items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page; those of generated ones are right already."""
    place = page.file.src_uri
    return markdown if page.file.generated_by else links.rewritten(markdown, f"docs/{place}", place)


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Gives each drawing its width, and says at which places lines may break."""
    folder = Path(config.docs_dir, page.file.src_uri).parent

    def sized(found: re.Match[str]) -> str:
        drawing = folder / found[1]
        box = re.search(r'viewBox="0 0 ([\d.]+) ', drawing.read_text(encoding="utf-8")) if drawing.is_file() else None
        return f'{found[0]} width="{box[1]}"' if box else found[0]

    html = re.sub(r'<img\b[^>]*?\bsrc="([^":]+\.svg)"', sized, html)
    parts = re.split(r"(<(?:pre|code)\b.*?</(?:pre|code)>)", html, flags=re.DOTALL)
    return "".join(map(broken, parts))


def broken(part: str) -> str:
    """A part of a page: a number stays on one line with % or ×; a long name in code may break after _ . / and :"""
    if part.startswith("<pre"):
        return part
    if not part.startswith("<code"):
        return re.sub(r"(?<=\d) (?=[%×])", "&nbsp;", part)
    return re.sub(r"[\w./:-]{25,}(?![^<]*>)", lambda name: re.sub(r"([_./:])(?=\w)", r"\1<wbr>", name[0]), part)


def on_post_page(output: str, **_: Any) -> str:
    """The theme asks the repository's host for its number of stars where a link to it has this attribute."""
    return output.replace(' data-md-component="source"', "")


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for 404.html, which is no page."""
    return on_post_page(output_content)


def on_post_build(config: Any) -> None:
    """Pages that are opened from the disk read the index of the search as a script."""
    index = Path(config.site_dir, "search/search_index.json")
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}", encoding="utf-8")
