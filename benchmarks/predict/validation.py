"""Predicted against measured on this machine: fills the matrix of docs/figures/prediction.md.

    python -m benchmarks.predict.validation [--quick] [--launches N]

Every model is run by every recipe on two real ranks (gloo, each on a core of its own; NCCL where there are two GPUs),
and on one real rank whose peer is emulated: see `rewrite predict --validate`. Start it on a machine that does nothing
else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from transformers import GPT2Config, LlamaConfig

from rewriter import api
from rewriter.common.errors import RewriterError
from rewriter.predict.validation import Validation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "prediction.md"
BEGIN, END = "<!-- validation -->\n", "<!-- /validation -->"
RECIPES = ("tensor-parallel", "ladder", "desync-2x", "tensor-parallel-int8")
RANKS = 2


@dataclass(frozen=True)
class Case:
    """A model by its config, in fp32 with random weights, and what it generates."""

    name: str
    config: LlamaConfig | GPT2Config
    prompt: int
    generate: int


def cases(quick: bool) -> list[Case]:
    size = dict(hidden_size=256, intermediate_size=688, num_hidden_layers=4) if quick else dict(
        hidden_size=1024, intermediate_size=2752, num_hidden_layers=8
    )  # fmt: skip
    llama = LlamaConfig(**size, num_attention_heads=8, num_key_value_heads=4, vocab_size=4096, dtype="float32")
    gpt2 = GPT2Config(
        n_embd=256 if quick else 768, n_layer=4 if quick else 8, n_head=8, vocab_size=4096, dtype="float32"
    )
    return [Case("Llama", llama, 64 if quick else 512, 32), Case("GPT-2", gpt2, 64 if quick else 256, 32)]


def run(case: Case, launches: int) -> Validation:
    """The validation of one case. Raises RewriterError where this machine cannot run two ranks."""
    with tempfile.TemporaryDirectory(prefix="validation-") as scratch:
        file = Path(scratch, "config.json")
        file.write_text(json.dumps(case.config.to_dict()))
        found = api.validate(
            file, RECIPES, api.Workload(tp=RANKS, prompt=case.prompt, generate=case.generate), launches=launches
        )
    if found.reason is not None:
        raise RewriterError(f"{case.name}: {found.reason}")
    return found


def rows(case: Case, found: Validation) -> Iterator[str]:
    for recipe, cells in found.cells():
        yield f"| {case.name}, {case.prompt} + {case.generate} tokens | `{recipe}` | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=7, help="of real and of emulated ranks each (default 7)")
    parser.add_argument("--quick", action="store_true", help="small models; the page is left as it is")
    options = parser.parse_args()
    console = Console(highlight=False)
    lines = ["| model | recipe | pass | predicted | measured | error | spread | holds |", f"|{'---|' * 8}"]
    said: list[str] = []
    try:
        for case in cases(options.quick):
            found = run(case, options.launches)
            console.print(f"\n[bold]{case.name}[/]", found)
            lines += rows(case, found)
            said += [f"{case.name}: {words}" for words in found.said()[2:]]
    except RewriterError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    machine = f"{date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    text = "\n".join([f"{machine}; {options.launches} launches of each.", "", *lines, "", *said]).rstrip() + "\n"
    if not options.quick:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}", encoding="utf-8")
        console.print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
