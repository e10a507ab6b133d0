"""The help: groups of commands, examples that are taken, defaults and metavars of one style, the terminal's width."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
from fake_api import installed
from repository import ROOT

from rewriter.cli import command_help, main, serve_command
from rewriter.cli.app import COMMANDS, SECTIONS, commands, conversion
from rewriter.fabric import fabrics
from rewriter.predict.engines import engines
from rewriter.recipes.catalogue import KINDS, entries, library

TOP: Any = typer.main.get_command(commands)
BARE: Any = typer.main.get_command(conversion)


def known() -> dict[str, Any]:
    """Every command and command of a group by its words; "" is `rewrite` itself."""
    found = {"": TOP} | dict(TOP.commands)
    for name, command in TOP.commands.items():
        found |= {f"{name} {inner}": one for inner, one in getattr(command, "commands", {}).items()}
    return found


KNOWN = known()


def fault(example: str) -> str | None:
    """The reason for which an example is refused before anything is read; None for a good one."""
    found = [refused(part) for part in re.split(r" && ", re.sub(r" > .*", "", example))]
    return next((reason for reason in found if reason), None)


def refused(line: str) -> str | None:
    program, *words = shlex.split(line)
    command, group = (TOP.commands[words.pop(0)], True) if words[0] in TOP.commands else (BARE, False)
    if group and words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    try:
        context = command.make_context(program, words)
    except typer.TyperException as error:
        return error.format_message()
    given = context.params
    recipes, fabric = given.get("recipe") or [], given.get("fabric") or "h100-nvlink"
    for name in [recipes] if isinstance(recipes, str) else recipes:
        if name not in library() and not name.endswith(".yaml"):
            return f"no recipe {name}"
    return None if fabric in fabrics() or fabric.endswith(".yaml") else f"no fabric {fabric}"


def help_of(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words.split(), "--help"]) == 0
    return capsys.readouterr().out


def parameters() -> Iterator[tuple[str, Any]]:
    for words, command in KNOWN.items():
        yield from ((words, parameter) for parameter in command.params)


# Groups


def test_every_command_is_in_exactly_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert Counter(name for names in SECTIONS.values() for name in names) == Counter([*TOP.commands])
    text = help_of("", capsys)
    sections = {block.split(":\n")[0]: block for block in text.split("\n\n")}
    for title, names in SECTIONS.items():
        assert re.findall(r"^  ([a-z]+) ", sections[title], re.MULTILINE) == list(names)
    assert set(COMMANDS) == set(TOP.commands)


def test_the_descriptions_of_all_groups_begin_in_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in help_of("", capsys).splitlines() if line[:2] == "  " and line.split()[0] in COMMANDS]
    assert len(lines) == len(COMMANDS)
    assert len({re.match(r"  \S+ +", line).end() for line in lines}) == 1  # type: ignore[union-attr]


# Examples


@pytest.mark.parametrize("words", KNOWN)
def test_a_command_has_three_examples_that_it_takes(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = KNOWN[words].examples
    assert len(set(examples)) == 3
    assert [fault(one) for one in examples] == [None] * 3
    assert max(map(len, examples)) <= 76, "at 80 columns each is one line"
    start = f"rewrite {words}".strip()
    if words not in ("", "convert"):
        assert all(one.startswith(start) for one in examples)
    shown = help_of(words, capsys)
    assert "\nExamples:\n" + "".join(f"  {one}\n" for one in examples) in shown


@pytest.mark.parametrize(
    ("example", "part"),
    [
        ("rewrite adapt ladder --out healed --epochs 2", "--epochs"),
        ("rewrite adapt ladder", "Missing option '--out'"),
        ("rewrite m --recipe lader", "no recipe lader"),
        ("rewrite predict m --recipe ladder --fabric h100", "no fabric h100"),
        ("rewrite reshard ladder --tp four", "--tp"),
        ("rewrite fabrics validate && rewrite fabrics", "FILE"),
    ],
)
def test_an_example_that_is_wrong_is_seen(example: str, part: str) -> None:
    assert part in (fault(example) or "")


# Usage, metavars and defaults


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("adapt", "rewrite adapt DIR --out DIR2 [OPTIONS]"),
        ("org/model", "rewrite MODEL --recipe NAME|FILE [OPTIONS]"),
        ("convert", "rewrite convert MODEL --recipe NAME|FILE [OPTIONS]"),
        ("predict", "rewrite predict MODEL --recipe NAME|FILE [OPTIONS]"),
        ("serve", "rewrite serve DIR [OPTIONS] [-- ARGS...]"),
        ("diff", "rewrite diff A [B] [OPTIONS]"),
        ("coverage", "rewrite coverage [TYPE...] [OPTIONS]"),
        ("export", "rewrite export DIR --onnx FILE [OPTIONS]"),
        ("recipes", "rewrite recipes [COMMAND] [OPTIONS]"),
        ("fabrics import", "rewrite fabrics import LOG... --out FILE [OPTIONS]"),
    ],
)
def test_the_usage_line_has_arguments_and_required_options(
    words: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert help_of(words, capsys).splitlines()[0] == f"Usage: {usage}"


def test_metavars_are_of_one_style() -> None:
    wrong = []
    for words, parameter in parameters():
        value = "" if getattr(parameter, "is_flag", False) else command_help.metavar(parameter)
        if not re.fullmatch(r"|(-- )?[A-Z0-9]+[A-Z0-9|:,.=…\[\]]*|\[[\w+-]+(\|[\w+-]+)*\]", value):
            wrong.append((words, value))
    assert wrong == []


def test_an_option_has_the_same_metavar_in_all_commands() -> None:
    found: dict[str, set[str]] = {}
    for _, parameter in parameters():
        if parameter.param_type_name == "option" and not parameter.is_flag:
            found.setdefault(parameter.opts[0], set()).add(command_help.metavar(parameter))
    several = {name: metavars for name, metavars in found.items() if len(metavars) > 1}
    assert set(several) == ALLOWED


# Options of different meanings in different commands.
ALLOWED = {"--out", "--prompt", "--set", "--tp", "--engine", "--weights", "--verify"}


def test_defaults_are_in_brackets_and_not_in_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    for words in KNOWN:
        text = " ".join(help_of(words, capsys).split())
        assert not re.search(r"Without (it|any)\b|\[default: \(|x>=", text), words
    assert "[default: as few as hold the ranks]" in " ".join(help_of("predict", capsys).split())
    assert "[default: as converted]" in " ".join(help_of("generate", capsys).split())


def test_the_engines_in_the_help_are_those_that_are_known() -> None:
    [engine] = [p for p in TOP.commands["predict"].params if p.name == "engine"]
    assert engine.metavar == f"[{'|'.join(engines())}]"


# Width


@pytest.mark.parametrize(
    ("columns", "least", "most"), [("60", 50, 60), ("80", 70, 80), ("120", 100, 120), ("300", 100, 120)]
)
def test_help_is_as_wide_as_the_terminal(
    columns: str, least: int, most: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    options = help_of("adapt", capsys).partition("Options:")[2].splitlines()
    assert least < max(map(len, options)) <= most


# `convert`


class Api(ModuleType):
    """`rewriter.api` that records conversions."""

    def __init__(self) -> None:
        super().__init__("rewriter.api")
        self.calls: list[Any] = []

    def convert(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, {name: value for name, value in kwargs.items() if name != "context"}))
        return SimpleNamespace(to_json=lambda: "{}")


@pytest.mark.parametrize("model", ["org/model", "./convert"])
def test_convert_is_the_bare_form(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    api = installed(Api(), monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "convert").mkdir()
    options = ["--recipe", "ladder", "--tp", "2", "--set", "ladder.layers=last:2", "--json"]
    assert main([model, *options]) == 0
    assert main(["convert", model, *options]) == 0
    assert api.calls[0] == api.calls[1]
    assert api.calls[0][0] == (model, "ladder")


def test_convert_without_a_model_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--recipe", "ladder"]) == 2
    assert capsys.readouterr().err.startswith("error: Missing argument 'MODEL'. `rewrite convert --help`")
    assert main(["covnert", "--recipe", "ladder"]) == 2
    assert "Did you mean `rewrite convert`?" in capsys.readouterr().err


# The recipes


def test_recipes_are_listed_by_kind_and_the_recommended_ones_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    blocks = text.split("\n\n")
    assert [block.splitlines()[0] for block in blocks[: len(KINDS)]] == list(KINDS.values())
    for title, block in zip(KINDS, blocks, strict=False):
        rows = [line for line in block.splitlines()[1:] if line[:3] != "   "]
        of_kind = [entry for entry in entries() if entry.kind == title]
        assert [re.split(r" {2,}", row.strip()) for row in rows] == [[one.name, one.short] for one in of_kind]
        marked = [entry.recommended for entry in of_kind if entry.recommended]
        assert re.findall(r"recommended for (.*?) *$", block, re.MULTILINE) == marked
        assert len(marked) <= 1
    assert "→" not in text, "passes are for --verbose"
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("\n") <= len(entries()) + 3 * len(KINDS) + 6


def test_verbose_adds_whole_summaries_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["recipes", "--verbose"], ["recipes", "list", "--verbose"]):
        assert main(words) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert all(f"{' '.join(entry.summary.split())} " in text for entry in entries())
        assert all(" → ".join(entry.passes) in text for entry in entries())


# JSON


def test_every_command_takes_json() -> None:
    lacking = [
        words for words, one in KNOWN.items() if words and "--json" not in {o for p in one.params for o in p.opts}
    ]
    assert lacking == []


@pytest.mark.parametrize("file", ["recipes/library/ladder.yaml", "fabric/library/pcie-gen5.yaml"])
def test_a_file_is_validated_as_json(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "rewriter" / file)
    assert main(["recipes" if "recipes" in file else "fabrics", "validate", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["file"], found["valid"]) == (path, True)


def test_the_command_of_an_engine_is_printed_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = serve_command.ServeCommand(("vllm", "serve", "out"), ("On one rank nothing overlaps.",))
    monkeypatch.setattr(serve_command, "serve_command", lambda *_, **__: found)
    assert main(["serve", "out", "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {"command": ["vllm", "serve", "out"], "notes": ["On one rank nothing overlaps."]}


def test_a_recipe_is_shown_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "ladder-upper-half", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["kind"] == "overlapped"
    assert shown["recommended"]
    assert {"pass": "ladder", "layers": "upper-half"} in shown["passes"]
