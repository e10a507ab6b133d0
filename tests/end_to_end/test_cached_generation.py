"""Models whose layers choose keys, hand values on, keep states or carry a stream of any form: modules of one rank and
of two write what transformers does, with a prompt in one piece and in several, alone and padded at the left.

Where transformers' own cache or padding gives other text than its forward on all tokens of a prompt alone, that is
checked, and the module has to give the latter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import emitted
import pytest
import torch
from emitted_ranks import build
from general_streams import few_layers
from programs import runtime_case
from ranks import run_ranks
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rewriter.check.random_model import EAGER, build_model, random_ids, randomize, save_model
from rewriter.common.model_class import auto_class
from rewriter.convert.conversion import save
from rewriter.convert.save_options import SaveOptions
from rewriter.ir import Program
from rewriter.ir.simulate import load_weights
from rewriter.recipes.apply import apply_recipe, load_recipe
from rewriter.runtime import Context, StaticCache, generate, load
from rewriter.tracing import trace

TYPES = [
    *("gemma4", "gemma4_text", "gemma4_unified_text", "zaya", "hy_v4", "glm_moe_dsa", "minimax", "glm5_next"),
    *("mistral_large4", "deepseek_v4", "deepseek_v32", "axk2", "dots3_note", "inkling_text", "longcat_flash"),
    *("qwen4_exp_text", "doge"),
]
# Types whose text transformers continues otherwise, with a cache or with padding, than its forward on all tokens alone
OTHER_CACHE: dict[str, str] = {}
OTHER_PADDING = {
    "deepseek_v4": "padding counts as tokens of its blocks",
    "inkling_text": "padding counts in the factor by which queries grow",
}
NEW_TOKENS, LENGTHS, CHUNKS, DRAWS = 32, (30, 9), (5, 1, 13, 11), 6
DECIDED = 1e-3  # of the largest logit: how much better than the next each chosen token is


@dataclass
class Case:
    """A small model, its program for one rank, its modules by number of ranks, two prompts whose continuation no
    rounding decides, and that."""

    model: PreTrainedModel
    program: Program
    modules: dict[int, tuple[str, list[dict[str, Tensor]], Any]]
    prompts: list[list[int]]
    expected: list[list[int]]


@functools.cache
def case(name: str, scratch: Path) -> Case:
    config, source = few_layers(name), scratch / name
    made = build_model(config)
    randomize(made)
    save_model(made, config, source)
    model = auto_class(config).from_pretrained(source, **EAGER).eval()
    model.generation_config = GenerationConfig()  # ends of sequence and penalties are not what is compared
    found = [decided(model, random_ids(config, length, DRAWS)) for length in LENGTHS]
    program = trace(source)
    weights = load_weights(program, torch.float32)
    sharded = {ranks: apply_recipe(program, load_recipe("tensor-parallel"), ranks)[0] for ranks in (1, 2)}
    modules = {ranks: runtime_case(of_ranks, weights) for ranks, of_ranks in sharded.items()}
    return Case(model, sharded[1], modules, *map(list, zip(*found, strict=True)))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cached")


@torch.no_grad()
def decided(model: PreTrainedModel, ids: Tensor) -> tuple[list[int], list[int]]:
    """The first of these prompts that has a best token at every step, and its continuation by the model's forward on
    all tokens, anew for each."""
    length, gaps = ids.shape[1], torch.full((len(ids),), torch.inf)
    for _ in range(NEW_TOKENS):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        best = logits.topk(2)
        gaps = torch.minimum(gaps, (best.values[:, 0] - best.values[:, 1]) / logits.abs().amax(-1))
        ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    row = next(row for row in range(len(ids)) if gaps[row] > DECIDED)
    return ids[row, :length].tolist(), ids[row, length:].tolist()


def of_transformers(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy tokens that transformers writes with its cache, prompts padded at the left."""
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1, pad_token_id=0)
    given = emitted.left_padded(prompts, prompts[0][0])
    made = model.generate(**given, generation_config=settings)
    return made[:, given["input_ids"].shape[1] :].tolist()


def on_rank(group: Any, modules: dict[int, Any], prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """The tokens that a module writes, by how it is given the prompts."""
    ranks = 1 if group is None else group.size()
    source, tensors, ties = modules[ranks]
    model = build(source, tensors[0 if group is None else group.rank()], ties, group)
    return {
        "whole": [generate(model, [prompt], NEW_TOKENS)[0] for prompt in prompts],
        "chunks": [in_chunks(model, prompts[0]), in_chunks(model, prompts[1])],
        "padded": generate(model, prompts, NEW_TOKENS, pad_token_id=prompts[0][0]),
        "padded, in chunks": generate(model, prompts, NEW_TOKENS, pad_token_id=prompts[0][0], prefill_chunk=7),
    }


@torch.no_grad()
def in_chunks(model: Any, prompt: list[int]) -> list[int]:
    """The continuation of a prompt that is computed in pieces of `CHUNKS` tokens."""
    cache = StaticCache(model.slots, 1, len(prompt) + NEW_TOKENS, torch.float32)
    tokens, begin = list(prompt), 0
    for size in (*CHUNKS, *[1] * (len(prompt) + NEW_TOKENS)):
        end = min(begin + size, len(tokens))
        logits = step(model, torch.tensor([tokens]), begin, end, cache)
        begin = end
        if end == len(tokens):
            tokens.append(int(logits[0, -1].argmax()))
        if len(tokens) == len(prompt) + NEW_TOKENS:
            break
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", TYPES)
def test_modules_write_what_the_model_does(name: str, ranks: int, scratch: Path) -> None:
    of = case(name, scratch)
    if ranks == 1:
        by_rank = [on_rank(None, of.modules, of.prompts)]
    else:
        by_rank = run_ranks(on_rank, ranks, of.modules, of.prompts)
    wrong = {how: tokens for how, tokens in by_rank[0].items() if tokens != of.expected}
    assert not wrong
    assert all(found == by_rank[0] for found in by_rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_the_text_is_that_of_transformers_generate(name: str, scratch: Path) -> None:
    of = case(name, scratch)
    alone = [of_transformers(of.model, [prompt])[0] for prompt in of.prompts]
    assert (alone != of.expected) == (name in OTHER_CACHE)
    padded = of_transformers(of.model, of.prompts)
    assert (padded != alone) == (name in OTHER_PADDING)


IN_BF16 = ["gemma4_text", "hy_v4", "deepseek_v4"]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BF16)
@torch.no_grad()
def test_cached_steps_in_bf16_are_the_forward_of_all_tokens(name: str, scratch: Path) -> None:
    """Within a few units in the last place of bf16 at every token: what is cached chooses the same keys and experts."""
    of, out = case(name, scratch), scratch / f"{name}-module"
    save(of.program, out, options=SaveOptions(verify="none"))
    model = load(out, device="cpu", dtype=torch.bfloat16)
    ids = random_ids(of.model.config, 48)
    whole, limit = model(ids).float(), 4 * torch.finfo(torch.bfloat16).eps
    cache, logits, begin = StaticCache(model.slots, len(ids), ids.shape[1], torch.bfloat16), [], 0
    for size in (20, 7, *[1] * 21):
        logits.append(step(model, ids, begin, begin + size, cache))
        begin += size
    assert float(errors(torch.cat(logits, 1), whole).max()) < limit
    others = StaticCache(model.slots, len(ids), ids.shape[1], torch.bfloat16)
    step(model, ids.flip(0), 0, 47, others)
    assert float(errors(step(model, ids, 47, 48, others), whole[:, 47:]).min()) > 2 * limit


def step(model: Any, ids: Tensor, begin: int, end: int, cache: StaticCache) -> Tensor:
    places = torch.arange(begin, end).expand(len(ids), -1)
    return model(ids[:, begin:end], places, Context(cache, torch.tensor(begin) if begin else None)).float()


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """By row and token, of logits [rows, tokens, vocabulary]."""
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)
