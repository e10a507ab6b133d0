"""Models that compute with their tokens' places themselves: a sharded module generates what the model's own forward
says, one token at a time from its cache, prompts in one piece and in several, alone and padded at the left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import EAGER, build_model, random_ids, randomize
from rewriter.convert.conversion import convert
from rewriter.convert.save_options import SaveOptions
from rewriter.ir import ops
from rewriter.ir.ops import MaskSpec
from rewriter.runtime import Context, SlotSpec, StaticCache, attention, generate, load, remember, top_keys

NEW_TOKENS = 12


@pytest.fixture
def pair(model_type: str, tmp_path: Path) -> tuple[PreTrainedModel, torch.nn.Module]:
    """(the source model, its sharded module on one rank)."""
    model = build_model(small_config(model_type))
    randomize(model)
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", "tensor-parallel", out=tmp_path / "out", tp=1, options=SaveOptions(verify="none"))
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **EAGER).eval()
    return source, load(tmp_path / "out", device="cpu", dtype=torch.float32)


# learned and computed tables of positions; positions that ids count; a scale by position; ALiBi; chosen keys; biases
# by distance and by key; layers that compute nothing without images; experts that hand on their input; keys of blocks
TYPES = [
    *("bart", "mvp", "pegasus", "camembert", "roberta-prelayernorm", "llama4_text", "bloom", "mpt", "deepseek_v32"),
    *("axk2", "dots3_note_text", "inkling_text", "doge", "mllama", "longcat_flash", "deepseek_v4", "qwen4_exp_text"),
]


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.fast("bart", "camembert", "mpt", "doge")
@torch.no_grad()
def test_text_is_that_of_the_models_own_forward(model_type: str, pair: tuple[PreTrainedModel, torch.nn.Module]) -> None:
    source, module = pair
    ids = random_ids(source.config, 30)
    prompts = [ids[0].tolist(), ids[1][:9].tolist()]
    expected = [greedy(source, prompt) for prompt in prompts]
    assert generate(module, prompts[:1], NEW_TOKENS) == expected[:1]
    assert generate(module, prompts, NEW_TOKENS, pad_token_id=prompts[0][0]) == expected
    assert generate(module, prompts, NEW_TOKENS, pad_token_id=prompts[0][0], prefill_chunk=7) == expected
    assert generate(module, prompts[:1], NEW_TOKENS, prefill_chunk=16) == expected[:1]


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("model_type", ["bart", "bloom", "deepseek_v32", "inkling_text", "doge"])
@pytest.mark.fast("bart")
@torch.no_grad()
def test_what_is_given_another_place_shows(model_type: str, pair: tuple[PreTrainedModel, torch.nn.Module]) -> None:
    """The oracle of the test above can fail: with the wrong positions, or the wrong cache, logits are others."""
    source, module = pair
    ids = random_ids(source.config, 30, rows=1)
    expected = source(input_ids=ids, use_cache=False).logits[:, -1]
    cache = StaticCache(module.slots, 1, 32, torch.float32)
    module(ids[:, :-1], None, Context(cache))
    last, place = ids[:, -1:], torch.tensor(29)

    def difference(position: int, ctx: Context) -> float:
        logits = module(last, torch.tensor([[position]]), ctx)[:, -1]
        return float((logits - expected).abs().max() / expected.abs().max())

    assert difference(29, Context(cache, place)) < 1e-5
    assert difference(0, Context(cache, torch.tensor(28))) > 1e-3  # as if it were the token before


@torch.no_grad()
def test_chosen_keys_in_a_cache_are_those_of_the_specification() -> None:
    """Scores, keys and attention of 20 tokens in calls of 7, 1 and 12: the last rows equal the whole's."""
    torch.manual_seed(0)
    mask, scale = MaskSpec("causal"), 0.3
    q, k, v, x = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 6), torch.randn(1, 20, 5)
    scores = x @ x.transpose(1, 2)
    keys = ops.top_keys(scores, None, mask=mask, count=4)
    options = {"mask": mask, "scale": scale}
    expected = ops.attention(q, k, v, None, slot=0, keys=keys, **options)
    assert not torch.allclose(expected, ops.attention(q, k, v, None, slot=0, **options), atol=0.01)
    cache, begin = StaticCache([SlotSpec(1, 5, 0), SlotSpec(2, 8, 6)], 1, 24, torch.float32), 0
    for count in (7, 1, 12):
        end = begin + count
        ctx = Context(cache, None if begin == 0 else torch.tensor(begin))
        seen = remember(x[:, begin:end], ctx, slot=0)
        chosen = top_keys(x[:, begin:end] @ seen.transpose(1, 2), ctx, mask=mask, count=4)
        part = (q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end])
        actual = attention(*part, ctx, slot=1, keys=chosen, **options)
        torch.testing.assert_close(actual, expected[:, :, begin:end])
        begin = end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_slopes_in_a_cache_are_those_of_the_specification(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    q, k, v = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 6)
    for mask in (MaskSpec("causal"), MaskSpec("window", 6)):
        options = {"slot": 0, "mask": mask, "scale": 0.3, "slopes": slopes}
        expected = ops.attention(q, k, v, None, **options)
        assert not torch.allclose(expected, ops.attention(q, k, v, None, **{**options, "slopes": None}), atol=0.01)
        cache, begin = StaticCache([SlotSpec(2, 8, 6, window=mask.cached)], 2, 24, dtype), 0
        for count in (7, 1, 12):
            part = (x[:, :, begin : begin + count].to(dtype) for x in (q, k, v))
            ctx = Context(cache, None if begin == 0 else torch.tensor(begin))
            wanted = expected[:, :, begin : begin + count]
            limit = 1e-5 if dtype == torch.float32 else 0.03
            torch.testing.assert_close(attention(*part, ctx, **options).float(), wanted, atol=limit, rtol=limit)
            begin += count


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_biases_in_a_cache_are_those_of_the_specification(dtype: torch.dtype, padding: int) -> None:
    """By distance and by key, with a choice of keys: of 20 tokens in calls of 7, 1 and 12, behind padding or not."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 6)
    by_distance, key_bias = torch.randn(2, 4, 20, 5), torch.rand(2, 20, 2).exp()
    for mask in (MaskSpec("causal"), MaskSpec("window", 9)):
        for name, given in (("by_distance", by_distance), ("key_bias", key_bias)):
            choice = {"kept": 4} if name == "key_bias" else {}
            as_given = given.transpose(1, 2) if choice else given
            options = {"mask": mask, "scale": 0.3, **choice}
            expected = ops.attention(q, k, v, None, slot=1, **options, **{name: as_given})
            without = ops.attention(q, k, v, None, slot=1, mask=mask, scale=0.3)
            assert not torch.allclose(expected, without, atol=0.01)
            slots = [SlotSpec(1, 2, 0), SlotSpec(2, 8, 6, window=None if choice else mask.cached)]
            cache, first, begin = StaticCache(slots, 2, 24, dtype), torch.full((2,), padding), -padding
            for count in (7 + padding, 1, 12):
                end = begin + count
                place = begin + padding
                ctx = Context(cache, torch.tensor(place) if place else None, first_valid=first if padding else None)
                rows = torch.arange(begin, end).clamp(min=0)  # padding holds anything
                part = [x[:, :, rows].to(dtype) for x in (q, k, v)]
                new = given[:, rows].to(dtype) if choice else given[:, :, rows].to(dtype)
                seen = remember(new, ctx, slot=0).transpose(1, 2) if choice else new
                actual = attention(*part, ctx, slot=1, **options, **{name: seen})
                limit = 1e-5 if dtype == torch.float32 else 0.05
                own = slice(max(0, -begin), None)
                wanted = expected[:, :, max(0, begin) : end]
                torch.testing.assert_close(actual[:, :, own].float(), wanted, atol=limit, rtol=limit)
                begin = end
