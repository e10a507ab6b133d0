"""Time to the first token over slow links: ranks of `rewrite`'s outputs in network namespaces of their own.

    sudo python -m benchmarks.prefill.times models/gemma3 --tp 2 [--length 512 --length 2048] [--record]
    sudo python -m benchmarks.prefill.times --random --tp 2 --record      # a Llama of 8 layers, random weights

Rates of the link: 0.1 and 1 Gb/s, and that at which the sums of a prompt of the standard model take three times as long
as its computation, as on PCIe. `standard` is the recipe tensor-parallel. The recipes take turns within one start of the
ranks; reported are medians of the slower rank. Segments of layers are not compiled. On the last of these links times
are predicted too: one rank runs, and its peers' collectives take as long as they do on this link by themselves
(`rewriter.emulation`).
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.prefill import page
from benchmarks.support.link_ranks import launch
from benchmarks.support.namespaces import Bridge, Link, LinkError, Network
from rewriter.api import convert
from rewriter.common.errors import RewriterError
from rewriter.common.files import read_json
from rewriter.common.text_settings import vocabulary_size
from rewriter.convert.save_options import SaveOptions

RECIPES = (
    "tensor-parallel", "prefill-int8", "prefill-ladder-upper-half", "prefill-ladder", "prefill-desync-2x-sum",
    "prefill-desync-4x-sum", "prefill-desync-2x-sum-int8",
)  # fmt: skip
STANDARD = RECIPES[0]
LINKS = ("0.1 Gb/s", "1 Gb/s", page.LINK)
PREDICTED = "predicted"
RANK = "benchmarks.prefill.rank"
UNLIMITED = 4e9  # bytes a second
AS_ON_PCIE = 3.0  # seconds of sums by those of computation
RATES = {LINKS[0]: 12.5e6, LINKS[1]: 125e6}
SECONDS = 580.0
STEPS = 16  # of decoding, timed together


@dataclass
class Bench:
    """Outputs of the recipes, and starts of their ranks on a link."""

    outputs: dict[str, str]
    vocabulary: int
    link: Network
    tp: int
    lengths: Sequence[int]
    repetitions: int
    dtype: str
    module: str = RANK  # that a rank runs on the link

    def times(self, rate: float, steps: int = 0) -> list[dict[str, Any]]:
        """The results of each rank at this rate, in bytes a second. Raises RewriterError where ranks chose different
        tokens."""
        self.link.set_rate(rate)
        found = launch(self.link, self.module, self._spec(steps), self.tp, timeout=SECONDS)
        for name in found[0]["tokens"]:
            if any(rank["tokens"][name] != found[0]["tokens"][name] for rank in found):
                raise RewriterError(f"{name}: the ranks chose different tokens")
        return found

    def calibrated(self, largest: int) -> str:
        """The YAML of a fabric: collectives of up to `largest` bytes on the link as it is, when nothing computes beside
        them, as `rewrite fabrics calibrate` measures them."""
        spec = {"largest": largest, **self._cores()}
        measured = launch(self.link, RANK, spec, self.tp, timeout=3 * SECONDS)
        return str(measured[0]["fabric"])

    def predicted(self, fabric: str, steps: int = 0) -> list[dict[str, Any]]:
        """The results of ranks whose collectives take as long as on `fabric`, a YAML. The peers of each are emulated;
        with more ranks than cores they wait for each other at each collective, as what shares a core with them does."""
        with tempfile.TemporaryDirectory(prefix="prefill-fabric-") as name:
            file = Path(name) / "link.yaml"
            file.write_text(fabric, encoding="utf-8")
            together = {"real": list(range(self.tp))} if self.tp > len(os.sched_getaffinity(0)) else {}
            spec = {**self._spec(steps), "emulation": {"fabric": str(file), **together}}
            return launch(None, RANK, spec, self.tp, timeout=SECONDS)

    def _spec(self, steps: int) -> dict[str, Any]:
        return {
            "outputs": self.outputs, "vocabulary": self.vocabulary, "lengths": list(self.lengths), "warm_up": 1,
            "repetitions": self.repetitions, "steps": steps, "dtype": self.dtype, **self._cores(),
        }  # fmt: skip

    def _cores(self) -> dict[str, Any]:
        cores = sorted(os.sched_getaffinity(0))
        return {"cores": [cores[rank % len(cores)] for rank in range(self.tp)]}

    def sums(self, length: int) -> tuple[int, int]:
        """(bytes of a sum of the standard model, how many it has in a prompt of `length`)."""
        config = read_json(Path(self.outputs[STANDARD]) / "config.json", "")
        config = config.get("text_config", config)
        size = getattr(torch, self.dtype).itemsize
        return length * config["hidden_size"] * size, 2 * config["num_hidden_layers"] + 1

    def sent(self, length: int) -> float:
        """Bytes that a rank sends for the sums of a prompt of the standard model."""
        sum_bytes, sums = self.sums(length)
        return sums * sum_bytes * 2 * (self.tp - 1) / self.tp

    def medians(self, found: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
        """By output and length, the median of the slower rank's seconds."""
        return {
            name: {
                length: statistics.median(map(max, *(rank["seconds"][name][str(length)] for rank in found)))
                for length in self.lengths
            }
            for name in found[0]["seconds"]
        }

    def steps(self, found: Sequence[dict[str, Any]]) -> dict[str, float]:
        """By output, the median of the slower rank's seconds of a decode step."""
        return {name: statistics.median(map(max, *(rank["steps"][name] for rank in found))) for name in self.outputs}


def prepared(model: Path, directory: Path, recipes: Sequence[str], tp: int) -> dict[str, str]:
    """Outputs by recipe: those that it takes."""
    outputs = {}
    for recipe in recipes:
        try:
            convert(model, recipe, out=directory / recipe, tp=tp, options=SaveOptions(verify="none"))
        except RewriterError as error:
            print(f"{recipe}: left out, {error}", file=sys.stderr)
            continue
        outputs[recipe] = str(directory / recipe)
    return outputs


def random_llama(directory: Path) -> Path:
    """A Llama of 8 layers of width 768, written with random weights: blocks long against a round trip."""
    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=6,
        vocab_size=4096, max_position_embeddings=16384, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def as_on_pcie(bench: Bench, free: float) -> tuple[float, dict[str, dict[int, float]]]:
    """(bytes a second at which the sums of the longest prompt of the standard model take three times as long as its
    computation, medians there). `free` are its seconds without a limit."""
    longest = bench.lengths[-1]
    rate = bench.sent(longest) / (AS_ON_PCIE * free)
    timed = bench.medians(bench.times(rate))
    share = timed[STANDARD][longest] / free - 1
    if abs(share - AS_ON_PCIE) > 0.3:  # what is not bytes
        rate *= share / AS_ON_PCIE
        timed = bench.medians(bench.times(rate))
    return rate, timed


def measured(bench: Bench, links: Sequence[str], console: Console) -> dict[str, Any]:
    """Times by rate of the link."""
    unlimited = bench.times(UNLIMITED, steps=STEPS)
    found: dict[str, Any] = {"without a limit": bench.medians(unlimited), "decode step": bench.steps(unlimited)}
    free = found["without a limit"][STANDARD][bench.lengths[-1]]
    steps = found["decode step"]
    console.print(
        "a decode step, as a share of standard's:", {n: round(s / steps[STANDARD], 3) for n, s in steps.items()}
    )
    for name in links:
        if name == page.LINK:
            rate, timed = as_on_pcie(bench, free)
        else:
            rate = RATES[name]
            timed = bench.medians(bench.times(rate))
        console.print(table(f"{name}: {rate / 1e6:.1f} MB/s, {bench.link.dropped()} segments dropped", timed))
        found[name] = {"rate": rate, **timed}
        if name == page.LINK:
            sum_bytes, _ = bench.sums(bench.lengths[-1])
            found[PREDICTED] = bench.medians(bench.predicted(bench.calibrated(1 << (sum_bytes - 1).bit_length())))
            console.print(table(f"{name}, {PREDICTED}", found[PREDICTED]))
            off = {
                recipe: max(abs(found[PREDICTED][recipe][n] / seconds - 1) for n, seconds in one.items())
                for recipe, one in timed.items()
            }
            console.print("off by at most", {recipe: f"{one:.1%}" for recipe, one in off.items()})
    return found


def table(title: str, found: dict[str, dict[int, float]]) -> Table:
    shown = Table(title=f"{title}: seconds to the first token, and their share of standard's")
    shown.add_column("recipe")
    lengths = list(found[STANDARD])
    for length in lengths:
        shown.add_column(f"{length:,}", justify="right")
    for name, seconds in found.items():
        shown.add_row(name, *(f"{seconds[n]:.3f} ({seconds[n] / found[STANDARD][n]:.2f})" for n in lengths))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--random", action="store_true", help="a Llama with random weights in place of a model")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--length", type=int, action="append", help="tokens of a prompt (default 512, 2,048 and 8,192)")
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--link", action="append", choices=LINKS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtype", default="float32", help="of weights and messages")
    parser.add_argument("--record", action="store_true", help="add what is found to record.json, and write the page")
    given = parser.parse_args()
    if (given.model is None) != given.random:
        parser.error("give a checkpoint directory, or --random")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(highlight=False, width=140)
    lengths = given.length or [512, 2048, 8192]
    try:
        with tempfile.TemporaryDirectory(prefix="prefill-") as name:
            directory = Path(name)
            model = random_llama(directory / "random-llama") if given.random else given.model
            recipes = [STANDARD, *(r for r in given.recipe or RECIPES if r != STANDARD)]
            outputs = prepared(model, directory, recipes, given.tp)
            vocabulary = vocabulary_size(read_json(model / "config.json", "")) or 256
            with Link() if given.tp == 2 else Bridge(given.tp) as link:
                bench = Bench(outputs, vocabulary, link, given.tp, sorted(lengths), given.repetitions, given.dtype)
                found = measured(bench, given.link or LINKS, console)
    except (LinkError, RewriterError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    if given.record:
        run = {"model": model.name, "tp": given.tp, "dtype": given.dtype, "lengths": bench.lengths}
        page.RECORD.add("times", {**run, "date": time.strftime("%Y-%m-%d"), "links": found})
        page.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
