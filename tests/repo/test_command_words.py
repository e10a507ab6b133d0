"""Commands and options that pages and messages name exist; the commands that list what ships have the same words."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from repository import ROOT

from rewriter.cli import main
from rewriter.cli.app import commands, conversion

GROUP: Any = typer.main.get_command(commands)
CONVERSION: Any = typer.main.get_command(conversion)
PAGES = [
    *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "examples").rglob("*.md"),
    *(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),
]  # fmt: skip
OPTION = r"(?<![\w:-])(?<!var\()--[a-z][a-z0-9-]*(?![\w:-])"  # not a variable of CSS
SCRIPTS = [
    *ROOT.glob("benchmarks/*/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("tests/**/*.py"),
    ROOT / "rewriter/emulation/__main__.py",
]  # fmt: skip
# Of torchrun, docker, unshare, pip, vLLM and SGLang; and two of `rewrite adapt` of which a page says that they went.
OTHERS = {
    "--nproc-per-node", "--shm-size", "--net", "--no-deps", "--port", "--tensor-parallel-size", "--model",
    "--model-impl", "--enable-dbo", "--pp-size", "--enable-torch-compile", "--cuda-graph-backend-decode",
    "--disable-custom-all-reduce", "--anneal", "--refit", "--hf-overrides", "--json-model-override-args",
}.union(*(re.findall(r"\"(--[a-z][a-z0-9-]*)", file.read_text("utf-8")) for file in SCRIPTS))  # fmt: skip


def options_of(command: Any, within: bool = False) -> set[str]:
    """Its options; with those of the commands `within` it."""
    found = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
    inner = getattr(command, "commands", {}).values() if within else ()
    return found.union(*map(options_of, inner))


KNOWN = {"MODEL": CONVERSION, **GROUP.commands}
ALL = {"--version"}.union(*(options_of(command, within=True) for command in KNOWN.values()))


def faults_of_line(line: str) -> list[str]:
    """What a line that begins with `rewrite` names that does not exist."""
    words = re.split(r" -- | \| |>|&&|\s{2,}", line)[0].split()[1:]
    if not words or (words[0] not in KNOWN and "--recipe" not in words):
        return []
    command = KNOWN.get(words[0], CONVERSION)
    known, wrong = options_of(command), []
    if inner := getattr(command, "commands", {}):
        named = re.fullmatch(r"\[?([a-z|]+)\]?", words[1]) if len(words) > 1 else None
        for name in named[1].split("|") if named else ():
            wrong += [] if name in inner else [name]
            known |= options_of(inner[name]) if name in inner else set()
    return wrong + [option for option in re.findall(OPTION, " ".join(words)) if option not in known]


def lines(text: str) -> list[str]:
    return re.findall(r"(?<![\w/.-])rewrite [^`\n#;&]*", re.sub(r"\\\n\s*", " ", text))


def faults_of_sentences(text: str) -> Iterator[tuple[str, str]]:
    """Options that stand after a command in one sentence or row, and are another's."""
    for sentence in re.split(r"(?<=[.;:!?])\s|\n\n|\n(?=\|)|\n(?=- )", re.sub(r"(?sm)^ *```.*?^ *```$", "", text)):
        command = None
        for name, option in re.findall(r"`rewrite ([a-z]+)\b|`(--[a-z][a-z0-9-]*)", sentence):
            command = KNOWN.get(name, command) if name else command
            if option in ALL and command is not None and option not in options_of(command, within=True):
                yield option, sentence


def messages(file: Path) -> Iterator[str]:
    """The texts in a Python file, with X for what is put into them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_pages_name_commands_and_options_that_exist() -> None:
    seen, wrong = 0, []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        seen += len(lines(text))
        wrong += [(page.name, fault, line) for line in lines(text) for fault in faults_of_line(line)]
        wrong += [(page.name, *fault) for fault in faults_of_sentences(text)]
        wrong += [(page.name, option) for option in re.findall(rf"`{OPTION}", text) if option[1:] not in ALL | OTHERS]
    assert wrong == []
    assert seen > 150


def test_messages_name_commands_and_options_that_exist() -> None:
    wrong = []
    for file in (ROOT / "rewriter").rglob("*.py"):
        for text in messages(file):
            known = ALL | OTHERS if "<" not in text and "{" not in text else None  # no page
            wrong += [(file.name, fault, line) for line in lines(text) for fault in faults_of_line(line)]
            wrong += [(file.name, o) for o in re.findall(OPTION, text) if known is not None and o not in known]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("rewrite export DIR --onnx a --cached", "--cached"),
        ("rewrite recipes list", None),
        ("rewrite recipes [show|lint]", "lint"),
        ("rewrite models/a --recipe ladder --fabric x", "--fabric"),
        ("rewrite serve DIR -- --port 1", None),
    ],
)
def test_a_line_is_read(line: str, fault: str | None) -> None:
    assert faults_of_line(line) == ([] if fault is None else [fault])


def test_an_option_of_another_command_is_seen_in_a_sentence() -> None:
    text = "Runs `rewrite verify DIR` with `--state`. `--state` of a search, as `rewrite adapt` does."
    assert [option for option, _ in faults_of_sentences(text)] == ["--state"]


@pytest.mark.parametrize("group", ["recipes", "fabrics"])
def test_what_ships_is_listed_shown_and_checked_by_the_same_words(
    group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for words in ([group], [group, "list"], [group, "--json"], [group, "list", "--json"]):
        assert main(words) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[2] == printed[3]
    names = [entry["name"] for entry in json.loads(printed[2])]
    assert all(name in printed[0] for name in names)
    assert main([group, "show", names[0]]) == 0
    assert main([group, "--json", "show", names[0]]) == 2
    capsys.readouterr()
    mine = tmp_path / "mine.yaml"
    mine.write_text(next((ROOT / "rewriter").glob(f"*/library/{names[0]}.yaml")).read_text("utf-8"), encoding="utf-8")
    assert main([group, "validate", str(mine)]) == 0
    assert f"{mine}: a valid " in capsys.readouterr().out
    mine.write_text("name: mine\nsurprise: 1\n", encoding="utf-8")
    assert main([group, "validate", str(mine)]) == 2
    assert f"{mine}" in capsys.readouterr().err
