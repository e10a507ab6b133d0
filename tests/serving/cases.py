"""Rewritten tiny models on vLLM: cases, the tokens that transformers makes of the same directory, and vLLM's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quantized_checkpoints
import tiny_models
import torch
import yaml
from engine_run import MARK
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewriter.api import convert
from rewriter.convert.save_options import SaveOptions
from rewriter.ir.phases import PromptPhase

TOKENS = 64
LORA_RANK = 8
AWQ, MEANT = "llama-awq", "llama-meant"  # weights of 4 bits, and what they stand for
MIX = {  # a standard layer, a ladder that begins and ends, and a parallel layer after it
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


# What servers do by default: prompts come in pieces, and blocks of a prompt seen before are not computed again.
SERVING: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
    "block_size": 32,
}


@dataclass(frozen=True)
class Case:
    family: str
    recipe: str
    tp: int = 1
    eager: bool = True
    engine: dict[str, Any] = field(default_factory=dict, hash=False)
    adapted: bool = False  # by a LoRA
    settings: tuple[tuple[str, Any], ...] = ()  # of the recipe
    every: int | None = None  # steps of the engine between two requests; None: all come at once
    fault: str | None = None  # put into the plugin

    def __str__(self) -> str:
        extra = "-".join([*self.engine, *["lora"] * self.adapted, *["mixed"] * bool(self.every), self.fault or ""])
        extra = extra.strip("-")
        return f"{self.family}-{self.recipe}-tp{self.tp}-{'eager' if self.eager else 'compiled'}{extra and '-' + extra}"


REAL = {"smollm2": "REWRITER_SMOLLM2", "gemma3": "REWRITER_GEMMA3"}  # real models by the variable of their directory
QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle, and what the letter says.",
    "Name three prime numbers.",
    "Why is the sky blue?",
    "def read_lines(path):",
    "Once upon a time",
    "Translate to Spanish: good morning",
)


def prompts(family: str = "llama") -> list[list[int]]:
    """Eight, the last of which begins as the second does."""
    if family in REAL:
        tokenizer = AutoTokenizer.from_pretrained(os.environ[REAL[family]])
        made = [tokenizer(question)["input_ids"] for question in QUESTIONS]
        made[1] *= 2  # longer than a block of the cache
        return [*made, made[1] + made[3]]
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 40, 17, 3, 9, 1, 12, 23)
    made = [torch.randint(3, tiny_models.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [*made[:-1], made[1] + made[-1]]


def rewritten(case: Case, root: Path) -> Path:
    """The directory of a case; made once."""
    source, out = root / case.family, root / f"{case.family}-{case.recipe}-tp{case.tp}"
    if case.family in REAL:
        source = Path(os.environ[REAL[case.family]])
    elif not source.exists():
        tiny_models.write("llama" if case.family == AWQ else case.family, source)
        if case.family == AWQ:
            shutil.copytree(source, root / MEANT)
            meant = quantized_checkpoints.quantize(source, *quantized_checkpoints.awq(32))
            save_file(meant, root / MEANT / "model.safetensors", {"format": "pt"})
    if not out.exists():
        recipe: Any = case.recipe
        if recipe == "mix":
            recipe = root / "mix.yaml"
            recipe.write_text(yaml.safe_dump(MIX))
        convert(source, recipe, out=out, tp=case.tp, set=dict(case.settings), options=SaveOptions(verify="none"))
    return out


def lora_of(directory: Path) -> Path:
    """A LoRA for a rewritten Llama, in PEFT's format; made once. It changes what stands before and after sums."""
    out, scale = directory.with_name(f"{directory.name}-lora"), 2.0
    if out.exists():
        return out
    generator = torch.Generator().manual_seed(2)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    targets, tensors = ("q_proj", "o_proj", "up_proj", "down_proj"), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            for part, shape in (("A", (LORA_RANK, module.in_features)), ("B", (module.out_features, LORA_RANK))):
                values = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": scale * LORA_RANK, "target_modules": targets}
    (out / "adapter_config.json").write_text(json.dumps(described | {"bias": "none", "task_type": "CAUSAL_LM"}))
    return out


def merge(model: torch.nn.Module, adapter: Path) -> None:
    """Add what a LoRA adds to the weights of `model`."""
    described = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            weight = model.get_parameter(name.removeprefix("base_model.model.").replace("lora_A.weight", "weight"))
            weight += described["lora_alpha"] / described["r"] * b @ a


@torch.no_grad()
def of_transformers(directory: Path, asked: list[list[int]], adapter: Path | None = None) -> list[list[int]]:
    """Greedy tokens after each prompt, of the adapted checkpoint in fp32, with a LoRA merged into it."""
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32).eval()
    if adapter is not None:
        merge(model, adapter)
    model.generation_config.eos_token_id = None
    found = []
    for ids in asked:
        made = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        found.append(made[0, len(ids) :].tolist())
    return found


@torch.no_grad()
def shortfall(directory: Path, asked: list[list[int]], made: list[list[int]]) -> float:
    """The most by which a token of `made` is below the best one's logit, for the model in `directory` in fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32).eval()
    worst = 0.0
    generated = hasattr(model.config, "rewriter_layers")
    phase = getattr(model.config, "rewriter_phase", None) if generated else None
    for prompt, tokens in zip(asked, made, strict=True):
        ids, own = torch.tensor([prompt + tokens]), {}
        if phase is not None:
            own["rewired"] = PromptPhase(**phase).rewired(ids.shape[1], prompt=len(prompt))
        logits = model(ids, **own).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, (logits.amax(1) - chosen).amax().item())
    return worst


def of_vllm(
    cases: list[Case], root: Path, given_prompts: dict[str, list[list[int]]] | None = None
) -> list[dict[str, Any]]:
    """Results of vLLM on each: {"tokens": …} or {"error": …}, and its log in "log". `given_prompts`, by recipe, take
    the place of the eight.

    The engine runs in the process that asks, where it can: pipeline stages have one of their own.
    """
    staged = any("pipeline_parallel_size" in case.engine for case in cases)
    asked = [
        {
            "model": str(rewritten(case, root)),
            "prompts": (given_prompts or {}).get(case.recipe) or prompts(case.family),
            "tokens": TOKENS,
            "adapter": str(lora_of(rewritten(case, root))) if case.adapted else None,
            "every": case.every,
            "fault": case.fault,
            "engine": {"tensor_parallel_size": case.tp, "enforce_eager": case.eager, "trust_remote_code": True}
            | SERVING
            | case.engine,
        }
        for case in cases
    ]
    given, found, log = root / "cases.json", root / "results.json", root / "log.txt"
    given.write_text(json.dumps(asked))
    with log.open("w") as out:
        subprocess.run(
            [sys.executable, str(Path(__file__).with_name("engine_run.py")), str(given), str(found)],
            stdout=out, stderr=out, check=False, env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(staged))},
        )  # fmt: skip
    text = log.read_text()
    results = json.loads(found.read_text()) if found.exists() else []
    assert len(results) == len(cases), text[-3000:]
    return [{**result, "log": part} for result, part in zip(results, text.split(MARK)[1:], strict=True)]
