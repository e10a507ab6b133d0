"""A stand-in for `rewriter.api`: what the command line asks of it, without doing it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import rewriter


def installed(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`stand_in`, which is `rewriter.api` until the test ends; errors are told in one line."""
    monkeypatch.setitem(sys.modules, "rewriter.api", stand_in)
    monkeypatch.setattr(rewriter, "api", stand_in, raising=False)
    monkeypatch.delenv("REWRITER_DEBUG", raising=False)
    return stand_in
