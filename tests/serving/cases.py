"""Rewritten tiny models on vLLM: cases, the tokens that transformers makes of the same directory, and vLLM's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_models
import torch
import yaml
from transformers import AutoModelForCausalLM

from rewriter.api import convert

TOKENS = 64
MIX = {  # a standard layer, a ladder that begins and ends, and a parallel layer behind it
    "name": "mix",
    "summary": "Layers of several kinds, for tests.",
    "paper": "none",
    "passes": [
        {"pass": "tensor_parallel"},
        {"pass": "ladder", "layers": [1, 2]},
        {"pass": "parallel_block", "layers": [3], "norm": "own"},
        {"pass": "overlap", "optional": True},
    ],
}


@dataclass(frozen=True)
class Case:
    family: str
    recipe: str
    tp: int = 1
    eager: bool = True
    engine: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        extra = "-".join(self.engine)
        return f"{self.family}-{self.recipe}-tp{self.tp}-{'eager' if self.eager else 'compiled'}{extra and '-' + extra}"


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 17, 3, 40, 9, 1, 12, 23)
    return [torch.randint(3, tiny_models.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def rewritten(case: Case, root: Path) -> Path:
    """The directory of a case; made once."""
    source, out = root / case.family, root / f"{case.family}-{case.recipe}-tp{case.tp}"
    if not source.exists():
        tiny_models.write(case.family, source)
    if not out.exists():
        recipe: Any = case.recipe
        if recipe == "mix":
            recipe = root / "mix.yaml"
            recipe.write_text(yaml.safe_dump(MIX))
        convert(source, recipe, out=out, tp=case.tp, verify="none")
    return out


@torch.no_grad()
def of_transformers(directory: Path) -> list[list[int]]:
    """Greedy tokens after each prompt, of the adapted checkpoint in fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    for ids in prompts():
        made = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        found.append(made[0, len(ids) :].tolist())
    return found


def of_vllm(cases: list[Case], root: Path) -> list[dict[str, Any]]:
    """What vLLM makes of each: {"tokens": …} or {"error": …}, and the log of all in "log"."""
    asked = [
        {
            "model": str(rewritten(case, root)),
            "prompts": prompts(),
            "tokens": TOKENS,
            "engine": {"tensor_parallel_size": case.tp, "enforce_eager": case.eager, "trust_remote_code": True}
            | case.engine,
        }
        for case in cases
    ]
    given, found, log = root / "cases.json", root / "results.json", root / "log.txt"
    given.write_text(json.dumps(asked))
    with log.open("w") as out:
        subprocess.run(
            [sys.executable, str(Path(__file__).with_name("engine_run.py")), str(given), str(found)],
            stdout=out, stderr=out, check=False, env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )  # fmt: skip
    text = log.read_text()
    results = json.loads(found.read_text()) if found.exists() else []
    assert len(results) == len(cases), text[-3000:]
    return [{**result, "log": text} for result in results]
