"""Pages stay short and whole and in plain English, and drawings are those that the code makes."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import habits
import pytest
from repository import ROOT

from rewriter.cli.app import COMMANDS
from rewriter.recipes import Recipe

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_the_readme_and_the_pages_are_short() -> None:
    assert README.count("\n") <= 90
    assert len(PAGES) > 60
    lines = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8").count("\n") for page in PAGES}
    assert {name: count for name, count in lines.items() if count > 250} == {}


def test_links_of_the_pages_lead_to_files() -> None:
    """Of README and CONTRIBUTING too. Anchors and links to generated pages are checked where the site is built."""
    import reference

    made = {str(ROOT / "docs" / place) for place in reference.pages()}
    others = [page for folder in ("benchmarks", "examples", "tools") for page in (ROOT / folder).rglob("*.md")]
    sources = [
        *PAGES,
        *ROOT.glob("*.md"),
        *(page for page in others if page.name != "page.md"),
        ROOT / "tests/README.md",
    ]
    for page in sources:
        text = re.sub(r"^( *)```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        targets = [target for target in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", text) if ":" not in target]
        dead = [t for t in targets if not (path := (page.parent / t).resolve()).exists() and str(path) not in made]
        assert dead == [], page


def test_the_navigation_names_every_page() -> None:
    named = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "index.md") == sorted(
        name for name in named if (ROOT / "docs" / name).exists() and not name.endswith("index.md")
    )
    assert len(named) == len(set(named))


def test_the_site_is_built_strictly() -> None:
    """`--quiet` hides warnings from `--strict`, which then counts none."""
    [command] = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert command == "mkdocs build --strict"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra `docs` is not installed: make docs")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "site/reference/cli-adapt.html").is_file()


def test_the_lines_of_the_readme_are_links_to_files() -> None:
    targets = [t for t in re.findall(r"\]\(([^)#]+)[^)]*\)", README) if not t.startswith("http")]
    assert len(targets) > 15
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_the_status_is_written_once() -> None:
    """The README has it word for word, since nothing includes files there; pages include it."""
    status = (ROOT / "docs/includes/status.txt").read_text(encoding="utf-8").strip()
    assert status in README
    including = [page for page in PAGES if '--8<-- "status.txt"' in page.read_text(encoding="utf-8")]
    assert ROOT / "docs/index.md" in including
    sentence = re.split(r"(?<=[.:]) ", status.replace("\n> ", " "))[1]
    repeated = [page for page in PAGES if sentence in " ".join(page.read_text(encoding="utf-8").split())]
    assert repeated == []


def test_pages_say_that_the_small_models_are_dequantized() -> None:
    named = [
        page
        for page in [ROOT / "README.md", *PAGES]
        if re.search(r"SmolLM2-135M-Instruct|Gemma 3 270M", page.read_text("utf-8"))
    ]
    assert len(named) > 8
    assert [page.name for page in named if "GGUF" not in page.read_text("utf-8")] == []


def rate(pages: list[Path], phrases: list[str]) -> float:
    """Habits in 1,000 words."""
    return 1000 * sum(len(list(habits.found(p, phrases))) for p in pages) / sum(map(habits.words, pages))


def test_readme_and_pages_are_plain_english() -> None:
    assert len(habits.pages()) > 60
    assert habits.main([]) == 0, "python tools/docs/habits.py"


def test_every_phrase_that_is_allowed_is_used() -> None:
    lines = [line for page in habits.pages() for line in habits.prose(page.read_text(encoding="utf-8"))]
    text = re.sub(r"[\[\]]", "", "\n".join(lines))
    assert [phrase for phrase in habits.allowed() if phrase not in text] == []


def test_a_page_with_the_habits_is_seen(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.md", tmp_path / "good.md"
    bad.write_text(
        "What it costs is measured on those which wait. They are as many as before, beside others of their own.\n\n"
        "It is quantized, where it is long. Of them, one is as fast as a copy. Weights it reads are kept.\n"
    )
    good.write_text(
        "The command prints the cost. How much is it? Ranks wait for the sum.\n\n```\nas fast as it is\n```\n"
    )
    assert {found.habit for found in habits.found(bad, [])} == set(habits.HABITS)
    assert rate([bad], []) > habits.LIMIT
    assert list(habits.found(good, [])) == []
    assert rate([bad], ["as fast as"]) < rate([bad], [])
    assert habits.main([str(bad)]) == 1
    assert habits.main([str(good)]) == 0
    good.write_text(
        "```x``` is code. Of course it is as long as before. If it has a loss, heal it.\n" + "Beside it. " * 9
    )
    assert [found.habit for found in habits.found(good, [])] == ["beside for compared with"] * 9
    good.write_text("```\nno end\n")
    with pytest.raises(ValueError, match="not closed"):
        habits.words(good)


def test_the_recipes_of_the_pages_are_valid() -> None:
    blocks = [b for p in PAGES for b in re.findall(r"^```yaml\n(.*?)^```", p.read_text(encoding="utf-8"), re.S | re.M)]
    written = [block for block in blocks if "passes:" in block]
    assert len(written) >= 2
    for block in written:
        Recipe.parse(block).build()


@pytest.mark.slow
def test_the_picture_shows_what_is_predicted_today() -> None:
    from benchmarks.decode import figure as decode_figure

    drawn = re.findall(r"([\d.]+) ms a step", decode_figure.FIGURE.read_text(encoding="utf-8"))
    predicted = [row.phase.seconds * 1e3 for row in decode_figure.rows()]
    assert [float(d) for d in drawn] == pytest.approx(predicted, rel=0.05), "python -m benchmarks.decode.figure"


def test_no_picture_loads_anything_or_names_a_place() -> None:
    figures = sorted((ROOT / "docs/figures").glob("*.svg"))
    assert len(figures) > 7
    for figure in figures:
        text = figure.read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[\w./-]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}, figure
        assert not re.search(r"/(home|root|tmp|work|Users)/", text), figure


def test_the_drawings_are_those_of_the_programs() -> None:
    import drawings

    made = drawings.drawings()
    kept = {name: (drawings.FIGURES / name).read_text(encoding="utf-8") for name in made}
    assert made == kept, "python tools/docs/drawings.py"


def test_links_out_of_the_documentation_become_pages() -> None:
    import links

    text = "[a](../../benchmarks/README.md#x) [b](../results/gpu.md) [c](https://x.y) `code`\n\n"
    text += "```\n[d](../../Makefile)\n```\n"
    assert list(links.outside(text, "docs/howto/new.md")) == ["benchmarks/README.md"]
    placed = links.rewritten(text, "docs/howto/new.md", "howto/new.md")
    assert "[a](../files/benchmarks/README.md#x) [b](../results/gpu.md)" in placed
    assert "[d](../../Makefile)" in placed
    assert "files/benchmarks/README.md" in links.pages({"docs/howto/new.md": text})


def test_the_generated_reference_has_every_command_recipe_and_field() -> None:
    import reference

    from rewriter.fabric import fabrics
    from rewriter.output.manifest import Manifest
    from rewriter.recipes.catalogue import library

    pages = reference.pages()
    assert all(pages[f"reference/cli-{name}.md"].startswith(f"# rewrite {name}\n") for name in COMMANDS)
    assert "`--trust-remote-code`" in pages["reference/cli-convert.md"]
    assert all(f"```yaml\nname: {name}\n" in pages[f"reference/recipe-{name}.md"] for name in library())
    assert all(f"```yaml\nname: {name}\n" in pages[f"reference/fabric-{name}.md"] for name in fabrics())
    for index, kind, names in (
        ("cli", "cli", COMMANDS),
        ("library", "recipe", library()),
        ("fabrics", "fabric", fabrics()),
    ):
        assert all(f"({kind}-{name}.md)" in pages[f"reference/{index}.md"] for name in names)
    assert {place: text.count("\n") for place, text in pages.items() if text.count("\n") > 250} == {}
    fields = [field.alias or name for name, field in Manifest.model_fields.items()]
    assert all(f"| `{name}` |" in pages["reference/manifest.md"] for name in fields)


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_no_tests(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "rewriter", source / "rewriter", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "tests").mkdir()
    (source / "tests/test_seeded.py").write_text("")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path / "dist"), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "rewriter/recipes/library/ladder.yaml" in names
    assert "rewriter/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"rewriter", "rewriter-0.1.0.dist-info"}
    # What `pipx run --spec WHEEL rewrite` looks for: a command of this name in the wheel.
    [points] = [name for name in names if name.endswith("entry_points.txt")]
    assert "[console_scripts]\nrewrite = rewriter.cli:main\n" in zipfile.ZipFile(wheel).read(points).decode()


@pytest.mark.slow
def test_the_wheel_runs_by_pipx(tmp_path: Path) -> None:
    """Builds it as `make package` does, and installs pipx: without a package index this fails."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "tools")], check=True)
    python = tmp_path / "tools/bin/python"
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True, timeout=1800)
    run([str(python), "-m", "pip", "install", "--quiet", "build", "pipx"])
    run([str(python), "-m", "build", "--outdir", str(tmp_path / "dist"), str(ROOT)])
    [wheel] = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith("tests") or "/tests/" in name]
    pipx = [str(python), "-m", "pipx", "run", "--no-cache", "--spec", str(wheel)]
    home = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PIPX_HOME": str(tmp_path)}
    said = run([*pipx, "rewrite", "--help"], cwd=tmp_path, env={**home, "COLUMNS": "100"}).stdout
    assert all(re.search(rf"\b{name}\b", said) for name in COMMANDS)
