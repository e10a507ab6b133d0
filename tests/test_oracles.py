"""Proofs that the references can be trusted: the zoo is sensitive and well conditioned, the oracles agree with Alg. 1.

Alg. 1 of the Ladder Residual paper is written out twice here, with none of the oracle's hooks: as a state machine
over Hugging Face's submodules for every family, and for Llama down to plain tensors.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from oracles import greedy_oracle, is_parallel, ladder_logits, ladder_oracle, layers_of, relative_error
from safetensors import safe_open
from torch.nn.functional import linear, silu, softmax
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

# The oracle and Alg. 1 run the same kernels on the same values: what is left is the order of additions.
SAME = 2e-6
DIFFERENT = 1e-2

Branch = Callable[[torch.Tensor], torch.Tensor]
SELECTIONS = tuple(zoo.selections(4))


class Case(NamedTuple):
    """A model of the zoo, ids (2, 100) beyond its windows, and the ladder layers under test."""

    model: PreTrainedModel
    ids: torch.Tensor
    layers: set[int]


def case(family: str, selection: str = "all") -> Case:
    model = zoo.shared(family)
    depth = len(layers_of(model))
    return Case(model, zoo.batch(2, 100, model.config.vocab_size), zoo.selections(depth)[selection])


@functools.cache
def original(family: str) -> torch.Tensor:
    with torch.no_grad():
        return zoo.shared(family)(case(family).ids, use_cache=False).logits


# --- Alg. 1, from the submodules of any family -------------------------------------------------------------------


def branches(model: PreTrainedModel, ids: torch.Tensor) -> Iterator[tuple[Branch, Branch]]:
    """Per layer, what attention and what the MLP writes for a given stream: entry norm, block, norm in the branch.

    Masks and rotary tables are those which the original model hands to its own attention for `ids`.
    """
    children = [dict(layer.named_children()) for layer in layers_of(model)]
    attentions = [names.get("self_attn") or names.get("attention") or names["attn"] for names in children]
    handed: dict[torch.nn.Module, dict[str, Any]] = {}

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert len(args) <= 1, "attention is handed more than the stream by position"
        handed[module] = {name: value for name, value in kwargs.items() if name != "hidden_states"}

    handles = [attention.register_forward_pre_hook(record, with_kwargs=True) for attention in attentions]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()

    for names, attention in zip(children, attentions, strict=True):

        def attend(x: torch.Tensor, attention: torch.nn.Module = attention) -> torch.Tensor:
            return attention(hidden_states=x, **handed[attention])[0]

        if "ln_1" in names:
            yield chain(names["ln_1"], attend), chain(names["ln_2"], names["mlp"])
        elif "pre_feedforward_layernorm" in names:
            yield (
                chain(names["input_layernorm"], attend, names["post_attention_layernorm"]),
                chain(names["pre_feedforward_layernorm"], names["mlp"], names["post_feedforward_layernorm"]),
            )
        elif "post_feedforward_layernorm" in names:
            yield (
                chain(attend, names["post_attention_layernorm"]),
                chain(names["mlp"], names["post_feedforward_layernorm"]),
            )
        else:
            yield chain(names["input_layernorm"], attend), chain(names["post_attention_layernorm"], names["mlp"])


def chain(*modules: Branch) -> Branch:
    return lambda x: functools.reduce(lambda value, module: module(value), modules, x)


def algorithm_1(
    blocks: Sequence[tuple[Branch, Branch]], layers: Collection[int], x: torch.Tensor, fault: str = ""
) -> torch.Tensor:
    """Alg. 1 over (residual, pending_attn, pending_mlp), returning the drained stream before the final norm.

    A standard layer drains, and leaves its own MLP in flight. `fault` is one mistake to make: "drained" adds that MLP
    before a ladder layer follows; "swapped" exchanges the waits of attention and MLP.
    """
    residual, pending_attn, pending_mlp = x, torch.zeros_like(x), torch.zeros_like(x)
    for number, (attention, mlp) in enumerate(blocks):
        if number in layers:
            if fault == "swapped":
                pending_attn, pending_mlp = pending_mlp, pending_attn
            residual = residual + pending_attn
            a = attention(residual)
            residual = residual + pending_mlp
            m = mlp(residual)
            pending_attn, pending_mlp = a, m
        else:
            residual = residual + pending_attn + pending_mlp
            residual = residual + attention(residual)
            pending_attn, pending_mlp = torch.zeros_like(x), mlp(residual)
            if fault == "drained":
                residual, pending_mlp = residual + pending_mlp, torch.zeros_like(x)
    return residual + pending_attn + pending_mlp


def algorithm_1_parallel(
    blocks: Sequence[tuple[Branch, Branch]], layers: Collection[int], x: torch.Tensor, fault: str = ""
) -> torch.Tensor:
    """One block per layer: x_{i+1} = h_{i+1}(x_{i-1}) + x_i, as (residual, pending) with one write in flight."""
    residual, pending = x, torch.zeros_like(x)
    for number, (attention, mlp) in enumerate(blocks):
        read = residual if number in layers else residual + pending
        residual = residual + pending
        pending = attention(read) + mlp(read)
        if fault == "drained" and number not in layers:
            residual, pending = residual + pending, torch.zeros_like(x)
    return residual + pending


@torch.no_grad()
def second_opinion(given: Case, fault: str = "") -> torch.Tensor:
    """Logits by Alg. 1, between the original model's own embedding and its own final norm and head."""
    model, ids, layers = given
    streams = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    algorithm = algorithm_1_parallel if is_parallel(model) else algorithm_1
    stream = algorithm(list(branches(model, ids)), layers, streams[0], fault)
    children = dict(model.base_model.named_children())
    norm = children.get("norm") or children.get("final_layer_norm") or children["ln_f"]
    logits = model.get_output_embeddings()(norm(stream))
    if cap := getattr(model.config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits


# --- Alg. 1, Llama in plain tensors -----------------------------------------------------------------------------


def plain_llama(
    weights: Mapping[str, torch.Tensor], config: Any, layers: Collection[int], ids: torch.Tensor
) -> torch.Tensor:
    """The Llama ladder from the tensors of its checkpoint: no Hugging Face module takes part."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    positions = torch.arange(ids.shape[1])
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    visible = positions[None, :] <= positions[:, None]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return weights[name] * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def split(x_BSE: torch.Tensor, count: int) -> torch.Tensor:
        return x_BSE.unflatten(-1, (count, size)).transpose(1, 2).repeat_interleave(heads // count, dim=1)

    def rotate(x_BHSD: torch.Tensor) -> torch.Tensor:
        first, second = x_BHSD.chunk(2, -1)
        return x_BHSD * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def layer(number: int) -> tuple[Branch, Branch]:
        at = f"model.layers.{number}."

        def project(x: torch.Tensor, name: str) -> torch.Tensor:
            return linear(x, weights[f"{at}{name}.weight"])

        def attention(stream: torch.Tensor) -> torch.Tensor:
            x = norm(stream, f"{at}input_layernorm.weight")
            q = rotate(split(project(x, "self_attn.q_proj"), heads))
            k = rotate(split(project(x, "self_attn.k_proj"), kv_heads))
            v = split(project(x, "self_attn.v_proj"), kv_heads)
            scores = (q @ k.transpose(-1, -2) / size**0.5).masked_fill(~visible, float("-inf"))
            return project((softmax(scores, -1) @ v).transpose(1, 2).flatten(2), "self_attn.o_proj")

        def mlp(stream: torch.Tensor) -> torch.Tensor:
            x = norm(stream, f"{at}post_attention_layernorm.weight")
            return project(silu(project(x, "mlp.gate_proj")) * project(x, "mlp.up_proj"), "mlp.down_proj")

        return attention, mlp

    embedding = weights["model.embed_tokens.weight"][ids]
    stream = algorithm_1([layer(number) for number in range(config.num_hidden_layers)], layers, embedding)
    return linear(norm(stream, "model.norm.weight"), weights["lm_head.weight"])


# --- The ladder oracle --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_with_no_ladder_layer_the_oracle_is_the_original_to_the_bit(family: str) -> None:
    given = case(family)
    assert torch.equal(ladder_logits(given.model, set(), given.ids), original(family))


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_oracle_differs_from_the_original_and_equals_algorithm_1(family: str, selection: str) -> None:
    given = case(family, selection)
    oracle = ladder_logits(given.model, given.layers, given.ids)
    assert relative_error(oracle, original(family)) >= DIFFERENT
    assert relative_error(second_opinion(given), oracle) <= SAME


@pytest.mark.parametrize("selection", ["upper-half", "scattered"])
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_draining_before_the_first_ladder_layer_is_a_different_function(family: str, selection: str) -> None:
    given = case(family, selection)
    drained = second_opinion(given, fault="drained")
    assert relative_error(drained, ladder_logits(given.model, given.layers, given.ids)) >= DIFFERENT


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("family", [name for name in zoo.FAMILIES if not is_parallel(zoo.shared(name))])
def test_attention_and_mlp_exchanged_is_a_different_function(family: str, selection: str) -> None:
    given = case(family, selection)
    swapped = second_opinion(given, fault="swapped")
    assert relative_error(swapped, ladder_logits(given.model, given.layers, given.ids)) >= DIFFERENT


@pytest.mark.parametrize("selection", ["none", *SELECTIONS])
def test_the_oracle_equals_algorithm_1_in_plain_tensors(selection: str) -> None:
    given = case("llama") if selection == "none" else case("llama", selection)
    layers = set() if selection == "none" else given.layers
    plain = plain_llama(given.model.state_dict(), given.model.config, layers, given.ids)
    assert relative_error(plain, ladder_logits(given.model, layers, given.ids)) <= SAME


def test_hooks_are_gone_after_the_with_even_when_it_raises() -> None:
    given = case("llama")
    with pytest.raises(RuntimeError, match="inside"), ladder_oracle(given.model, given.layers):
        raise RuntimeError("inside")
    with torch.no_grad():
        assert torch.equal(given.model(given.ids, use_cache=False).logits, original("llama"))


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers \[4\]: the model has 4"):
        ladder_logits(zoo.shared("llama"), {3, 4}, zoo.batch())


def test_positions_and_mask_reach_the_model() -> None:
    """A row padded on the left, with its mask and positions, has the logits of the row alone."""
    given = case("gemma3_text")
    row, padding = given.ids[:1, :30], 5
    padded = torch.cat([torch.zeros(1, padding, dtype=torch.int64), row], dim=1)
    mask = (torch.arange(padded.shape[1]) >= padding).long()[None]
    positions = (torch.arange(padded.shape[1]) - padding).clamp(min=0)[None]
    logits = ladder_logits(given.model, given.layers, padded, position_ids=positions, attention_mask=mask)
    assert relative_error(logits[:, padding:], ladder_logits(given.model, given.layers, row)) <= SAME


def test_gradients_flow_through_the_stale_reads() -> None:
    """The derivative of the oracle in the embedding is that of Alg. 1 in plain tensors."""
    given = case("llama", "scattered")
    weights = {name: value.detach().clone() for name, value in given.model.state_dict().items()}
    embedding = weights["model.embed_tokens.weight"].requires_grad_()
    plain_llama(weights, given.model.config, given.layers, given.ids).square().mean().backward()
    parameter = given.model.get_input_embeddings().weight
    with ladder_oracle(given.model, given.layers) as model:
        (gradient,) = torch.autograd.grad(model(given.ids, use_cache=False).logits.square().mean(), parameter)
    assert embedding.grad is not None
    # Token 0 pads: Hugging Face drops its gradient, and it never occurs.
    assert relative_error(gradient, embedding.grad) <= 10 * SAME


# --- The greedy oracle --------------------------------------------------------------------------------------------


def continuations(family: str, layers: Collection[int], n: int) -> tuple[list[list[int]], list[list[int]]]:
    model = zoo.shared(family)
    prompts = zoo.prompts(8, model.config.vocab_size)
    return prompts, greedy_oracle(lambda ids: ladder_logits(model, layers, ids), prompts, n)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_recomputation_equals_generate_with_its_cache_under_the_hooks(family: str) -> None:
    given = case(family, "scattered")
    prompts, expected = continuations(family, given.layers, 24)
    for row in (0, 7):
        ids = torch.tensor([prompts[row]])
        with ladder_oracle(given.model, given.layers) as model:
            text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert text[0, ids.shape[1] :].tolist() == expected[row]


def test_filling_up_on_the_right_changes_nothing() -> None:
    model = zoo.shared("mixtral")
    prompts, expected = continuations("mixtral", {1, 3}, 8)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert greedy_oracle(lambda ids: ladder_logits(model, {1, 3}, ids), [prompt], 8) == [tokens]


# --- The zoo ------------------------------------------------------------------------------------------------------


class InDouble(TorchFunctionMode):
    """Every request for float32 means float64: Hugging Face's norms, softmaxes and routers ask for it by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if v is torch.float32 else v for name, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_float32_is_ten_times_more_exact_than_the_tests_demand(family: str) -> None:
    given = case(family)
    double = zoo.build(family, dtype=torch.float64)
    for layers in (set(), given.layers):
        with InDouble():
            exact = ladder_logits(double, layers, given.ids)
        assert exact.dtype == torch.float64
        assert relative_error(ladder_logits(given.model, layers, given.ids), exact) <= 1e-6


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_parameter_shows_in_the_logits(family: str) -> None:
    """Rolled by one place, each parameter changes the logits: none may be lost, exchanged or left at its default."""
    model = zoo.build(family)
    ids = torch.arange(2, 42)[None]
    expected = ladder_logits(model, set(), ids)
    for name, parameter in model.named_parameters():
        kept = parameter.data
        parameter.data = kept.roll(1, dims=-1)
        assert relative_error(ladder_logits(model, set(), ids), expected) >= 1e-3, name
        parameter.data = kept


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_windows_end_inside_the_shortest_test(family: str) -> None:
    model = zoo.build(family)
    ids = zoo.batch(2, 21, model.config.vocab_size)
    expected = ladder_logits(model, set(), ids)
    config = model.config
    config.sliding_window += 1
    wider = type(model)._from_config(config, attn_implementation="eager")
    wider.load_state_dict(model.state_dict())
    assert relative_error(ladder_logits(wider.eval(), set(), ids), expected) >= DIFFERENT


@pytest.mark.parametrize(
    ("family", "selection"),
    [
        pytest.param(family, selection, marks=() if selection == "all" else pytest.mark.slow)
        for family in zoo.FAMILIES
        for selection in SELECTIONS
    ],
)
def test_no_choice_of_the_long_texts_is_closer_than_rounding(family: str, selection: str) -> None:
    """Over 64 greedy tokens of 8 prompts, neither the best token nor the last chosen expert is a near tie.

    And the texts move: a model that repeats one token would hide wrong positions and caches.
    """
    given = case(family, selection)
    prompts, texts = continuations(family, given.layers, 64)
    ties: list[float] = []

    def record(router: Any, _: Any, output: Any) -> None:
        ranked = output[0].sort(-1, descending=True).values
        ties.append(float((ranked[:, router.top_k - 1] - ranked[:, router.top_k]).min() / ranked.std()))

    routers = [module for module in given.model.modules() if type(module).__name__.endswith("Router")]
    handles = [router.register_forward_hook(record) for router in routers]
    for prompt, text in zip(prompts, texts, strict=True):
        logits = ladder_logits(given.model, given.layers, torch.tensor([prompt + text]))[0, len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.unbind(-1)
        ties.append(float((best - second).min() / logits.abs().max()))
    for handle in handles:
        handle.remove()
    assert min(ties) >= 1e-5
    assert bool(routers) == ("moe" in family or family == "mixtral")
    assert sum(len(set(text)) for text in texts) >= 8 * 8


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_saved_model_loads_as_the_same_model(family: str, tmp_path: Path) -> None:
    model = zoo.save(family, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    ids = case(family).ids
    assert relative_error(ladder_logits(loaded, set(), ids), ladder_logits(model, set(), ids)) <= SAME
    assert (tmp_path / "generation_config.json").exists()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model.config.model_type


def test_mixtral_lies_on_disk_expert_by_expert(tmp_path: Path) -> None:
    zoo.save("mixtral", tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names
    assert not any(name.endswith("gate_up_proj") for name in names)


def test_weights_depend_on_the_seed_and_leave_the_callers_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = zoo.build("gpt2"), zoo.build("gpt2"), zoo.build("gpt2", seed=1)
    assert torch.equal(torch.rand(3), expected)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name


def test_prompts_are_distinct_and_of_different_lengths() -> None:
    for vocab in (256, 259, 320):
        prompts = zoo.prompts(8, vocab)
        assert len({len(prompt) for prompt in prompts}) == len(prompts) == 8
        assert all(len(set(prompt)) == len(prompt) >= 16 for prompt in prompts)
        assert all(1 < token < vocab for prompt in prompts for token in prompt)
