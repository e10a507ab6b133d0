"""What is lifted out of a Hugging Face model while it is exported: attention, masks, experts, leaf modules and layers.

Each becomes one opaque operator of the library `rewriter_trace`. Nothing stays registered or patched when the `with`
block ends, also if tracing fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface

from rewriter.common.errors import RewriterError
from rewriter.tracing.masks import lifted_mask
from rewriter.tracing.traced_experts import lifted_experts

LIFTED = "rewriter_lifted"

_library = torch.library.Library("rewriter_trace", "DEF")
_library.define("call(Tensor[] inputs, str key) -> Tensor[]")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? bias, str spec) -> Tensor")

_calls: ContextVar[dict[str, Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]]] = ContextVar("calls")


@torch.library.register_fake("rewriter_trace::call", lib=_library)
def _call(inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    with _ReadableNumbers():  # the modes around a call are off while one of them runs what it calls
        return list(_calls.get()[key](inputs))


@torch.library.register_fake("rewriter_trace::attention", lib=_library)
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, bias: Any, spec: str) -> torch.Tensor:
    batch, heads, length, _ = q.shape
    return q.new_empty(batch, length, heads, v.shape[-1])


@contextlib.contextmanager
def opaque_calls(functions: Mapping[str, Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]]) -> Iterator[None]:
    """Give `rewriter_trace::call` its shapes: `functions[key](inputs)` runs on fake or meta tensors. Blocks nest."""
    token = _calls.set({**_calls.get({}), **functions})
    try:
        yield
    finally:
        _calls.reset(token)


def lifted_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: Any = None,
    **unknown: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' AttentionInterface, recorded as one operator. Takes BHSD, returns BSHD.

    `sliding_window` repeats what the mask already says (flash kernels need it), `position_ids` is for packed sequences.
    Any keyword that could change the result and is not known here is refused.
    """
    unknown = {k: v for k, v in unknown.items() if v is not None and v is not False and k not in _INERT_KEYWORDS}
    if unknown:
        raise RewriterError(
            f"{type(module).__name__} passes {sorted(unknown)} to its attention function, which this version cannot "
            "represent. Its attention cannot be traced."
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    plain = (softcap, s_aux, query.shape[1]) == (None, None, key.shape[1])
    if plain and attention_mask is None and not getattr(module, "is_causal", True):
        # Over something else than tokens (the blocks before a layer), for which nothing is kept from step to step: a
        # product, which no one shall take for attention to tokens.
        weights = (query.float() @ key.float().transpose(2, 3) * scale).log_softmax(-1).exp()
        return (weights.to(query.dtype) @ value).transpose(1, 2), None
    if not isinstance(attention_mask, torch.Tensor):
        raise RewriterError(
            f"{type(module).__name__} hands its attention function {type(attention_mask).__name__} instead of the mask "
            "that transformers' mask functions made. Its attention cannot be traced."
        )
    spec = {"scale": float(scale), "softcap": softcap}
    out = torch.ops.rewriter_trace.attention(query, key, value, s_aux, attention_mask, json.dumps(spec))
    return out, None


# keywords that flow through every layer's **kwargs and never change what attention computes
_INERT_KEYWORDS = (
    "use_cache", "output_attentions", "output_router_logits", "return_dict", "cache_position", "logits_to_keep",
)  # fmt: skip


@contextlib.contextmanager
def lifted_interfaces(model: nn.Module) -> Iterator[None]:
    """Route attention, masks and experts of `model` through the functions above for the duration of the block."""
    configs = {id(c): c for m in model.modules() if isinstance(c := getattr(m, "config", None), PreTrainedConfig)}
    before = [(c, c._attn_implementation, getattr(c, "_experts_implementation", None)) for c in configs.values()]
    AttentionInterface.register(LIFTED, lifted_attention)
    AttentionMaskInterface.register(LIFTED, lifted_mask)
    ALL_EXPERTS_FUNCTIONS.register(LIFTED, lifted_experts)

    try:
        for config in configs.values():
            config._attn_implementation = LIFTED
            config._experts_implementation = LIFTED
        # Without a mask, transformers looks for packed sequences and for padding; a program has neither.
        with (
            mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
            mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", return_value=None),
            _ReadableNumbers(),
        ):
            yield
    finally:
        for config, attention, experts in before:
            config._attn_implementation = attention
            config._experts_implementation = experts
        for interface in (AttentionInterface, AttentionMaskInterface, type(ALL_EXPERTS_FUNCTIONS)):
            interface._global_mapping.pop(LIFTED, None)


def _as_slice(part: Any) -> Any:
    """An index, where a list of one number is a slice."""
    if isinstance(part, list) and len(part) == 1 and type(part[0]) is int:
        return slice(part[0], part[0] + 1 or None)
    return part


class _ReadableNumbers(TorchFunctionMode):
    """Keeps numbers readable that torch would make tensors on meta of. (A patch of `Tensor.__getitem__` would leave its
    type's slots changed for the whole process, also when it is undone.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            return _tensor(*args, **kwargs)
        if func is torch.Tensor.__getitem__:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            # Several lists or tensors would index together.
            if sum(isinstance(part, (list, torch.Tensor)) for part in parts) == 1:
                args = (args[0], tuple(map(_as_slice, parts)))
        return func(*args, **kwargs)


def _tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    """torch.tensor, where a number that it would put on meta stays readable in the graph."""
    if isinstance(data, (bool, int, float)) and torch.device(device or "cpu").type == "meta":
        return torch.full((), data, device=device, **options)
    return torch.tensor(data, device=device, **options)


@dataclasses.dataclass
class Recorded:
    """The Python arguments of one module call, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


@contextlib.contextmanager
def replaced_forward(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace `forward` on module instances for the duration of the block."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)
