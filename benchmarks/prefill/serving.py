"""Time to the first token in vLLM over a slow link: as `times`, each rank an engine in a network namespace of its own.

    make serving-venv
    sudo .venv-serving/bin/python -m benchmarks.prefill.serving [models/gemma3] [--tp 2] [--length 512] [--record]

Without a model, a Llama of 8 layers with random weights. vLLM runs eager, a prompt is one batch, nothing is cached
before it, and ranks sum over gloo, as they do on two hosts. The recipes take turns within one start of the ranks;
reported are medians of the slower rank. Exits with 1 where prefill-int8 takes more than 0.62 of standard's time.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.prefill import page
from benchmarks.prefill.times import STANDARD, STEPS, UNLIMITED, Bench, as_on_pcie, prepared, random_llama, table
from benchmarks.support.namespaces import Bridge, Link, LinkError
from rewriter.common.errors import RewriterError
from rewriter.common.files import read_json
from rewriter.common.text_settings import vocabulary_size

RECIPES = (
    STANDARD, "prefill-int8", "prefill-ladder-upper-half", "prefill-desync-2x-sum", "prefill-desync-2x-sum-int8"
)  # fmt: skip
AIMED, GOAL = "prefill-int8", 0.62  # at most, of standard's time on a link as on PCIe
RANK = "benchmarks.prefill.serving_rank"


class ServingBench(Bench):
    """Ranks whose sums are seen on the link."""

    def times(self, rate: float, steps: int = 0) -> list[dict[str, Any]]:
        """As `Bench.times`. Raises RewriterError where the standard model's sums took another way."""
        found = super().times(rate, steps)
        longest = self.lengths[-1]
        sent = {name: counts[str(longest)] for name, counts in found[0]["sent"].items()}
        if sent[STANDARD] < (expected := self.sent(longest)):
            raise RewriterError(
                f"a rank has sent {sent[STANDARD]} bytes over the link for {longest} tokens, where its sums alone have "
                f"{expected:.0f}: they took another way, as memory that ranks share"
            )
        for name, count in sent.items():
            worked = statistics.median(found[0]["worked"][name][str(longest)])
            print(f"{name}: {count / 1e6:.1f} MB sent and {worked:.2f} s on a CPU for {longest} tokens")
        return found


def measured(bench: Bench, console: Console) -> dict[str, Any]:
    """Times by link: without a limit, and as on PCIe."""
    unlimited = bench.times(UNLIMITED, steps=STEPS)
    free, steps = bench.medians(unlimited), bench.steps(unlimited)
    console.print("a decode step:", {name: f"{1e3 * seconds:.1f} ms" for name, seconds in steps.items()})
    console.print(table("without a limit", free))
    rate, timed = as_on_pcie(bench, free[STANDARD][bench.lengths[-1]])
    console.print(table(f"{page.LINK}: {rate / 1e6:.1f} MB/s, {bench.link.dropped()} segments dropped", timed))
    return {"without a limit": free, "decode step": steps, page.LINK: {"rate": rate, **timed}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--length", type=int, action="append", help="tokens of a prompt (default 512 and 2,048)")
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", default="float32", help="of weights and messages")
    parser.add_argument("--record", action="store_true", help="add what is found to record.json, and write the page")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(highlight=False, width=140)
    try:
        with tempfile.TemporaryDirectory(prefix="prefill-") as name:
            directory = Path(name)
            model = given.model or random_llama(directory / "random-llama")
            recipes = [STANDARD, *(r for r in given.recipe or RECIPES if r != STANDARD)]
            outputs = prepared(model, directory, recipes, given.tp)
            vocabulary = vocabulary_size(read_json(model / "config.json", "")) or 256
            lengths = sorted(given.length or [512, 2048])
            with Link() if given.tp == 2 else Bridge(given.tp) as link:
                bench = ServingBench(outputs, vocabulary, link, given.tp, lengths, given.repetitions, given.dtype, RANK)
                found = measured(bench, console)
    except (LinkError, RewriterError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    if given.record:
        run = {"model": model.name, "tp": given.tp, "dtype": given.dtype, "lengths": lengths}
        page.RECORD.add("serving", {**run, "date": time.strftime("%Y-%m-%d"), "links": found})
        page.write()
    timed, longest = found[page.LINK], lengths[-1]
    return int(AIMED in timed and timed[AIMED][longest] > GOAL * timed[STANDARD][longest])


if __name__ == "__main__":
    sys.exit(main())
