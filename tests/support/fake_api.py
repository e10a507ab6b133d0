"""A fake `rewriter.api`, which records what the command line asks of it and does nothing."""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import rewriter
from rewriter.cli import main


def installed(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`fake`, which is `rewriter.api` until the test ends; errors are one line."""
    monkeypatch.setitem(sys.modules, "rewriter.api", fake)
    monkeypatch.setattr(rewriter, "api", fake, raising=False)
    monkeypatch.delenv("REWRITER_DEBUG", raising=False)
    return fake


def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call with the fields of `SaveOptions`, `Workload` and their like by name; it tells of progress."""
    named = {} if (context := kwargs.get("context")) is None else {"trust_remote_code": context.trust_remote_code}
    if context is not None:
        context.progress("weights", 1, 2)
    for name, value in [*enumerate(args), *kwargs.items()]:
        if name != "context" and is_dataclass(value):
            named |= {field.name: getattr(value, field.name) for field in fields(value)}
        elif isinstance(name, str) and name != "context":
            named[name] = value
    return tuple(x for x in args if not is_dataclass(x)), named


def assert_refused(api: Any, capsys: pytest.CaptureFixture[str], words: str, parts: list[str]) -> None:
    """A command line ends in one message that has `parts`, with exit code 2, before the API is asked for anything."""
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    for part in parts:
        assert part in err
    assert api.calls == []
