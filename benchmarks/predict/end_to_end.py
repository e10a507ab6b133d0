"""Time to first token and time per token of recipes on a shaped link: predicted, and measured.

    sudo python -m benchmarks.predict.end_to_end models/smollm2 --tp 3 --record
    sudo python -m benchmarks.predict.end_to_end models/gemma3-270m --tp 2 --record

Ranks in network namespaces run what `rewrite` writes, over a link of a limited rate. First their collectives are
measured, as by `rewrite fabrics calibrate`. Then starts of real ranks take turns with starts of ranks whose peers are
emulated: each of their collectives takes as long as on the fabric measured. With more ranks than cores some share a
core, and the emulated ones wait for each other at each collective, so that they compute at the same times as real ones.
Reported are medians over the starts. Start it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.prefill.times import STEPS, Bench, prepared
from benchmarks.support.namespaces import Bridge, LinkError
from rewriter.common.errors import RewriterError
from rewriter.common.files import read_json
from rewriter.common.text_settings import vocabulary_size
from rewriter.predict.validation import Row, Validation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "prediction.md"
RECIPES = (
    "tensor-parallel", "ladder", "ladder-upper-half", "parallel", "desync-2x-sum", "desync-4x", "tensor-parallel-int8",
    "prefill-ladder-upper-half",
)  # fmt: skip
WITHIN, SHARE = 0.06, 0.9  # goal: so many passes within 6 % or twice the spread of the real starts


def validated(bench: Bench, rate: float, starts: int, console: Console) -> Validation:
    """Starts of real ranks and of emulated ones, in turns, on a link of `rate` bytes a second."""
    bench.link.set_rate(rate)
    size, _ = bench.sums(bench.lengths[-1])
    fabric = bench.calibrated(1 << (size - 1).bit_length())
    real: list[list[dict[str, Any]]] = []
    emulated: list[list[dict[str, Any]]] = []
    for start in range(starts):
        real.append(bench.times(rate, STEPS))
        emulated.append(bench.predicted(fabric, STEPS))
        console.print(f"start {start + 1} of {starts}", style="dim")
    rows = [
        Row(name, f"{kind}, {length:,} tokens", *(
            tuple(_seconds(one, name, kind, length) for one in side) for side in (emulated, real)
        ))
        for length in bench.lengths
        for name in bench.outputs
        for kind in ("first token", "step")
        if kind == "first token" or length == bench.lengths[-1]
    ]  # fmt: skip
    words = f"{bench.tp} ranks over {rate * 8 / 1e6:g} Mb/s, gloo"
    return Validation(words, "the fabric measured on the link", tuple(rows))


def _seconds(ranks: Sequence[dict[str, Any]], name: str, kind: str, length: int) -> float:
    """The median of the slowest rank's."""
    taken = [rank["steps"][name] if kind == "step" else rank["seconds"][name][str(length)] for rank in ranks]
    return statistics.median(map(max, zip(*taken, strict=True)))


def holds(row: Row) -> bool:
    return abs(row.error) <= max(WITHIN, 2 * row.spread)


def lines(title: str, found: Validation) -> list[str]:
    """The rows of the page."""
    return [
        f"| {title} | `{recipe}` | {' | '.join(cells[:-1])} | {'yes' if holds(row) else 'no'} |"
        for (recipe, cells), row in zip(found.cells(), found.rows, strict=True)
    ]


def record(name: str, text: str) -> None:
    """Put `text` between the page's marks of this name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    PAGE.write_text(f"{before}{begin}{text}{end}{rest.partition(end)[2]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--length", type=int, action="append", help="tokens of a prompt (default 512)")
    parser.add_argument("--recipe", action="append", help="default: eight")
    parser.add_argument("--rate", type=float, default=250e6, help="bits a second of the link (default 250e6)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and messages")
    parser.add_argument("--starts", type=int, default=3, help="of real and of emulated ranks each (default 3)")
    parser.add_argument("--record", action="store_true", help="write the rows to docs/figures/prediction.md")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(highlight=False, width=140)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="end-to-end-") as name,
            Bridge(given.tp) as link,
        ):
            outputs = prepared(given.model, Path(name), given.recipe or RECIPES, given.tp)
            vocabulary = vocabulary_size(read_json(given.model / "config.json", "")) or 256
            lengths = sorted(given.length or [512])
            bench = Bench(outputs, vocabulary, link, given.tp, lengths, 3, given.dtype)
            found = validated(bench, given.rate / 8, given.starts, console)
            console.print(f"{link.dropped()} segments dropped")
    except (LinkError, RewriterError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    title = f"{given.model.name}, {given.tp} ranks, {given.rate / 1e6:g} Mb/s"
    table = lines(title, found)
    kept = sum(map(holds, found.rows)) / len(found.rows)
    worst = max(abs(row.error) for row in found.rows)
    said = [
        f"{title}, {given.dtype}, {date.today().isoformat()}, {given.starts} starts of each: {kept:.0%} of "
        f"{len(found.rows)} hold, the worst is {worst:.1%} off.",
        *(f"Ranked the wrong way in {kind}: {a} and {b}." for a, b, kind in found.misordered),
    ]
    print("\n".join([*table, "", *said]))
    if given.record:
        header = ["| model | recipe | pass | predicted | measured | error | spread | holds |", f"|{'---|' * 8}"]
        record(f"end-to-end-{given.tp}", "\n".join([*said, "", *header, *table]) + "\n")
    return 0 if kept >= SHARE and not found.misordered else 1


if __name__ == "__main__":
    sys.exit(main())
