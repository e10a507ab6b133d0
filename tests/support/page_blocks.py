"""Fenced blocks of README and pages, and the command lines in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

FENCE = re.compile(r'^( *)```(\w*)(?: title="([\w.]+)")?[^\n]*\n(.*?)^ *```$', re.DOTALL | re.MULTILINE)
PROGRAMS = (
    "cd", "curl", "lm_eval", "make", "pip", "pipx", "python", "rewrite", "source", "torchrun", "vllm",
)  # fmt: skip
"""First words of the commands that pages have."""
ASSIGNMENT = re.compile(r"[A-Z_]+=")
OPERATORS = ("&&", ">")


@dataclass(frozen=True)
class Block:
    """One fence. `line` is that of the fence, from 1; `title` the name of the file that the block is, or empty."""

    page: str
    line: int
    language: str
    title: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command of a line, which is `text`: its words, the variables that are set for it and the file that its
    output goes to (None: none)."""

    text: str
    words: tuple[str, ...]
    output: str | None = None
    variables: tuple[tuple[str, str], ...] = ()


def pages() -> list[Path]:
    """README, CONTRIBUTING, the documentation and the pages of the examples."""
    folders = [page for folder in ("docs", "examples") for page in sorted((ROOT / folder).rglob("*.md"))]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *folders]


def name_of(page: Path) -> str:
    """The page's path from the root of the repository; its name, if it is elsewhere."""
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


def blocks(page: Path) -> list[Block]:
    """The fences of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            name_of(page), text.count("\n", 0, found.start()) + 1, found[2], found[3] or "",
            re.sub(rf"^{found[1]}", "", found[4], flags=re.MULTILINE),
        )
        for found in FENCE.finditer(text)
    ]  # fmt: skip


def lines(text: str) -> list[str]:
    """The command lines of a block: continued ones joined, comments and empty ones left out."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def commands(line: str) -> list[Command]:
    """The commands of a line: `A && B`, `A > FILE`, `NAME=VALUE A`. Raises ValueError for other syntax of a shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    found: list[Command] = []
    words: list[str] = []
    tokens = [*lexer, "&&"]
    output = None
    for token in tokens:
        if output == "":
            output = token
        elif token == ">":
            output = ""
        elif token == "&&":
            if words:
                count = next((i for i, word in enumerate(words) if not ASSIGNMENT.match(word)), len(words))
                variables = tuple(tuple(word.split("=", 1)) for word in words[:count])
                found.append(Command(line, tuple(words[count:]), output, variables))
            words, output = [], None
        elif token and set(token) <= set("&|;<>"):
            raise ValueError(f"{line}: {token} is not known here. Known: {', '.join(OPERATORS)}")
        else:
            words.append(token)
    return found
