"""Proofs that the references can be trusted: the oracles agree with Alg. 1 and see its seeded faults.

Alg. 1 of the Ladder Residual paper is written out twice here, with none of the oracle's hooks: as a state machine
over Hugging Face's submodules for every family, and for Llama down to plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from oracles import greedy_oracle, is_parallel, ladder_logits, ladder_oracle, layers_of, relative_error
from torch.nn.functional import linear, silu, softmax
from transformers import PreTrainedModel

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


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_recomputation_equals_generate_with_its_cache_under_the_hooks(family: str) -> None:
    given = case(family, "scattered")
    prompts = zoo.prompts(8, given.model.config.vocab_size)
    expected = greedy_oracle(lambda ids: ladder_logits(given.model, given.layers, ids), prompts, 24)
    for row in (0, 7):
        ids = torch.tensor([prompts[row]])
        with ladder_oracle(given.model, given.layers) as model:
            text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert text[0, ids.shape[1] :].tolist() == expected[row]


def test_filling_up_on_the_right_changes_nothing() -> None:
    def forward(ids: torch.Tensor) -> torch.Tensor:
        return ladder_logits(zoo.shared("mixtral"), {1, 3}, ids)

    prompts = zoo.prompts()
    for prompt, tokens in zip(prompts, greedy_oracle(forward, prompts, 8), strict=True):
        assert greedy_oracle(forward, [prompt], 8) == [tokens]
