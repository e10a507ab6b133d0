"""Real checkpoints through every step: convert, verify in full, size, generate as transformers does.

    python examples/real_models.py smollm2-135m-instruct models/smollm2
    python -m benchmarks.models.real_models models/smollm2 --tp 1,3 [--recipes R,R] [--json FILE]

For each recipe and number of ranks a line: what `--verify full` found (the largest relative difference), drift, bytes
of the output as a share of the source's, bytes written with --link, and how many of 8 prompts are continued by 64
greedy tokens exactly as by transformers with the adapted checkpoint. That comparison is in fp32: in bf16 two logits are
often equal. Exits with 1 where a conversion fails, an output is larger than 1.02 × its source or 20 MB with --link, or
tokens differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewriter import api
from rewriter.common.errors import RewriterError

RECIPES = ("tensor-parallel", "ladder-upper-half", "ladder-own-partial", "desync-2x-sum")
PROMPTS = (
    "What is the capital of France?",
    "The three primary colours are",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "Dear Sir or Madam,",
    "1, 2, 4, 8, 16,",
    "The main difference between a list and a tuple is",
)
NEW_TOKENS = 64


def size(directory: Path, but_links: bool = False) -> int:
    """Bytes of the files below a directory, or of those that have no other name."""
    found = [path.stat() for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(file.st_size for file in found if file.st_nlink == 1 or not but_links)


def expected_tokens(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers continues each prompt by, greedily, with an adapted checkpoint in fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32)
    found = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, temperature=None, top_p=None, top_k=None
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def continued_alike(model: Path, recipe: str, tp: int, prompts: list[str], directory: Path) -> int:
    """How many prompts the ranks continue as transformers does."""
    api.convert(model, recipe, tp=tp, out=directory, options=api.SaveOptions(verify="none", dtype="fp32"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = expected_tokens(directory, [tokenizer(text).input_ids for text in prompts])
    generations = api.generate(directory, prompts, max_new_tokens=NEW_TOKENS)
    return sum(found.tokens == wanted for found, wanted in zip(generations, expected, strict=True))


def row(model: Path, recipe: str, tp: int, prompts: list[str], scratch: Path) -> dict[str, Any]:
    """One line of the table. Raises RewriterError where a conversion or its verification fails."""
    copied, linked, exact = (scratch / name for name in ("copied", "linked", "fp32"))
    report = api.convert(model, recipe, tp=tp, out=copied, options=api.SaveOptions(verify="full"))
    differences = [value for name, value in report.verification.items() if name.startswith("real weights")]
    drift = report.verification.get("drift", {"kl": 0.0, "top1_agreement": 1.0})  # an exact recipe has none
    api.convert(model, recipe, tp=tp, out=linked, options=api.SaveOptions(verify="none", link=True))
    equal = continued_alike(model, recipe, tp, prompts, exact) if prompts else 0
    return {
        "recipe": recipe, "tp": tp, "largest difference": max(differences),
        "kl": drift["kl"], "top1": drift["top1_agreement"],
        "size": size(copied) / size(model), "linked": size(linked, but_links=True), "equal": equal,
        "verification": report.verification,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tp", default="1", help="numbers of ranks, such as 1,3")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many are continued")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows, failed, prompts = [], False, list(PROMPTS[: asked.prompts])
    print(f"{'recipe':20} tp  difference      KL  top-1  size ×  linked MB  equal of {len(prompts)}")
    for recipe in asked.recipes.split(","):
        for tp in map(int, asked.tp.split(",")):
            with tempfile.TemporaryDirectory(prefix="real-models-") as scratch:
                try:
                    found = row(asked.model, recipe, tp, prompts, Path(scratch))
                except RewriterError as error:
                    print(f"{recipe:20} {tp:2}  {error}", flush=True)
                    failed = True
                    continue
            rows.append(found)
            failed |= found["size"] > 1.02 or found["linked"] > 20e6 or found["equal"] < len(prompts)
            print(
                f"{recipe:20} {tp:2}  {found['largest difference']:10.1e}  {found['kl']:6.3f}"
                f"  {found['top1']:5.3f}  {found['size']:6.4f}  {found['linked'] / 1e6:9.2f}"
                f"  {found['equal']}",
                flush=True,
            )
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
