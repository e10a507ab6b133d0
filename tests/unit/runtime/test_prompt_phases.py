"""Which calls compute a prompt whose tokens have two phases, and what a module takes for granted where nothing is said.

On one rank, in fp64. `tests/ranks/test_phased_modules.py` has several.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import zoo
from emitted_ranks import PAD, build
from oracles import relative_error
from programs import MERGE, OVERLAP, runtime_case, tensor_parallel, traced, weights

from rewriter.common.errors import RewriterError
from rewriter.ir.phases import PromptPhase
from rewriter.ir.simulate import simulate
from rewriter.passes.phases import both_wirings
from rewriter.runtime import Context, StaticCache, generate, store_keys
from rewriter.runtime.generation import decode_step
from rewriter.runtime.generation.decode_step import DecodeState
from rewriter.runtime.generation.prompt import Call, prompt_calls

PHASE, SAME, NEW_TOKENS = PromptPhase(exact_tail=3, exact_head=2), 1e-5, 5
PROGRAM = tensor_parallel(
    traced("llama"), 1, MERGE, ("ladder", {"phase": "prompt", "exact_tail": 3, "exact_head": 2}), OVERLAP
)
FULL = {name: tensor.double() for name, tensor in weights("llama").items()}
PROMPTS = [prompt[:n] for prompt, n in zip(zoo.prompts(4, 256), (21, 4, 9, 14), strict=False)]


def module(edit: Callable[[str], str] = lambda text: text) -> Any:
    source, tensors, ties = runtime_case(PROGRAM, FULL)
    return build(edit(source), tensors[0], ties, None)


def wrong_calls(calls: Sequence[Call], length: int, chunk: int | None, first: Sequence[int], prompt: int) -> str:
    """The fault of the calls, by the definition of a phase, token by token; "" where nothing is."""
    if [call.start for call in calls] != [0, *(call.end for call in calls[:-1])] or calls[-1].end != length:
        return "not all tokens in order"
    if chunk is not None and any(call.end - call.start > chunk for call in calls):
        return "a call of too many tokens"
    for call in calls:
        for row, padding in enumerate(first):
            for token in range(max(call.start, padding), call.end):
                rewired = padding + PHASE.exact_head <= token < prompt - PHASE.exact_tail
                said = call.rewired if isinstance(call.rewired, bool) else bool(call.rewired[row, token - call.start])
                if said != rewired:
                    return f"token {token} of row {row}"
    return ""


def drawn(seed: int) -> tuple[int, int | None, list[int], int]:
    draw = random.Random(seed)
    length = draw.randint(1, 30)
    first = [0, *(draw.randint(0, length - 1) for _ in range(draw.randint(0, 3)))]
    return length, draw.choice([None, 1, 4, 7]), first, draw.choice([length, draw.randint(max(first) + 1, length)])


@pytest.mark.parametrize("seed", range(60))
def test_calls_take_every_token_by_its_phase(seed: int) -> None:
    length, chunk, first, prompt = drawn(seed)
    calls = prompt_calls(length, chunk, PHASE, torch.tensor(first), prompt)
    assert wrong_calls(calls, length, chunk, first, prompt) == ""
    whole = prompt_calls(length, None, PHASE, torch.tensor(first), prompt, whole=True)
    assert wrong_calls(whole, length, None, first, prompt) == ""
    assert len(whole) <= 2


def test_calls_of_another_phase_are_found() -> None:
    for other, prompt in ((PromptPhase(4, 2), 20), (PromptPhase(3, 1), 20), (PHASE, 19)):
        calls = prompt_calls(20, 8, other, torch.tensor([0, 3]), prompt)
        assert wrong_calls(calls, 20, 8, [0, 3], 20) != ""


def test_pure_calls_where_rows_are_in_one_place() -> None:
    """With padding too, where no first tokens stay exact: nothing sees what is computed on padding."""
    calls = prompt_calls(20, 8, PromptPhase(1), torch.tensor([0, 5]))
    assert calls == [Call(0, 8, True), Call(8, 16, True), Call(16, 19, True), Call(19, 20, False)]
    assert prompt_calls(20, 8) == [Call(0, 8), Call(8, 16), Call(16, 20)]


# --- generation, logit by logit


def recorded(model: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """(tokens of PROMPTS, the logits [B, tokens, V] that they were chosen by)."""
    logits: list[torch.Tensor] = []
    choose = DecodeState.choose

    def note(self: DecodeState, logits_BV: torch.Tensor) -> None:
        logits.append(logits_BV.clone())
        choose(self, logits_BV)

    with monkeypatch.context() as patched:
        patched.setattr(DecodeState, "choose", note)
        tokens = generate(model, PROMPTS, NEW_TOKENS, pad_token_id=PAD, **options)
    return tokens, torch.stack(logits, 1)


def error(tokens: list[list[int]], logits: torch.Tensor) -> float:
    """The largest error of a row's logits: each row alone, recomputed."""
    both, errors = both_wirings(PROGRAM), []
    for prompt, new, found in zip(PROMPTS, tokens, logits, strict=True):
        ids = torch.tensor([[*prompt, *new]])
        mask = PHASE.rewired(ids.shape[1], prompt=len(prompt))
        with torch.no_grad():
            expected = simulate(both, ids, weights=FULL, rewired=mask)[0, len(prompt) - 1 : -1]
        errors.append(relative_error(found, expected))
    return max(errors)


OPTIONS = [{"prefill_chunk": None}, {"prefill_chunk": 1}, {"prefill_chunk": 6}, {"use_cache": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logits_of_generation_are_those_of_a_prompt_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error(*recorded(module(), monkeypatch, **options)) <= SAME


def test_a_model_that_depends_on_the_length_has_its_prompt_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = module()
    model.by_length = True
    assert error(*recorded(model, monkeypatch)) <= SAME


def test_keys_that_are_computed_anew_keep_their_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where rotary frequencies change with the length: what was generated stays exact."""
    model = module()
    model.renewed_after = max(map(len, PROMPTS)) + 2
    assert error(*recorded(model, monkeypatch)) <= SAME


@pytest.mark.parametrize(("said", "instead"), [("exact_tail=3", "exact_tail=2"), ("exact_head=2", "exact_head=3")])
def test_ends_that_are_off_by_one_are_seen(said: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = module(lambda text: text.replace(said, instead))
    assert error(*recorded(model, monkeypatch)) > 100 * SAME


def test_a_prompt_token_that_counts_as_generated_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fewer(length: int, chunk: int | None, phase: Any, padding: Any, prompt: int, **rest: Any) -> list[Call]:
        return prompt_calls(length, chunk, phase, padding, prompt - 1, **rest)

    monkeypatch.setattr(decode_step, "prompt_calls", fewer)
    assert error(*recorded(module(), monkeypatch)) > 100 * SAME


def test_a_rewired_decode_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = module(lambda text: text.replace("def compute_exact(", "def unused(", 1))
    type(model).compute_exact = type(model).compute_rewired
    assert error(*recorded(model, monkeypatch)) > 100 * SAME


# --- what is taken for granted, and refused


def test_segments_are_prompts_of_their_own() -> None:
    model, ids = module(), zoo.batch(2, 21, 256)
    segments = torch.tensor([[0] * 9 + [1] * 12, [0] * 4 + [1] * 4 + [2] * 13])
    with torch.no_grad():
        packed = model(ids, ctx=Context(segment_ids=segments))
        for row, bounds in ((0, (0, 9, 21)), (1, (0, 4, 8, 21))):
            for start, end in itertools.pairwise(bounds):
                assert relative_error(packed[row : row + 1, start:end], model(ids[row : row + 1, start:end])) <= SAME
        first = torch.tensor([3, 0])
        padded = model(ids, ctx=Context(segment_ids=segments, first_valid=first))
        assert relative_error(padded[:1, 3:9], model(ids[:1, 3:9])) <= SAME


def test_a_mask_of_another_kind_is_refused() -> None:
    model, ids = module(), zoo.batch(2, 8, 256)
    for mask in (torch.ones(2, 8), torch.ones(2, 7, dtype=torch.bool), torch.ones(8, dtype=torch.bool)):
        with pytest.raises(RewriterError, match=r"rewired: .* expected bool \[2, 8\]"):
            model(ids, ctx=Context(rewired=mask))
    source, tensors, ties = runtime_case(tensor_parallel(traced("llama"), 1), FULL)
    with pytest.raises(RewriterError, match="computes all tokens alike: leave rewired out"):
        build(source, tensors[0], ties, None)(ids, ctx=Context(rewired=True))


def test_a_call_without_logits_needs_a_cache() -> None:
    model, ids = module(), zoo.batch(1, 8, 256)
    with pytest.raises(RewriterError, match="logits_to_keep=None only fills a cache"):
        model(ids, logits_to_keep=None)
    with pytest.raises(RewriterError, match="slot 0 without a cache"):
        store_keys(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), Context(), slot=0)


@torch.no_grad()
def test_keys_alone_are_the_same_bits_and_no_last_block_runs() -> None:
    model, ids = module(), zoo.batch(2, 12, 256)
    called: list[str] = []
    for name, part in model.named_modules():
        part.register_forward_hook(lambda *_, name=name: called.append(name))
    caches = []
    for wanted in (0, None):
        called.clear()
        cache = StaticCache(model.slots, 2, 12, torch.float64)
        result = model(ids, ctx=Context(cache, rewired=True), logits_to_keep=wanted)
        assert (result is None) == (wanted is None)
        caches.append([*cache.keys, *cache.values])
    assert all(map(torch.equal, *caches))
    # a ladder's last attention does not read what the block before it wrote either
    left_out = ("lm_head", "model.norm", "model.layers.3.mlp", "model.layers.3.self_attn.q_proj", "model.layers.2.mlp")
    assert "model.layers.3.self_attn.k_proj" in called
    assert not set(left_out) & set(called)
