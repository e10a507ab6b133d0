"""A checkpoint that rewires the prompt alone: logits of the two wirings for every mask, its own masks by default, with
caches, padding, chunks, every way to generate, and training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import emitted
import oracles
import phased
import pytest
import torch
import zoo
from phased import PHASE
from torch import fx
from transformers import AutoModel, PreTrainedModel, StaticCache

from rewriter.common.cache_names import cache_argument, cache_of
from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface import emit_as_wired, emit_huggingface
from rewriter.ir import args_of, ops
from rewriter.passes.phases import single_device

TOLERANCE = 1e-5
LLAMA = [*phased.RECIPES]
# a family of each kind that a cache, padding or positions could trip, each with another recipe
MIXED = [("gpt2", "2x-sum"), ("gemma2", "own-partial"), ("gemma3_text", "ladder"), ("qwen3_moe", "parallel-own")]
MIXED += [("qwen3_moe", "2x-sum"), ("mixtral", "4x-sum")]
STEPPED = [*(("llama", recipe) for recipe in LLAMA), *MIXED]


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model(input_ids=ids, **options).logits


# What it computes


@pytest.mark.parametrize(("family", "recipe"), phased.CASES)
def test_logits_equal_the_two_wirings(family: str, recipe: str) -> None:
    model, ids = phased.shared(family, recipe), phased.batch(family)
    mask = phased.random_mask(ids)
    mixed = phased.expected(family, recipe, ids, mask)
    assert oracles.relative_error(logits_of(model, ids, rewired=mask), mixed) <= TOLERANCE
    prompts = phased.expected(family, recipe, ids, PHASE.rewired(21).expand(ids.shape))
    assert oracles.relative_error(logits_of(model, ids), prompts) <= TOLERANCE
    rewired = phased.expected(family, recipe, ids, None)
    assert oracles.relative_error(logits_of(model, ids, rewired=torch.ones_like(mask)), rewired) <= TOLERANCE
    original, exact = logits_of(zoo.shared(family), ids), logits_of(model, ids, rewired=torch.zeros_like(mask))
    if recipe in phased.UNBOUND:
        assert torch.equal(exact, original)
    assert oracles.relative_error(exact, original) <= 1e-6 * (1 if recipe in phased.UNBOUND else 2)
    for one, other in ((mixed, prompts), (mixed, rewired), (prompts, rewired), (prompts, original)):
        assert oracles.relative_error(one, other) >= 1e-2


@pytest.mark.parametrize(("family", "recipe"), STEPPED)
def test_steps_and_candidates_are_exact(family: str, recipe: str) -> None:
    """A prompt, single tokens, then several at once, as candidates or a second turn are."""
    model, ids = phased.shared(family, recipe), phased.batch(family, length=24)
    expected = phased.expected(family, recipe, ids, PHASE.rewired(24, prompt=16).expand(ids.shape))
    found, options = [], {}
    for begin, end in ((0, 16), (16, 17), (17, 18), (18, 22), (22, 24)):
        with torch.no_grad():
            output = model(input_ids=ids[:, begin:end], use_cache=True, **options)
        options = {cache_argument(model): cache_of(output)}
        found.append(output.logits)
    assert oracles.relative_error(torch.cat(found, 1), expected) <= TOLERANCE


@pytest.mark.parametrize(("family", "recipe"), STEPPED)
def test_chunks_with_masks_are_the_whole(family: str, recipe: str) -> None:
    model, ids = phased.shared(family, recipe), phased.batch(family, length=24)
    mask = phased.random_mask(ids, seed=5)
    expected = phased.expected(family, recipe, ids, mask)
    cuts = sorted(torch.randperm(23, generator=torch.Generator().manual_seed(7))[:4].add(1).tolist())
    found, options = [], {}
    for begin, end in zip([0, *cuts], [*cuts, 24], strict=True):
        with torch.no_grad():
            output = model(input_ids=ids[:, begin:end], rewired=mask[:, begin:end], use_cache=True, **options)
        options = {cache_argument(model): cache_of(output)}
        found.append(output.logits)
    assert oracles.relative_error(torch.cat(found, 1), expected) <= TOLERANCE


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "recipe"), STEPPED)
def test_a_padded_row_is_what_it_is_alone(family: str, recipe: str, side: str) -> None:
    model, prompts = phased.shared(family, recipe), zoo.prompts(3, 256)
    inputs = emitted.left_padded(prompts)
    if side == "right":
        missing = [len(prompts[-1]) - len(prompt) for prompt in prompts]
        inputs = {n: torch.stack([row.roll(-m) for row, m in zip(x, missing, strict=True)]) for n, x in inputs.items()}
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    together = logits_of(model, inputs.pop("input_ids"), position_ids=positions, **inputs)
    for row, prompt in enumerate(prompts):
        own = together[row, -len(prompt) :] if side == "left" else together[row, : len(prompt)]
        alone = phased.expected(family, recipe, torch.tensor([prompt]), PHASE.rewired(len(prompt)))[0]
        assert oracles.relative_error(own, alone) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prompts_packed_into_a_row_are_what_they_are_alone(family: str) -> None:
    """Positions that begin again tell where a prompt ends, as they tell transformers what a token attends to."""
    model, prompts = phased.shared(family, "ladder"), zoo.prompts(3, 256)
    row = torch.tensor([[token for prompt in prompts for token in prompt]])
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])[None]
    packed = logits_of(model, row, position_ids=positions, use_cache=False)[0]
    for own, prompt in zip(packed.split([len(prompt) for prompt in prompts]), prompts, strict=True):
        alone = phased.expected(family, "ladder", torch.tensor([prompt]), PHASE.rewired(len(prompt)))[0]
        assert oracles.relative_error(own, alone) <= TOLERANCE


def test_the_model_without_its_head_takes_the_same_argument() -> None:
    base, whole = emitted.load(phased.directory("llama", "ladder"), AutoModel), phased.shared("llama", "ladder")
    ids = phased.batch("llama")
    with torch.no_grad():
        for rewired in (None, phased.random_mask(ids)):
            assert torch.equal(base(ids, rewired=rewired)[0], whole.base_model(ids, rewired=rewired)[0])
        embeds = whole.get_input_embeddings()(ids)
        assert torch.equal(whole(inputs_embeds=embeds).logits, whole(ids).logits)
        recorded = whole(ids, output_hidden_states=True).hidden_states
    assert all(state.shape == (2, 21, zoo.HIDDEN) for state in recorded)


# Generation

NEW = 8


@pytest.mark.parametrize(("family", "recipe"), STEPPED)
@pytest.mark.fast("llama-ladder", "llama-2x-sum", "llama-parallel", "gemma2-own-partial", "gpt2-2x-sum")
def test_generated_text_is_what_computing_all_anew_gives(family: str, recipe: str) -> None:
    """Of a left-padded batch, by cache."""
    model, prompts = phased.shared(family, recipe), zoo.prompts(3, 256)
    expected = [phased.greedy(family, recipe, prompt, NEW) for prompt in prompts]
    assert expected != [
        oracles.greedy_oracle(lambda ids: logits_of(zoo.shared(family), ids), [p], NEW) for p in prompts
    ]
    inputs = emitted.left_padded(prompts)
    text = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert text[:, inputs["input_ids"].shape[1] :].tolist() == expected


WAYS: dict[str, dict[str, Any]] = {
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "chunks of the prompt": {"prefill_chunk_size": 5},
    "candidates from the prompt": {"prompt_lookup_num_tokens": 3},
    "candidates of the original": {"assistant_model": "original"},
    "candidates of the model": {"assistant_model": "own"},
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "recipe"), [("llama", "2x-sum"), ("llama", "ladder"), ("gemma2", "ladder")])
@pytest.mark.fast(
    *(f"llama-{recipe}-{way}-{masked}" for recipe in ("ladder",) for way in WAYS for masked in (False, True))
)
def test_every_way_to_generate_gives_the_same(family: str, recipe: str, way: str, masked: bool) -> None:
    model, prompt = phased.shared(family, recipe), zoo.prompts(1, 256)[0] * 2
    ids, options = torch.tensor([prompt]), dict(WAYS[way])
    assistants = {"original": zoo.shared(family), "own": model}
    if "assistant_model" in options:
        options["assistant_model"] = assistants[options["assistant_model"]]
    mask = phased.random_mask(ids) if masked else None
    expected = phased.greedy(family, recipe, prompt, NEW, mask)
    text = model.generate(ids, rewired=mask, max_new_tokens=NEW, do_sample=False, **options)
    assert text[0, len(prompt) :].tolist() == expected


def test_a_prompt_of_embeddings_gives_the_same_text() -> None:
    model, ids = phased.shared("llama", "ladder"), phased.batch("llama")
    options = {"max_new_tokens": NEW, "do_sample": False}
    text = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **options)
    assert text.tolist() == model.generate(ids, **options)[:, ids.shape[1] :].tolist()


def test_beams_have_the_masks_of_their_rows() -> None:
    model, inputs = phased.shared("llama", "ladder"), emitted.left_padded(zoo.prompts(3))
    mask = phased.random_mask(inputs["input_ids"])
    found = {}
    for use_cache in (True, False):
        options = {"num_beams": 3, "max_new_tokens": NEW, "do_sample": False, "use_cache": use_cache}
        found[use_cache] = model.generate(**inputs, rewired=mask, **options).tolist()
        assert found[use_cache] != model.generate(**inputs, **options).tolist()
    assert found[True] == found[False]


def test_a_later_turn_is_exact_unless_it_is_told() -> None:
    """`generate` on a kept cache, with all tokens so far."""
    model, ids = phased.shared("llama", "ladder"), phased.batch("llama", rows=1, length=30)
    first = PHASE.rewired(16)
    for turn in (torch.zeros(1, 14, dtype=torch.bool), phased.random_mask(ids[:, 16:])):
        with torch.no_grad():
            cache = cache_of(model(input_ids=ids[:, :16], use_cache=True))
        mask = torch.cat([first, turn], 1)
        options = {"rewired": mask} if turn.any() else {}
        options |= {cache_argument(model): cache, "max_new_tokens": NEW, "do_sample": False}
        text = model.generate(ids, **options)
        assert text[0, 30:].tolist() == phased.greedy("llama", "ladder", ids[0].tolist(), NEW, mask)


def test_a_compiled_step_with_a_preallocated_cache() -> None:
    torch._dynamo.reset()
    model, ids = phased.shared("llama", "2x-sum"), phased.batch("llama", length=20)
    expected = phased.expected("llama", "2x-sum", ids, PHASE.rewired(20, prompt=16).expand(ids.shape))
    cache = StaticCache(model.config, max_cache_len=32)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = [logits_of(model, ids[:, :16], **{cache_argument(model): cache})]
    for place in range(16, 20):
        found.append(logits_of(compiled, ids[:, place : place + 1], **{cache_argument(model): cache}))
    assert oracles.relative_error(torch.cat(found, 1), expected) <= TOLERANCE


# Training, precision, placement


@pytest.mark.parametrize("recipe", ["ladder", "2x-sum", "parallel"])
def test_gradients_with_and_without_checkpointing(recipe: str) -> None:
    ids, found = phased.batch("llama"), []
    for checkpointing in (False, True):
        model = emitted.load(phased.directory("llama", recipe)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss
        loss.backward()
        found.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    (one, plain), (other, again) = found
    expected = phased.expected("llama", recipe, ids, PHASE.rewired(21).expand(ids.shape))
    wanted = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(one, wanted)
    assert torch.equal(one, other)
    assert all(torch.equal(plain[name], again[name]) for name in plain if plain[name] is not None)
    assert sum(gradient is not None for gradient in plain.values()) >= len(plain) - 1


@pytest.mark.parametrize("recipe", ["ladder", "2x-sum", "parallel"])
def test_bf16(recipe: str) -> None:
    ids, original = phased.batch("llama"), emitted.load(emitted.source("llama"), dtype=torch.bfloat16)
    model = emitted.load(phased.directory("llama", recipe), dtype=torch.bfloat16)
    mask = phased.random_mask(ids)
    exact, mixed = logits_of(model, ids, rewired=torch.zeros_like(mask)), logits_of(model, ids, rewired=mask)
    assert mixed.dtype == torch.bfloat16
    if recipe in phased.UNBOUND:
        assert torch.equal(exact, logits_of(original, ids))
    assert oracles.relative_error(mixed.float(), phased.expected("llama", recipe, ids, mask)) <= 5e-2


def test_layers_that_are_offloaded(tmp_path: Path) -> None:
    places: dict[str, Any] = {"model.layers.2": "disk"}
    places |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    places |= {f"model.layers.{index}": "cpu" for index in (0, 1, 3)}
    model = emitted.load(phased.directory("llama", "ladder"), device_map=places, offload_folder=tmp_path)
    ids = phased.batch("llama")
    mask = phased.random_mask(ids)
    assert torch.equal(
        logits_of(model, ids, rewired=mask), logits_of(phased.shared("llama", "ladder"), ids, rewired=mask)
    )


# The files


def test_the_files_say_what_they_do(tmp_path: Path) -> None:
    for recipe in phased.RECIPES:
        files = emit_huggingface(phased.program("llama", recipe))
        assert files.config["rewriter_phase"] == {"exact_tail": 3, "exact_head": 2}
        everywhere = emit_huggingface(phased.program("llama", recipe, phased=False)).config
        of_the_wiring = ("rewriter_delays", "rewriter_norms", "rewriter_pattern", "rewriter_modes", "rewriter_ranks")
        assert [files.config.get(key) for key in of_the_wiring] == [everywhere.get(key) for key in of_the_wiring]
        assert "for exact ones it computes what LlamaDecoderLayer computes." in " ".join(files.modeling.split())
        (tmp_path / f"{recipe.replace('-', '_')}.py").write_text(files.modeling)
    emitted.assert_clean(tmp_path)


def test_layers_that_are_not_rewired_stay_the_sources() -> None:
    model = phased.shared("llama", "drop-sync")
    assert [type(layer).__name__ for layer in model.model.layers][::3] == ["LlamaDecoderLayer"] * 2
    seen: list[set[str]] = []
    ids = phased.batch("llama")
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda m, args, kwargs: seen.append({*kwargs}), with_kwargs=True)
        for layer in model.model.layers
    ]
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 4
    assert all("rewired" not in names for names in seen)


def test_masks_that_do_not_fit_are_refused() -> None:
    model, ids = phased.shared("llama", "ladder"), phased.batch("llama")
    with pytest.raises(ValueError, match=r"rewired is torch.bool \[2, 20\]; expected a tensor, bool \[2, 21\]"):
        logits_of(model, ids, rewired=torch.ones(2, 20, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"rewired is torch.int64"):
        logits_of(model, ids, rewired=torch.ones_like(ids))
    square = torch.ones(2, 1, 21, 21, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"attention_mask is not \[B, S\].* pass rewired="):
        logits_of(model, ids, attention_mask=square)
    for wrong, message in ((ids, r"rewired is torch.int64"), ([True], "rewired is list"), (ids[:1] > 0, r"\[1, 21\]")):
        with pytest.raises(ValueError, match=message + ".*expected a tensor, bool .*given to generate"):
            model.generate(ids, rewired=wrong, max_new_tokens=2)
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([row.tolist() for row in ids])


WRONG_ENDS = [(0, 0), (1, -1), (True, 0), (2.5, 0), ("3", 0), (1, "0")]


@pytest.mark.parametrize(
    "phase",
    [None, "prompt", {"exact_tail": 1}, *({"exact_tail": tail, "exact_head": head} for tail, head in WRONG_ENDS)],
)
def test_a_config_that_does_not_say_which_tokens_is_refused(phase: Any) -> None:
    model = phased.shared("llama", "ladder")
    config = model.config.__class__.from_dict(model.config.to_dict() | {"rewriter_phase": phase})
    with pytest.raises(ValueError, match=r"config\.rewriter_phase is .*; expected exact_tail"):
        type(model)(config)


def test_a_model_that_hands_nothing_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = type(zoo.shared("llama").model).forward

    def without_keywords(self: Any, *args: Any, rewired: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(zoo.shared("llama").model), "forward", without_keywords)
    with pytest.raises(RewriterError, match="LlamaForCausalLM does not hand on the argument `rewired`"):
        emit_huggingface(phased.program("llama", "ladder"))


# Seeded faults: what a wrong rewrite would emit must fail the comparisons above


def shifted(mask: torch.Tensor) -> torch.Tensor:
    return mask.roll(1, dims=1)


def inverted(mask: torch.Tensor) -> torch.Tensor:
    return ~mask


@pytest.mark.parametrize("fault", [shifted, inverted])
@pytest.mark.parametrize("recipe", LLAMA)
def test_wrong_masks_show(recipe: str, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ids = phased.batch("llama")
    mask = PHASE.rewired(21).expand(ids.shape)
    logits = logits_of(phased.shared("llama", recipe), ids, rewired=fault(mask))
    assert oracles.relative_error(logits, phased.expected("llama", recipe, ids, mask)) >= 1e-2


@pytest.mark.parametrize("recipe", LLAMA)
def test_a_layer_that_is_not_told_shows(recipe: str) -> None:
    model, ids = emitted.load(phased.directory("llama", recipe)), phased.batch("llama")
    mask = phased.random_mask(ids)
    expected = phased.expected("llama", recipe, ids, mask)

    def exact(layer: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"rewired": torch.zeros_like(kwargs["rewired"])}

    hook = model.model.layers[1].register_forward_pre_hook(exact, with_kwargs=True)
    assert oracles.relative_error(logits_of(model, ids, rewired=mask), expected) >= 1e-2
    hook.remove()
    del_it = lambda layer, args, kwargs: (args, {n: v for n, v in kwargs.items() if n != "rewired"})  # noqa: E731
    model.model.layers[1].register_forward_pre_hook(del_it, with_kwargs=True)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'rewired'"):
        logits_of(model, ids, rewired=mask)


@pytest.mark.parametrize("recipe", LLAMA)
def test_exchanged_wirings_show(recipe: str, tmp_path: Path) -> None:
    def exchange(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if n.target is ops.where_rewired)
        mask, rewired, exact = args_of(node)
        node.args = (mask, exact, rewired)

    faulty = emitted.edited(single_device(phased.program("llama", recipe)), exchange)
    emitted.write(emit_as_wired(faulty), emitted.source("llama"), tmp_path / "out")
    ids = phased.batch("llama")
    mask = phased.random_mask(ids)
    logits = logits_of(emitted.load(tmp_path / "out"), ids, rewired=mask)
    assert oracles.relative_error(logits, phased.expected("llama", recipe, ids, mask)) >= 1e-2
