"""Greedy tokens of a rewritten model in vLLM beside those that transformers makes of the same checkpoint, in fp32.

    .venv-serving/bin/python -m benchmarks.serving.same_tokens models/smollm2 --tp 3 --recipe prefill-desync-2x-sum

Eight prompts of the packaged calibration text, the last of which begins as the second. In vLLM they come in chunks of
128 tokens, four at a time, and blocks seen before are cached. Reported are the tokens of each answer up to the first
one that differs, and where one does, by how much transformers' logit of vLLM's token is below the best one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.serving.vllm_settings import set_up
from rewriter.api import convert
from rewriter.check.drift import CALIBRATION, load_tokenizer
from rewriter.common.files import read_json
from rewriter.convert.save_options import SaveOptions
from rewriter.output.sum_schedule import hf_overrides

set_up(VLLM_ENABLE_V1_MULTIPROCESSING="0")

LENGTHS = (90, 300, 140, 260, 75, 200, 120, 110)
BETWEEN = 80  # tokens, of two pieces' beginnings
TOKENS = 64


def prompts(model: Path) -> list[list[int]]:
    """Pieces of the text, the last one behind the second."""
    tokenizer: Any = load_tokenizer(str(model))
    ids = tokenizer(CALIBRATION.read_text(encoding="utf-8")).input_ids
    made = [ids[BETWEEN * i :][:length] for i, length in enumerate(LENGTHS)]
    return [*made[:-1], made[1] + made[-1]]


def of_vllm(directory: Path, asked: list[list[int]], tp: int, eager: bool) -> list[list[int]]:
    """vLLM's tokens after each prompt."""
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        str(directory), tensor_parallel_size=tp, dtype="float32", enforce_eager=eager, seed=0, max_num_seqs=4,
        max_num_batched_tokens=128, enable_prefix_caching=True, block_size=32, trust_remote_code=True,
        max_model_len=max(map(len, asked)) + TOKENS, skip_tokenizer_init=True,
        hf_overrides=hf_overrides(read_json(directory / "config.json", "")),
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in asked], sampling, use_tqdm=False)
    print("prompt tokens that were cached:", sum(output.num_cached_tokens or 0 for output in outputs))
    return [list(output.outputs[0].token_ids) for output in outputs]


@torch.no_grad()
def of_transformers(directory: Path, asked: list[list[int]]) -> list[tuple[list[int], Any]]:
    """Transformers' tokens after each prompt, and the logits [V] that each was chosen by."""
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    for ids in asked:
        made = model.generate(
            torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        found.append((made.sequences[0, len(ids) :].tolist(), [step[0] for step in made.logits]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--recipe", default="prefill-ladder-upper-half")
    parser.add_argument("--compiled", action="store_true", help="by torch.compile")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-tokens-") as name:
        directory = Path(name) / given.recipe
        convert(given.model, given.recipe, out=directory, tp=given.tp, options=SaveOptions(verify="none"))
        asked = prompts(given.model)
        served = of_vllm(directory, asked, given.tp, not given.compiled)
        wanted = of_transformers(directory, asked)
    equal = 0
    for number, (tokens, (own, logits)) in enumerate(zip(served, wanted, strict=True)):
        first = next((i for i in range(TOKENS) if tokens[i] != own[i]), TOKENS)
        equal += first
        if first < TOKENS:
            gap = (logits[first].amax() - logits[first][tokens[first]]).item()
            print(f"prompt {number}: token {first} differs, its logit {gap:.2g} below the best one")
    print(f"{given.recipe}, {given.tp} ranks: {equal} of {len(asked) * TOKENS} tokens are equal")
    return int(equal < len(asked) * TOKENS)


if __name__ == "__main__":
    sys.exit(main())
