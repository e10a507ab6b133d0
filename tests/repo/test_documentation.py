"""The README's commands run, its picture and the drawings are what the code makes, and pages stay short and whole."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from repository import ROOT, TINY_LLAMA
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rewriter.cli.app import COMMANDS
from rewriter.recipes import Recipe

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def quickstart() -> list[list[str]]:
    """The `rewrite` lines of the README's first block."""
    [block] = re.findall(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [line[0] for line in lines[:2]] == ["make", "python"]
    assert all(line[0] == "rewrite" for line in lines[2:])
    return [line[1:] for line in lines[2:]]


def small_model(directory: Path) -> None:
    """In place of the one that the README downloads: as many heads and layers that differ, random weights, bytes as
    tokens and a chat template."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=72, intermediate_size=144, num_hidden_layers=4, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=512, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    tokenizer.save_pretrained(directory)


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    small_model(tmp_path / "models/smollm2")
    said = {}
    for words in quickstart():
        command = [sys.executable, "-m", "rewriter.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        said[words[0]] = done.stdout
    assert "ladder" in said["diff"]
    assert all(recipe in said["predict"] for recipe in ("tensor-parallel", "ladder-upper-half"))
    assert said["generate"].strip()
    assert (tmp_path / "ladder/runtime/tp3/module.py").is_file()


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(TINY_LLAMA, tmp_path / "path/to/model")
    monkeypatch.chdir(tmp_path)
    names = {"input_ids": torch.arange(32)[None]}
    [block] = python_blocks(README)
    exec(block, names)
    with torch.no_grad():
        again = names["model"].eval()(names["input_ids"]).logits
    assert torch.allclose(again.float(), names["logits"].float(), atol=0.1)


@pytest.mark.slow
def test_the_script_for_torchrun_writes_what_the_command_does(tmp_path: Path) -> None:
    """The page's, on two ranks in place of eight."""
    model, rewrite = str(TINY_LLAMA), [sys.executable, "-m", "rewriter.cli"]
    [script] = python_blocks((ROOT / "docs/howto/run-on-ranks.md").read_text(encoding="utf-8"))
    (tmp_path / "run.py").write_text(script, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "run.py"]
    said = [
        subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True).stdout
        for words in (
            [*rewrite, model, "--recipe", "ladder-upper-half", "--tp", "2", "--dtype", "bf16", "--out", "out"],
            [*rewrite, "generate", "out", "--prompt", "The sky is", "--max-new-tokens", "20"],
            torchrun,
        )
    ]
    assert said[1].strip() == f"The sky is{said[2]}".strip()


def test_the_readme_names_every_command() -> None:
    listed = set(re.findall(r"\brewrite ([a-z]+)\b", README))
    assert set(COMMANDS) <= listed


def test_the_readme_and_the_pages_are_short() -> None:
    assert README.count("\n") <= 150
    assert len(PAGES) > 60
    lines = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8").count("\n") for page in PAGES}
    assert {name: count for name, count in lines.items() if count > 250} == {}


def test_links_of_the_pages_lead_to_files() -> None:
    """Of README and CONTRIBUTING too. Anchors and links to generated pages are checked where the site is built."""
    import reference

    made = {str(ROOT / "docs" / place) for place in reference.pages()}
    sources = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
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


@pytest.mark.slow
def test_the_terminal_shows_what_the_commands_print() -> None:
    import terminal

    kept = terminal.FIGURE.read_text(encoding="utf-8")
    assert all(line.split(" --")[0].replace(" ", "&#160;") in kept for line in terminal.COMMANDS)
    words, numbers = without_decimals(terminal.picture(terminal.session()))
    kept_words, kept_numbers = without_decimals(kept)
    assert words == kept_words, "python tools/docs/terminal.py"
    # Rounding errors of another processor are others, and no more than small.
    assert numbers == pytest.approx(kept_numbers, rel=0.02, abs=1e-5), "python tools/docs/terminal.py"


def without_decimals(picture: str) -> tuple[str, list[float]]:
    """The words of a picture, and the numbers among them that are 0 or have a fraction or an exponent."""
    text = " ".join(re.findall(r"<text\b[^>]*>([^<]*)</text>", picture)).replace("&#160;", " ")
    number = r"\b\d+\.\d+(?:e-\d+)?\b|\b\d+e-\d+\b|(?<= )0(?= )"  # an error may be 0
    return re.sub(rf"({number})\s*", "# ", text), [float(found) for found in re.findall(number, text)]


def test_words_and_numbers_of_a_picture_are_told_apart() -> None:
    words, numbers = without_decimals(
        '<text x="1">drift&#160;0.142</text><text x="2">5e-07</text><text>12&#160;files</text>'
    )
    assert (words.split(), numbers) == (["drift", "#", "#", "12", "files"], [0.142, 5e-07])


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
