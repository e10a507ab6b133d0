"""The main job on one type of coverage: `rewrite MODEL --recipe NAME --tp 2`, and text from what it wrote.

The conversion is that of the command, with its default verification. Then two ranks load the sharded module from the
output, in processes of their own as torchrun starts them, and continue prompts with their cache; the tokens have to be
those that transformers' own greedy generation gives, of the source model where the recipe is exact and of the adapted
checkpoint where it is not.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rewriter.check.coverage import check as coverage
from rewriter.check.coverage.check import Subject
from rewriter.check.coverage.report import MAIN_JOB, Coverage
from rewriter.check.random_model import EAGER, random_ids
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.processes import Processes, placed, write_json
from rewriter.convert.conversion import convert
from rewriter.ir.absolute_positions import most_tokens

NEW_TOKENS = 16
_LENGTHS = (21, 8)  # of the prompts
_DRAWS = 3  # of prompts: where two tokens or two experts are as good, rounding chooses
_RANKS = 2
_TIMEOUT = 300.0


def check(model_type: str) -> Coverage:
    """Everything about one type, the main job included."""
    return coverage.check(model_type, main_job)


def check_main_job(model_type: str) -> Coverage:
    """The main job on one type, without its parts."""
    return coverage.check(model_type, main_job, ("builds", "traces", "tp2"))


def main_job(subject: Subject) -> None:
    """Add to the row of `subject` whether the main job works on it, by recipe."""
    for name, recipe in MAIN_JOB.items():
        with subject.noted(name):
            out = subject.scratch / f"{recipe}_{subject.result.type}".replace("-", "_")
            convert(subject.source, recipe, out=out, tp=_RANKS)
            exact = recipe == "tensor-parallel"
            _require_tokens(out, subject, subject.model if exact else adapted_model(out))
            shutil.rmtree(out)


def adapted_model(directory: Path) -> PreTrainedModel:
    """The adapted checkpoint in `directory`, loaded as its users load it, where `rewriter` cannot be imported."""
    with mock.patch.dict(sys.modules, {"rewriter": None}):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **EAGER)
    return model.eval()


def _require_tokens(out: Path, subject: Subject, model: PreTrainedModel) -> None:
    """Raise VerificationError unless ranks continue prompts as transformers does, one by one and padded."""
    count = min(NEW_TOKENS, most_tokens(subject.program) - max(_LENGTHS))
    if count < 1:
        raise RewriterError(f"its table of positions has no room for {max(_LENGTHS)} tokens and one more")
    for draw in range(_DRAWS):
        ids = random_ids(subject.config, max(_LENGTHS), 2 * _DRAWS)[2 * draw : 2 * draw + 2]
        prompts = [row[:length].tolist() for row, length in zip(ids, _LENGTHS, strict=True)]
        expected = [_greedy(model, prompt, count) for prompt in prompts]
        made = _tokens_of_ranks(out, prompts, count)
        if made["alone"] != expected:  # where transformers generates with other positions than its forward counts
            expected = [_by_forward(model, prompt, count) for prompt in prompts]
        wrong = [(how, row) for how in ("alone", "padded") for row in range(2) if made[how][row] != expected[row]]
        if not wrong:
            return
    how, row = wrong[0]
    at = next(i for i in range(count) if made[how][row][i] != expected[row][i])
    padding = f", padded by {_LENGTHS[0] - _LENGTHS[row]}" if how == "padded" else ""
    raise VerificationError(
        f"WRONG: token {at + 1} after a prompt of {_LENGTHS[row]}{padding} is {made[how][row][at]} on {_RANKS} ranks "
        f"and {expected[row][at]} in transformers"
    )


@torch.no_grad()
def _greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy tokens of transformers after `prompt`: by a cache, but where a model cannot use one."""
    ids = torch.tensor([prompt])
    model.generation_config = GenerationConfig()  # ends of sequence and penalties are not what is compared

    def made(use_cache: bool) -> list[int]:
        settings = GenerationConfig(
            max_new_tokens=count, do_sample=False, num_beams=1, use_cache=use_cache, pad_token_id=0
        )
        all_of_it = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return [int(token) for token in all_of_it[0, len(prompt) :]]

    try:
        return made(use_cache=True)
    except Exception:  # the model's own code
        return made(use_cache=False)


@torch.no_grad()
def _by_forward(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy tokens after `prompt` by the model's own forward on all tokens, anew for each."""
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return [int(token) for token in ids[0, len(prompt) :]]


def _tokens_of_ranks(out: Path, prompts: list[list[int]], count: int) -> dict[str, list[list[int]]]:
    """The tokens that `rewriter.runtime.generation.tokens_worker` gives. Raises RewriterError with a rank's reason."""
    with Processes() as job:
        request, result = job.scratch / "request.json", job.scratch / "tokens.json"
        write_json(request, {"directory": str(out), "prompts": prompts, "max_new_tokens": count})
        variables = placed(_RANKS)
        for rank in range(_RANKS):
            words = ["-m", "rewriter.runtime.generation.tokens_worker", str(request), str(result)]
            job.fork(f"rank {rank}", words, variables(rank))
        if (failure := job.wait(_TIMEOUT)) is not None:
            raise RewriterError(f"generation on {_RANKS} ranks: {failure.message or failure.line}")
        tokens: dict[str, list[list[int]]] = json.loads(result.read_text(encoding="utf-8"))
        return tokens
