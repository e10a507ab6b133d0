"""Habits of translated English in the README and the documentation, counted: python tools/docs/habits.py [PAGE ...]

At most 2 per 1,000 words may be left. A phrase that is right as it stands is listed in habits.txt.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = Path(__file__).with_suffix(".txt")
LIMIT = 2.0  # per 1,000 words, over all pages
OF_A_PAGE = 4  # habits that a page may have beyond the limit
FENCE = re.compile(r"\s*(?:```|~~~)[^`]*$")

_START = r"(?:^|(?<=[.;:!?|] )|(?<=[.!?]\*\* )|(?<=\*\*))"  # of a sentence, a cell or a bold lead
_VERB = r"(?:is|are|was|were|has|have|had|does|do|did|can|may|must|needs?|takes?|gives?|holds?|reads?|writes?|says?)"
_SUBJECT = (
    r"(?:it|they|that|this|these|those|there|one|none|nothing|nobody|an?|no|its|their|every|each|some|all|both"
    r"|possible|needed|asked|known|given)"
)
_CONJUNCTION = r"(?:If|When|Since|As|Once|While|Because|Until|Before|After|So|Then|Unless|But|And|Here|Now|Whether|Or)"
HABITS = {
    "what as a noun": (
        rf"{_START}[Ww]hat\b(?! follows\b)(?![^.|!;:]*\?)|\b(?:of|from|for|with|by|than|and|over) what\b"
    ),
    "that which": r"\b(?:that|those) which\b",
    "where for if": rf"(?:(?<=[,;:(.] )|^)(?:(?:except |but |save )?where|Where)\b(?= {_SUBJECT}\b)",
    "beside for compared with": r"\b[Bb]esides?\b",
    "of its own": r"\bof (?:its|their|his|her|your|our|one's) own\b",
    "so many": r"\b(?:so|that|as) (?:many|much|few)\b(?! that\b)",
    "as X as": r"\bas (?!well\b|soon\b|far\b|long\b)[\w-]+ as\b",
    "object first": (
        rf"{_START}(?:Of(?! course\b)|Nor|Neither|On it|To it|With it|In it|From it)\b|\b(?:is|are) told of\b"
        rf"|{_START}(?!{_CONJUNCTION}\b)(?:(?:The|A|An|Its|Their) )?[A-Z]?[a-z]+ (?:it|they|we|nobody) {_VERB}\b"
    ),
}


@dataclass(frozen=True)
class Found:
    """One habit: its name, the page, the line from 1, and the words around it."""

    habit: str
    page: Path
    line: int
    words: str


def prose(text: str) -> list[str]:
    """The lines of a page, empty if they are code, without the targets of links."""
    kept, fenced = [], False
    for line in text.splitlines():
        fence = FENCE.match(line) is not None
        fenced ^= fence
        line = "" if fenced or fence else re.sub(r"`[^`]*`", "`code`", line)
        kept.append(re.sub(r"\]\([^)]*\)", "]", line))
    if fenced:
        raise ValueError("a fence of code is not closed")
    return kept


def allowed() -> list[str]:
    lines = ALLOWED.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def found(page: Path, phrases: list[str]) -> Iterator[Found]:
    """The habits on a page, but for those inside an allowed phrase."""
    lines = prose(page.read_text(encoding="utf-8"))
    for number, line in enumerate(lines, 1):
        line = re.sub(r"^\s*(?:[-*>]|\d+\.|#+|\|)\s+", "", line).replace("[", "").replace("]", "")
        joined = number > 1 and lines[number - 2].strip() and line[:1].islower()  # goes on from the line before
        for phrase in phrases:
            line = re.sub(re.escape(phrase), lambda m: "-" * len(m[0]), line)
        for habit, pattern in HABITS.items():
            for match in re.finditer(pattern, f"… {line}" if joined else line):
                around = (f"… {line}" if joined else line)[max(0, match.start() - 20) : match.end() + 40]
                yield Found(habit, page, number, around)


def words(page: Path) -> int:
    return len(re.findall(r"[A-Za-z][\w'-]*", "\n".join(prose(page.read_text(encoding="utf-8")))))


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(names: list[str]) -> int:
    chosen, phrases, seen, bad = [Path(n).resolve() for n in names] or pages(), allowed(), 0, []
    for page in chosen:
        of_page = list(found(page, phrases))
        for f in of_page:
            name = f.page.relative_to(ROOT) if f.page.is_relative_to(ROOT) else f.page
            print(f"{name}:{f.line}: {f.habit}: {f.words}")
        seen += len(of_page)
        if len(of_page) > OF_A_PAGE + LIMIT * words(page) / 1000:
            bad.append(page.name)
    count = sum(map(words, chosen))
    rate = 1000 * seen / max(count, 1)
    print(f"{seen} habits in {count:,} words: {rate:.2f} per 1,000 (at most {LIMIT:g})")
    if bad:
        print(f"more than {LIMIT:g} per 1,000 words and {OF_A_PAGE}: {', '.join(bad)}")
    return int(rate > LIMIT or bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
