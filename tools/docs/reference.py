"""Reference pages made from the code: the command line, the recipes, the fabrics, the manifest."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import typer
import yaml
from pydantic import BaseModel

from rewriter.cli import command_help
from rewriter.cli.app import SECTIONS, commands
from rewriter.fabric.schema import DEVICES, LIBRARY, fabrics, load_fabric
from rewriter.output import manifest
from rewriter.recipes import Recipe
from rewriter.recipes.catalogue import KINDS, entries, find


def pages() -> dict[str, str]:
    """The generated pages by place: an index of commands, recipes and fabrics each, and a page for each of them."""
    return {**command_line(), **recipes(), **fabric_pages(), "reference/manifest.md": manifest_schema()}


def command_line() -> dict[str, str]:
    """Every command with its examples, arguments and options, as `--help` has them."""
    group: Any = typer.main.get_command(commands)
    tables, made = [], {}
    for section, names in SECTIONS.items():
        rows = []
        for name in names:
            command = group.commands[name]
            first = _plain(command.help or command.short_help or "").partition("\n")[0]
            rows.append((f"[`rewrite {name}`](cli-{name}.md)", first.replace("|", "\\|")))
            made[f"reference/cli-{name}.md"] = _page(*_command(command, f"rewrite {name}", 1))
        tables += [f"## {section}", _table(("command", "purpose"), rows)]
    intro = "Made from the commands themselves. `rewrite COMMAND --help` says the same."
    bare = "`rewrite MODEL --recipe NAME` is `rewrite convert MODEL --recipe NAME`."
    return {"reference/cli.md": _page("# Command line", f"{intro} {bare}", *tables), **made}


def _command(command: Any, title: str, level: int) -> Iterator[str]:
    yield f"{'#' * level} {title}"
    yield _plain(command.help or command.short_help or "")
    yield f"```\n{title} {' '.join(command.collect_usage_pieces(None))}\n```"
    yield "```\n" + "\n".join(command.examples) + "\n```"
    if shown := [row for parameter in command.params if (row := command_help.row(parameter)) is not None]:
        yield _table(("argument or option", "meaning"), [(f"`{name}`", _cell(text)) for name, text in shown])
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(inner, f"{title} {name}", level + 1)


def recipes() -> dict[str, str]:
    """Every recipe that ships, whole."""
    rows: dict[str, list[tuple[str, str]]] = {title: [] for title in KINDS.values()}
    made = {}
    for entry in entries():
        recipe = Recipe.load(entry.name)
        paper = f"Paper: {recipe.paper}." if recipe.paper else ""
        text = find(entry.name).read_text(encoding="utf-8").rstrip()
        page = f"recipe-{entry.name}.md"
        mark = f" **Recommended for {entry.recommended}.**" if entry.recommended else ""
        rows[KINDS[entry.kind]].append((f"[`{entry.name}`]({page})", _cell(recipe.summary) + mark))
        about = _plain(f"{recipe.summary} {paper}") + mark
        made[f"reference/{page}"] = _page(f"# {entry.name}", about, f"```yaml\n{text}\n```")
    intro = (
        "Made from the files of the package. `rewrite recipes show NAME` prints one. "
        "[Recipes](recipes.md) compares them; [Rewrites](../concepts/rewrites.md) has the equations."
    )
    tables = (f"## {title}\n\n{_table(('recipe', 'what it does'), found)}" for title, found in rows.items())
    return {"reference/library.md": _page("# The recipes that ship", intro, *tables), **made}


def fabric_pages() -> dict[str, str]:
    """Every fabric that ships, and the fields of each."""
    rows, made = [], {}
    for name in fabrics():
        fabric = load_fabric(name)
        figures = "by formula" if fabric.modelled else "measured"
        rows.append((f"[`{name}`](fabric-{name}.md)", fabric.device.name, figures, _cell(fabric.summary)))
        text = (LIBRARY / f"{name}.yaml").read_text(encoding="utf-8").rstrip()
        device = yaml.safe_load(text)["device"]
        parts = [_plain(fabric.summary), f"```yaml\n{text}\n```"]
        if isinstance(device, str):  # named: a file of its own
            text = (DEVICES / f"{device}.yaml").read_text(encoding="utf-8").rstrip()
            parts += [f"## The device, `{device}`", f"```yaml\n{text}\n```"]
        made[f"reference/fabric-{name}.md"] = _page(f"# {name}", *parts)
    intro = (
        "A fabric says what a cluster's links cost. Made from the files of the package; every figure names its source. "
        "`rewrite fabrics show NAME` prints one. [Predict](../howto/predict.md) uses them."
    )
    table = _table(("fabric", "device", "figures", "what it is"), rows)
    return {"reference/fabrics.md": _page("# The fabrics that ship", intro, table), **made}


def manifest_schema() -> str:
    """The fields of rewrite.json, from the model that reads it."""
    parts = [
        "# The manifest, `rewrite.json`",
        "Every output has one. It says what was made, from what, by which passes, and what was compared. "
        "Made from the model that reads it; a file with an unknown field is refused.",
    ]
    for model in _models(manifest.Manifest):
        rows = []
        for name, field in model.model_fields.items():
            needed = "required" if field.is_required() else f"default `{field.get_default(call_default_factory=True)}`"
            rows.append((f"`{field.alias or name}`", f"`{_type(field.annotation)}`", needed))
        parts += [f"## {model.__name__}", _plain(inspect.getdoc(model) or "")]
        parts.append(_table(("field", "type", ""), rows))
    return _page(*parts)


def _models(start: type[BaseModel]) -> list[type[BaseModel]]:
    """A model and those that its fields are made of, in the order of use."""
    found: list[type[BaseModel]] = [start]
    for model in found:
        for field in model.model_fields.values():
            found += [m for m in _inside(field.annotation) if m not in found]
    return found


def _inside(hint: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(hint) and issubclass(hint, BaseModel):
        yield hint
    for part in typing.get_args(hint):
        yield from _inside(part)


def _type(hint: Any) -> str:
    name = hint.__name__ if inspect.isclass(hint) and not typing.get_args(hint) else str(hint)
    return re.sub(r"\b(?:rewriter|typing|collections\.abc)\.(?:\w+\.)*", "", name)


def _page(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(_escaped(text).split())


def _plain(text: str) -> str:
    """Help text as Markdown; what click keeps as it stands (after \\b) as code."""
    found = []
    for part in inspect.cleandoc(text).split("\n\n"):
        if part.startswith("\b"):
            found.append("```\n" + inspect.cleandoc(part.removeprefix("\b\n")) + "\n```")
        else:
            found.append(_escaped(part))
    return "\n\n".join(found)


def _escaped(text: str) -> str:
    """Outside of `code`: no HTML, no links, no emphasis by chance."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([<*|\[\]])", r"\\\1", parts[i])
    return "`".join(parts)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())
