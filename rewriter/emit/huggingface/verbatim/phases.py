"""Further contents of a generated file of a model whose wiring rewires tokens of the prompt alone: which those are.

B: batch, S: tokens of a call.
"""

import functools
import inspect

import torch

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "cache_params", "layer_past")


def rewired_tokens(phase, tokens, arguments):
    """bool [B, S], True for the tokens of a call that are rewired where the caller does not say which.

    `tokens` are its ids [B, S] or embeddings [B, S, D], `arguments` all arguments of the model by name. With an empty
    cache, or none, every row is a prompt: between `exact_head` tokens at its beginning and `exact_tail` at its end, its
    tokens are rewired; `attention_mask` [B, S] says where a row is padded. Without a mask, a row packs as many prompts
    as its `position_ids` [B, S] begin again. With a cache that holds tokens already, none is rewired: those of the call
    are generated, or candidates, or of a later turn.
    """
    index = torch.arange(tokens.shape[1], device=tokens.device)
    first, end = 0, tokens.shape[1]
    cached = cached_tokens(arguments)
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        valid = mask[:, : tokens.shape[1]].to(tokens.device, torch.int64)
        first, end = valid.argmax(-1, keepdim=True), end - valid.flip(-1).argmax(-1, keepdim=True)
    elif mask is not None and cached == 0:
        raise ValueError(
            "attention_mask is not [B, S], and does not say where a row is padded: pass rewired=, bool [B, S], True "
            "for the tokens of the prompt that are rewired"
        )
    elif isinstance(positions, torch.Tensor) and positions.dim() == 2 and positions.shape[1] == tokens.shape[1]:
        begins = torch.nn.functional.pad(positions.to(tokens.device).diff(dim=-1) != 1, (1, 0), value=True)
        first = torch.where(begins, index, 0).cummax(-1).values
        ends = torch.nn.functional.pad(torch.where(begins, index, end)[:, 1:], (0, 1), value=end)
        end = ends.flip(-1).cummin(-1).values.flip(-1)
    inside = (index >= first + phase["exact_head"]) & (index < end - phase["exact_tail"])
    return inside.expand(tokens.shape[:2]) & (cached == 0)


def cached_tokens(arguments):
    """The number of tokens in the cache of a call, an int or a tensor; of one that does not say how many, 1."""
    cache = next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)
    if cache is None:
        return 0
    layers = getattr(cache, "layers", None)
    if layers and not any(hasattr(layer, "get_seq_length") for layer in layers):
        return int(cache.has_previous_state())  # of recurrent layers alone
    return cache.get_seq_length() if hasattr(cache, "get_seq_length") else 1


def tell_layers(model, layers):
    """Let `model` pass `rewired` to those of its decoder layers that take it, and to nothing else."""
    phase = model.config.rewriter_phase
    ends = [phase.get(name) if isinstance(phase, dict) else None for name in ("exact_tail", "exact_head")]
    if any(type(end) is not int or end < least for end, least in zip(ends, (1, 0), strict=True)):
        raise ValueError(
            f"config.rewriter_phase is {phase}; expected exact_tail (an int from 1) and exact_head (from 0): how many "
            "tokens at the end and at the beginning of a prompt are computed as in the original"
        )
    engine = str(model.config._attn_implementation)
    if engine.startswith(("vllm", "sglang")):
        raise ValueError(
            f"this checkpoint rewires tokens of the prompt alone, and {engine} packs pieces of prompts and generated "
            "tokens into one call without saying which is which. Serve it by `rewrite serve DIR`, where rewriter's "
            "plugin is installed beside vLLM, or with --engine transformers"
        )
    model.argument_names = list(inspect.signature(model.forward).parameters)
    model.register_forward_pre_hook(tell_rewired, with_kwargs=True)
    for layer in layers:
        if "rewired" not in inspect.signature(layer.forward).parameters:
            layer.register_forward_pre_hook(leave_out_rewired, with_kwargs=True)


def tell_rewired(model, args, kwargs):
    """Give a call of the model `rewired`, by `rewired_tokens` where its caller did not."""
    arguments = {**dict(zip(model.argument_names, args, strict=False)), **kwargs}
    tokens, rewired = arguments.get("inputs_embeds"), arguments.get("rewired")
    tokens = arguments.get("input_ids") if tokens is None else tokens
    if tokens is None:
        return args, kwargs  # the model says what is missing
    if rewired is None:
        rewired = rewired_tokens(model.config.rewriter_phase, tokens, arguments)
    check_rewired(rewired, tokens.shape[:2], "the tokens of this call")
    return args, {**kwargs, "rewired": rewired}


def check_rewired(rewired, shape, tokens):
    """Raise ValueError where a caller's `rewired` is not bool of `shape`."""
    is_tensor = isinstance(rewired, torch.Tensor)
    if not is_tensor or rewired.dtype != torch.bool or rewired.shape != shape:
        given = f"{rewired.dtype} {list(rewired.shape)}" if is_tensor else type(rewired).__name__
        raise ValueError(
            f"rewired is {given}; expected a tensor, bool {list(shape)}: True for those of {tokens} that are rewired"
        )


def leave_out_rewired(layer, args, kwargs):
    """Take `rewired` from the arguments of a layer that computes all tokens alike."""
    return args, {name: value for name, value in kwargs.items() if name != "rewired"}


def with_rewired(forward):
    """A model's `forward` with one more argument.

    `rewired`: bool [B, S], True for the tokens of this call that are rewired, False for exact ones; by default
    `rewired_tokens` says which. Pass it where a call's rows are no whole prompts: where a prompt comes in several
    calls, where a mask separates several prompts in a row, or where a later turn of a chat is rewired too.
    """

    @functools.wraps(forward)
    def with_argument(self, *args, rewired=None, **kwargs):
        return forward(self, *args, rewired=rewired, **kwargs)

    signature = inspect.signature(forward)
    *others, last = signature.parameters.values()
    own = inspect.Parameter("rewired", inspect.Parameter.KEYWORD_ONLY, default=None)
    with_argument.__signature__ = signature.replace(parameters=[*others, own, last])
    return with_argument


class PhasedGeneration:
    """`generate` of a model that rewires tokens of the prompt alone: whatever it generates is exact.

    What is rewired is settled before the first call, so that neither chunks of the prompt (`prefill_chunk_size`) nor
    candidates that are tried behind it nor calls without a cache change it. `generate(..., rewired=mask)` takes a mask
    of all that attention_mask covers (bool, of its shape); tokens behind it are exact.
    """

    def _expand_inputs_for_generation(self, *args, **kwargs):
        ids, kwargs = super()._expand_inputs_for_generation(*args, **kwargs)
        embeds, mask = kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
        tokens = ids if embeds is None else embeds
        if kwargs.get("rewired") is None:
            kwargs["rewired"] = rewired_tokens(self.config.rewriter_phase, tokens, kwargs)
        covered = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else tokens
        check_rewired(kwargs["rewired"], covered.shape[:2], "the tokens given to generate")
        return ids, kwargs

    def init_continuous_batching(self, *args, **kwargs):
        raise NotImplementedError(
            "this model rewires tokens of the prompt alone, and continuous batching packs pieces of prompts and "
            "generated tokens into one row without saying which is which. Call generate with a padded batch, or serve "
            "it in vLLM: rewrite serve DIR"
        )

    def _get_candidate_generator(self, *args, model_kwargs, **kwargs):
        others = {name: value for name, value in model_kwargs.items() if name != "rewired"}
        return super()._get_candidate_generator(*args, model_kwargs=others, **kwargs)

    def prepare_inputs_for_generation(self, input_ids, *args, rewired=None, inputs_embeds=None, **kwargs):
        # transformers reads off the names of these arguments that prompts may be embeddings
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if rewired is not None:
            embeds = inputs.get("inputs_embeds")
            tokens = inputs["input_ids"] if embeds is None else embeds
            mask = kwargs.get("attention_mask")
            end = mask.shape[1] if mask is not None else int(cached_tokens(kwargs)) + tokens.shape[1]
            exact = rewired.new_zeros(rewired.shape[0], max(end - rewired.shape[1], 0))
            own = torch.cat([rewired, exact], dim=1)[:, end - tokens.shape[1] : end]
            inputs["rewired"] = own.to(tokens.device)
        return inputs
