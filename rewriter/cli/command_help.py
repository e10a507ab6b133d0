"""The help of commands: usage with required options, three examples, defaults in words, commands in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

WIDEST = 120
"""Columns of the widest help. It is as wide as the terminal, at most this; 80 or COLUMNS in a pipe."""


class Command(TyperCommand):
    """A command whose help shows `examples` below its text."""

    examples: Sequence[str] = ()

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`DIR --out DIR2 [OPTIONS]`: arguments, required options, the other options."""
        return usage(self)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Writes the text of the help and the examples."""
        super().format_help_text(ctx, formatter)
        _write_examples(self.examples, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the tables of arguments and options."""
        _write_parameters(self.get_params(ctx), formatter)


class Group(TyperGroup):
    """Commands under the headings of `sections`, or all under one heading without sections."""

    examples: Sequence[str] = ()
    sections: Mapping[str, Sequence[str]] = {}

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`[COMMAND] [OPTIONS]`, or what `subcommand_metavar` says."""
        return [self.subcommand_metavar]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Writes the text of the help and the examples."""
        super().format_help_text(ctx, formatter)
        _write_examples(self.examples, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands, section by section, and the options."""
        widest = max(map(len, self.commands))
        for title, names in (self.sections or {"Commands": tuple(self.commands)}).items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{widest}}", self.commands[name].get_short_help_str(80)) for name in names])
        _write_parameters(self.get_params(ctx), formatter)


def command_with(*examples: str) -> type[Command]:
    """The class of a command with these examples."""
    return type("Command", (Command,), {"examples": examples})


def group_with(*examples: str, sections: Mapping[str, Sequence[str]] | None = None) -> type[Group]:
    """The class of a group with these examples; `sections` names its commands by heading."""
    return type("Group", (Group,), {"examples": examples, "sections": sections or {}})


def usage(command: Any) -> list[str]:
    """The words of a usage line after the command's name."""
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    required = [p for p in command.params if p.param_type_name == "option" and p.required]
    first = [_argument(one) for one in arguments if not one.display_name_raw.startswith("--")]
    last = [_argument(one) for one in arguments if one.display_name_raw.startswith("--")]
    return [*first, *(f"{option.opts[0]} {metavar(option)}" for option in required), "[OPTIONS]", *last]


def row(parameter: Any) -> tuple[str, str] | None:
    """The name with its metavar, and the help with default, range and "required"; None for a hidden parameter."""
    if parameter.hidden:
        return None
    names = metavar(parameter)
    if parameter.param_type_name == "option":
        value = "" if parameter.is_flag else f" {names}"
        short_first = sorted(parameter.opts, key=lambda flag: (flag.startswith("--"), flag))
        flags = (", ".join(short_first), ", ".join(parameter.secondary_opts))
        names = " / ".join(flag for flag in flags if flag) + value
    notes = [f"default: {default}" if (default := _default(parameter)) else "", _range(parameter)]
    notes += ["required"] if parameter.required else []
    said = "; ".join(note for note in notes if note)
    return names, f"{parameter.help or ''}  [{said}]".lstrip() if said else parameter.help or ""


def metavar(parameter: Any) -> str:
    """The placeholder of the value: the metavar that was given, or `[a|b]` for choices."""
    kind = parameter.type_descriptor
    if parameter.metavar is None and kind.is_choice:
        return f"[{'|'.join(str(choice) for choice in kind.choices)}]"
    several = parameter.param_type_name == "argument" and parameter.nargs != 1
    return f"{parameter.display_name_raw}{'...' * several}"


def _argument(argument: Any) -> str:
    return metavar(argument) if argument.required else f"[{metavar(argument)}]"


def _default(parameter: Any) -> str:
    """The default in words; "" if it need not be said."""
    shown, value = parameter.show_default, parameter.default
    if isinstance(shown, str):
        return shown
    if not shown or value is None or parameter.required:
        return ""
    if parameter.param_type_name == "option" and parameter.is_flag:
        said = parameter.opts if value else parameter.secondary_opts
        return said[0] if parameter.secondary_opts else ""
    return str(value)


def _range(parameter: Any) -> str:
    """Limits of a number, but for those that each count has: 0 or 1 and more."""
    low, high = parameter.min, parameter.max
    if low is not None and high is not None:
        return f"{low} to {high}"
    return f"{low} or more" if low is not None and low > 1 else ""


def _write_examples(examples: Sequence[str], formatter: Any) -> None:
    if examples:
        with formatter.section("Examples"):
            formatter.write("".join(f"{'':{formatter.current_indent}}{line}\n" for line in examples))


def _write_parameters(parameters: Sequence[Any], formatter: Any) -> None:
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        rows = [shown for one in parameters if one.param_type_name == kind and (shown := row(one)) is not None]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
