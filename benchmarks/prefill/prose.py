"""Prose to train on and to measure on: the manuals that a Debian system has in files of text.

    python -m benchmarks.prefill.prose build/prose        # train.jsonl and heldout.jsonl, {"text": …} per line

Perl's manual and the texts of /usr/share/doc, in an order that a seed draws; the first `HELD_OUT` are not trained on.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

PLACES = ("/usr/share/perl", "/usr/share/doc")
ENDINGS = (".pod", ".txt")
SHORTEST, LONGEST = 4_000, 200_000  # characters of a text
HELD_OUT = 16
SEED = 5


def texts() -> list[str]:
    """The manuals, shuffled; those that say the same under two names once."""
    files = sorted(p for place in PLACES for p in Path(place).rglob("*") if p.suffix in ENDINGS and p.is_file())
    found = [text for file in files if SHORTEST < len(text := file.read_text(errors="ignore")) < LONGEST]
    found = list(dict.fromkeys(found))
    random.Random(SEED).shuffle(found)
    return found


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    out, found = Path(sys.argv[1]), texts()
    out.mkdir(parents=True, exist_ok=True)
    for name, some in (("heldout", found[:HELD_OUT]), ("train", found[HELD_OUT:])):
        lines = [json.dumps({"text": text}) + "\n" for text in some]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}.jsonl: {len(some)} texts, {sum(map(len, some)):,} characters")


if __name__ == "__main__":
    main()
