"""Links from a page to files of the repository that are no pages of the site: the file becomes a page of its own."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = "docs/"
PREFIX = "files/"  # of the pages of such files, in the site
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1?\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!\\)(\]\()([^)\s#][^)\s]*)(\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".html": "html"}


def outside(text: str, origin: str) -> Iterator[str]:
    """Files and folders outside of docs/, from the repository's root, that a page links to. `origin`: where its text
    is in the repository, as "docs/results/gpu.md"."""
    for _, target in _links(text):
        path = _resolved(target, origin)
        if path is not None and not path.startswith(DOCS) and (ROOT / path).exists():
            yield path


def rewritten(text: str, origin: str, page: str) -> str:
    """The text with its links made for the site, where it is at `page`, as "files/README.md.md"."""
    found, end = [], 0
    for match, target in _links(text):
        found += [text[end : match.start(2)], _placed(target, origin, page)]
        end = match.end(2)
    return "".join([*found, text[end:]])


def pages(texts: Mapping[str, str]) -> dict[str, str]:
    """Pages of all files that these texts (by origin) link to, and of those that these link to, by place."""
    found: dict[str, str] = {}
    waiting = [path for origin, text in texts.items() for path in outside(text, origin)]
    while waiting:
        path = waiting.pop()
        place = page_of(path)
        if place in found or path.endswith(".ipynb"):
            continue
        file = ROOT / path
        if file.suffix == ".md":
            text = file.read_text(encoding="utf-8")
            waiting += outside(text, path)
            found[place] = rewritten(text, path, place)
        else:
            found[place] = _shown(file, path)
    return found


def page_of(path: str) -> str:
    """The place of a repository's file in the site. The pages of notebooks are made by notebooks.py."""
    if path.endswith(".ipynb"):
        return f"notebooks/{Path(path).stem}.md"
    return f"{PREFIX}{path}" if path.endswith(".md") else f"{PREFIX}{path}.md"


def _shown(file: Path, path: str) -> str:
    if file.is_dir():
        names = sorted(p.name + "/" * p.is_dir() for p in file.iterdir() if not p.name.startswith(("_", ".")))
        return f"# {path}\n\nA folder of the repository.\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = file.read_text(encoding="utf-8")
    return f"# {path}\n\n````{_LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n"


def _links(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Links to files, outside of code blocks."""
    code = [(m.start(), m.end()) for m in _FENCE.finditer(text)]
    for match in _LINK.finditer(text):
        target = match[2]
        if re.match(r"\w+:", target) or any(a <= match.start() < b for a, b in code):
            continue
        yield match, target


def _resolved(target: str, origin: str) -> str | None:
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target.partition("#")[0]))
    return None if path.startswith("..") else path


def _placed(target: str, origin: str, page: str) -> str:
    path, anchor = _resolved(target, origin), "".join(target.partition("#")[1:])
    if path is None or not (ROOT / path).exists():
        return target  # mkdocs reports it
    place = path.removeprefix(DOCS) if path.startswith(DOCS) else page_of(path)
    return posixpath.relpath(place, posixpath.dirname(page)) + anchor
