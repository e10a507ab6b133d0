"""The built site: needs the extra `docs` (make docs)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
HOME = (ROOT / "docs/index.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site, with the address of a repository, as a place that has one does."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    address = {"REPO_URL": "https://github.com/example/rewriter"}
    settings = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"} | address
    done = subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_home_and_readme_agree() -> None:
    """One sentence, one table of uses, one plot."""

    def parts(text: str) -> list[str]:
        sentence = re.search(r"\n# rewriter\n\n(.*?\.)\s", text, re.DOTALL)
        table = re.search(r"^\| use it if .*?\n\n", text, re.DOTALL | re.MULTILINE)
        assert sentence
        assert table
        plot = re.search(r"^!\[.*gains\.svg", text, re.MULTILINE)
        assert plot
        return [sentence[1], table[0].replace("docs/", ""), plot[0].replace("docs/", "")]

    assert parts("\n" + README) == parts(HOME)
    status = (ROOT / "docs/includes/status.txt").read_text(encoding="utf-8")
    assert status in README
    assert HOME.count('--8<-- "status.txt"') == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra `docs` is not installed: make docs")
def test_the_site_has_what_readers_need(site: Path) -> None:
    pages = {str(path.relative_to(site)): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 150
    assert (site / "reference/cli-adapt.html").is_file()
    assert not (site / "includes").exists()
    assert pages["index.html"].count("Research preview.") == 1
    assert 'class="md-button md-button--primary"' in pages["index.html"]
    for name, text in pages.items():
        assert "8&lt;--" not in text, name
        # loaded without a click: scripts, styles, pictures, frames
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)\"", text)
        loaded += re.findall(r"<link\b[^>]*\brel=\"?stylesheet\"?[^>]*\bhref=\"([^\"]+)\"", text)
        assert [address for address in loaded if re.match(r"(?:https?:)?//", address)] == [], name
        assert 'data-md-component="source"' not in text, f"{name} asks the host of the repository for numbers"
    page = pages["howto/convert.html"]
    assert "md-footer__link--prev" in page
    assert "md-footer__link--next" in page
    assert 'rel="edit"' in page
    assert 'href="https://github.com/example/rewriter"' in page
    assert re.search(r'<td style="text-align: center;">✗</td>', pages["results/coverage.html"])
    assert "overrides/tables.js" in pages["results/coverage.html"]
    assert '<div class="output" data-search-exclude>' in pages["notebooks/ladder.html"]
    assert (site / "search/search_index.js").read_text(encoding="utf-8").startswith("var __index = {")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra `docs` is not installed: make docs")
def test_signatures_have_one_argument_a_line(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "reference/api.html").read_text(encoding="utf-8"))
    assert re.search(r"rewrite\(\n    program: Program,\n    recipe: ", text)
