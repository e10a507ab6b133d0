"""The commands and the Python of README and pages run as printed, at small sizes, and nothing is left out unseen."""

from __future__ import annotations

import re
from pathlib import Path

import page_blocks
import pytest
from page_commands import PageError, PageRun, not_run
from page_substitutes import MOST_NOT_RUN, NAMES, NOT_RUN, PREPARED
from repository import ROOT

RUN = ("bash", "python")
PAGES = {
    page_blocks.name_of(page): page
    for page in page_blocks.pages()
    if any(block.language in RUN for block in page_blocks.blocks(page))
}


@pytest.mark.fast(
    "docs/index.md", "docs/howto/add-a-pass.md", "docs/howto/develop.md",
    "docs/howto/serve.md", "docs/howto/train-on-ranks.md", "docs/reference/formats.md", "docs/tutorial/index.md",
    "docs/tutorial/serve.md",
)  # fmt: skip
@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_run(name: str, tmp_path: Path) -> None:
    run = PageRun(PAGES[name], tmp_path)
    run.all()
    if name == "docs/howto/run-on-ranks.md":  # the script writes what the command does
        run.line("rewrite generate out --prompt 'The sky is' --max-new-tokens 4")
        *scripts, command = run.said.values()
        new = command.strip().removeprefix("The sky is").strip()
        assert new
        assert [said for said in scripts if new not in said] == []


def printed() -> list[tuple[str, str]]:
    """Each command with its page, as `NOT_RUN` sees it, and each block of Python."""
    found = []
    for page in page_blocks.pages():
        for block in page_blocks.blocks(page):
            found.append((block.page, block.text))
            if block.language == "bash":
                found += [(block.page, " ".join(words)) for words in words_of(block)]
    return found


def words_of(block: page_blocks.Block) -> list[tuple[str, ...]]:
    return [c.words for line in page_blocks.lines(block.text) for c in page_blocks.commands(line)]


def test_commands_are_marked_as_such() -> None:
    """A fence without a language is no place for a command: it would not be run."""
    bare, seen = [], 0
    for page in page_blocks.pages():
        for block in page_blocks.blocks(page):
            first = (block.text.split() or [""])[0]
            bare += [(block.page, block.line)] if not block.language and first in page_blocks.PROGRAMS else []
            seen += len(words_of(block)) if block.language == "bash" else 0
    assert bare == [], "give the fence the language bash, or text for a synopsis"
    assert seen > 60


def test_commands_begin_with_known_programs() -> None:
    wrong = []
    for page in page_blocks.pages():
        for block in page_blocks.blocks(page):
            if block.language == "bash":
                wrong += [(block.page, w) for w in words_of(block) if w[0] not in page_blocks.PROGRAMS]
    assert wrong == [], "tests/support/page_commands.py has no stand-in"


def test_what_does_not_run_is_little_and_is_on_a_page() -> None:
    assert len(NOT_RUN) <= MOST_NOT_RUN
    pages = printed()
    for entry in NOT_RUN:
        assert any(not_run(page, text) is entry for page, text in pages), entry
        assert entry.reason
        if entry.test:
            assert Path(entry.page).name in (ROOT / entry.test).read_text("utf-8") or "pipx" in entry.pattern, entry


def test_the_tables_name_what_pages_have() -> None:
    for page, names in PREPARED.items():
        text = (
            (ROOT / page).read_text("utf-8") if page else "\n".join(p.read_text("utf-8") for p in page_blocks.pages())
        )
        assert [name for name in names if name not in text] == [], page
    for entry in NAMES:
        assert any(page == entry.page and entry.within in text for page, text in printed()), entry


def test_scripts_and_modules_that_pages_name_exist() -> None:
    """Those of the benchmarks too, which take hours."""
    missing, seen = [], 0
    for page in [*page_blocks.pages(), *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "tools").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        modules = [name.replace(".", "/") for name in re.findall(r"python -m ((?:benchmarks|rewriter)[\w.]*\w)", text)]
        files = re.findall(r"python ((?:examples|tools|benchmarks)/[\w/]+)\.py", text)
        seen += len(modules) + len(files)
        missing += [
            (page_blocks.name_of(page), name) for name in (*modules, *files)
            if not any((ROOT / f"{name}{end}").is_file() for end in (".py", "/__main__.py"))
        ]  # fmt: skip
    assert missing == []
    assert seen > 30


@pytest.mark.parametrize(
    ("fence", "said"),
    [
        ("bash\nrewrite recipes\nrewrite recipes show no-such-recipe\n", r"bad\.md:3: .*no-such-recipe"),
        ("bash\nmake no-such-target\n", r"bad\.md:3: .*no-such-target"),
        ("bash\npip install '.[no-such-extra]'\n", r"bad\.md:3: .*no-such-extra"),
        ("bash\npython examples/real_models.py no-such-model models/smollm2\n", r"bad\.md:3: .*no-such-model"),
        ("bash\nrewrite recipes | head\n", r"bad\.md:3: .*\| is not known here"),
        ("python\nno_such_name\n", r"bad\.md:3: .*no_such_name"),
    ],
)
def test_a_command_that_fails_is_named_with_its_page(fence: str, said: str, tmp_path: Path) -> None:
    page = tmp_path / "bad.md"
    page.write_text(f"# Bad\n\n```{fence}```\n", encoding="utf-8")
    (tmp_path / "run").mkdir()
    with pytest.raises(PageError, match=f"(?s){said}"):
        PageRun(page, tmp_path / "run").all()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("make venv && source .venv/bin/activate", [("make", "venv"), ("source", ".venv/bin/activate")]),
        ("rewrite generate DIR --prompt 'a & b'   # a note", [("rewrite", "generate", "DIR", "--prompt", "a & b")]),
    ],
)
def test_a_line_is_read_as_a_shell_does(line: str, found: list[tuple[str, ...]]) -> None:
    assert [command.words for command in page_blocks.commands(line)] == found


def test_files_and_variables_of_a_command_are_read() -> None:
    [command] = page_blocks.commands("REWRITER_DEBUG=1 rewrite recipes show ladder > mine.yaml")
    assert (command.words[0], command.words[-1], command.output) == ("rewrite", "ladder", "mine.yaml")
    assert command.variables == (("REWRITER_DEBUG", "1"),)
