"""Attention, masks, experts, leaf modules and layers, lifted out of a Hugging Face model while it is exported.

Each becomes one opaque operator of the library `rewriter_trace`. Nothing stays registered or patched when the `with`
block ends, also if tracing fails. A module that is called several times with other constants (Gemma 3's rotary
embedding, per layer type) has one variant per set of constants: `name`, `name#1`, …
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # the stable subset: tree_flatten, tree_unflatten
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface

from rewriter.common.errors import RewriterError
from rewriter.ir.ops import ACTIVATIONS, gated
from rewriter.tracing.masks import lifted_mask
from rewriter.tracing.model_errors import first_line

LIFTED = "rewriter_lifted"

_library = torch.library.Library("rewriter_trace", "DEF")
_library.define("call(Tensor[] inputs, str key) -> Tensor[]")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? bias, Tensor? by_distance, Tensor? keys, str spec) "
    "-> Tensor"
)

_calls: ContextVar[dict[str, Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]]] = ContextVar("calls")


@torch.library.register_fake("rewriter_trace::call", lib=_library)
def _call(inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    with _ReadableNumbers():  # the modes around a call are off while one of them runs what it calls
        return list(_calls.get()[key](inputs))


@torch.library.register_fake("rewriter_trace::attention", lib=_library)
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, length = q.shape[:3]
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
    indices: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **unknown: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' AttentionInterface, recorded as one operator. Takes BHSD, returns BSHD.

    `indices` [B, S, n] are the keys that each query may see, where an indexer chose some. `sliding_window` repeats what
    the mask already says (flash kernels need it), `position_ids` is for packed sequences. Any keyword that could change
    the result and is not known here is refused.
    """
    if others := unknown_keywords(unknown, _INERT_KEYWORDS):
        raise RewriterError(
            f"{type(module).__name__} passes {others} to its attention function, which this version cannot "
            "represent. Its attention cannot be traced."
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    plain = (softcap, s_aux, position_bias, query.shape[1]) == (None, None, None, key.shape[1])
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
    if position_bias is not None and str(position_bias.shape[-1]) == str(key.shape[2]):  # one per query and key
        attention_mask, position_bias = attention_mask.expand_as(position_bias) + position_bias, None
    spec = {"scale": float(scale), "softcap": softcap}
    inputs = (query, key, value, s_aux, attention_mask, position_bias, indices)
    return torch.ops.rewriter_trace.attention(*inputs, json.dumps(spec)), None


# keywords that flow through every layer's **kwargs and never change what attention computes
_INERT_KEYWORDS = (
    "use_cache", "output_attentions", "output_router_logits", "return_dict", "cache_position", "logits_to_keep",
    "input_ids",
)  # fmt: skip


def unknown_keywords(given: Mapping[str, Any], inert: Sequence[str]) -> list[str]:
    """The names, sorted, of keywords that say something and are not among `inert`."""
    return sorted(k for k, v in given.items() if v is not None and v is not False and k not in inert)


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
    """Replace `forward` on module instances for the duration of the block. Blocks nest."""
    before = {module: {k: v for k, v in vars(module).items() if k == "forward"} for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, own in before.items():
            vars(module).pop("forward", None)
            vars(module).update(own)


_library.define(
    "experts(Tensor x, Tensor index, Tensor weight, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, "
    "str options) -> Tensor"
)


@torch.library.register_fake("rewriter_trace::experts", lib=_library)
def _experts(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def is_experts(module: nn.Module) -> bool:
    """True if transformers lets an experts function compute `module`."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "down_proj")


def lifted_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function of transformers' ExpertsInterface. Raises RewriterError when it cannot be represented."""
    if getattr(module, "has_post_expert_norm", False):
        raise RewriterError(f"{type(module).__name__}: experts with a norm of their own are not supported yet")
    if module not in _options:  # the first call is outside of any export: a module runs on meta before it is exported
        _options[module] = {**gate_of(module), **({"transposed": True} if module.is_transposed else {})}
    up = "gate_up_proj" if module.has_gate else "up_proj"
    biases = (getattr(module, f"{up}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    return torch.ops.rewriter_trace.experts(
        hidden_states, top_k_index, top_k_weights, getattr(module, up), module.down_proj, *biases,
        json.dumps(_options[module]),
    )  # fmt: skip


_options: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


def gate_of(module: nn.Module) -> dict[str, Any]:
    """The options of `ops.gated`, other than their defaults, that compute what the module does between projections.

    Its numbers (a limit, a slope) are attributes of the module; which of them plays which part is found by comparing
    values. Raises RewriterError when none agree.
    """
    numbers = sorted({float(v) for v in vars(module).values() if isinstance(v, float)})
    generator = torch.Generator(device="cpu").manual_seed(0)
    scale = torch.tensor([0.3, 1.0, 3.0, 10.0, 40.0], dtype=torch.float64, device="cpu")[:, None, None]
    sample = scale * torch.randn(5, 64, 32, generator=generator, dtype=torch.float64, device="cpu")
    try:
        expected = module._apply_gate(sample) if module.has_gate else module.act_fn(sample)  # type: ignore[operator]
    except Exception as error:  # a model's own code, on values and dtypes of ours
        raise RewriterError(
            f"{type(module).__name__}: what its experts do between their projections cannot be evaluated "
            f"({first_line(error)})"
        ) from error
    # modules that compute in float32 for any input are compared as exactly as that allows
    in_float32 = torch.equal(expected.float().to(expected.dtype), expected) or expected.dtype == torch.float32
    tolerance = float(expected.abs().max()) * (1e-6 if in_float32 else 1e-9)
    for options in _candidates(bool(module.has_gate), numbers):
        computed = gated(sample, **options)
        if computed.shape == expected.shape and (computed - expected).abs().max() <= tolerance:
            return options
    raise RewriterError(
        f"{type(module).__name__}: the function between its experts' projections is none of the known forms "
        f"(activations {', '.join(sorted(ACTIVATIONS))}; a limit; a slope; an offset)"
    )


def _candidates(has_gate: bool, numbers: list[float]) -> Iterator[dict[str, Any]]:
    """Options of `ops.gated`, simple ones first."""
    if not has_gate:
        yield from ({"act": act, "layout": "ungated"} for act in ACTIVATIONS)
        return
    for limit, slope, offset, layout, act in itertools.product(
        (None, *(n for n in numbers if n > 0)),
        (1.0, *numbers),
        (0.0, 1.0),
        ("concatenated", "interleaved"),
        ACTIVATIONS,
    ):
        if slope == 1.0 or act == "silu":
            options = {"act": act, "layout": layout, "limit": limit, "slope": slope, "offset": offset}
            defaults = {"layout": "concatenated", "limit": None, "slope": 1.0, "offset": 0.0}
            yield {name: value for name, value in options.items() if name == "act" or value != defaults[name]}


def record_calls(run: Callable[[], Any], modules: Mapping[str, nn.Module]) -> dict[str, Recorded]:
    """The calls of each module while `run()` executes: Python arguments and result, by variant name."""
    variants = Variants()
    recorded: dict[str, Recorded] = {}

    def hook(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = Recorded(args, dict(kwargs), output)
        recorded.setdefault(variants.name(name, call), call)

    with contextlib.ExitStack() as stack:
        for name, module in modules.items():
            after = functools.partial(hook, name)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        run()
    return recorded


class Variants:
    """Numbers the calls of a module by the constants among their arguments, in order of appearance."""

    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {}

    def name(self, module: str, call: Recorded) -> str:
        leaves = leaves_with_paths((call.args, call.kwargs))
        constants = repr([(path, None if isinstance(leaf, torch.Tensor) else leaf) for path, leaf in leaves])
        known = self.seen.setdefault(module, [])
        if constants not in known:
            known.append(constants)
        return variant_name(module, known.index(constants))


def tensors_of(recorded: Recorded) -> tuple[list[torch.Tensor], Callable[[Sequence[Any]], tuple[Any, Any]]]:
    """The tensor leaves of a call, and how to rebuild (args, kwargs) around other ones."""
    leaves, spec = pytree.tree_flatten((recorded.args, recorded.kwargs))
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def rebuild(tensors: Sequence[Any]) -> tuple[Any, Any]:
        filled = list(leaves)
        for slot, tensor in zip(slots, tensors, strict=True):
            filled[slot] = tensor
        return pytree.tree_unflatten(filled, spec)

    return [leaves[i] for i in slots], rebuild


def tensor_paths(call: Recorded) -> tuple[tuple[Any, ...], ...]:
    """The paths into (args, kwargs) of the tensors of a call."""
    leaves = leaves_with_paths((call.args, call.kwargs))
    return tuple(path for path, leaf in leaves if isinstance(leaf, torch.Tensor))


def base_name(variant: str) -> str:
    """`rotary_emb#1` is a variant of the module `rotary_emb`."""
    return variant.partition("#")[0]


def variant_name(module: str, index: int) -> str:
    """`base_name` the other way round."""
    return f"{module}#{index}" if index else module


def layer_number(call: str) -> int | None:
    """Number of the layer that a recorded call stands for; None for another module."""
    name, _, number = call.partition(" ")
    return int(number) if name == "layer" else None


@contextlib.contextmanager
def intercepted_modules(modules: Mapping[str, nn.Module], calls: Mapping[str, Recorded]) -> Iterator[None]:
    """Calling one of `modules` records one `rewriter_trace::call` with its variant name, as `record_calls` gave it."""
    variants = Variants()
    rebuilds: dict[str, Any] = {}
    specs: dict[str, Any] = {}

    def run_variant(key: str, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        module, (args, kwargs) = modules[base_name(key)], rebuilds[key](inputs)
        leaves, specs[key] = pytree.tree_flatten(type(module).forward(module, *args, **kwargs))
        return leaves

    def forward(name: str, *args: Any, **kwargs: Any) -> Any:
        call = Recorded(args, kwargs)
        key = variants.name(name, call)
        tensors, rebuilds[key] = tensors_of(call)
        outputs = torch.ops.rewriter_trace.call(tensors, key)
        return pytree.tree_unflatten(list(outputs), specs[key])

    functions = {key: functools.partial(run_variant, key) for key in calls}
    forwards = {modules[name]: functools.partial(forward, name) for name in map(base_name, calls)}
    with opaque_calls(functions), replaced_forward(forwards):
        yield


def input_names(module: nn.Module, recorded: Recorded) -> list[str]:
    """Name of each tensor of a call in the module's own signature."""
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    names: list[str] = []
    for path in tensor_paths(recorded):
        base = str(path[1]) if path[0] == 1 else parameters[path[1]]
        if base == "position_embeddings" and len(path) == 3 and path[2] in (0, 1):
            names.append(("cos", "sin")[path[2]])
        else:
            names.append("_".join([base, *map(str, path[2:])]))
    return names


def leaves_with_paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, leaf) over tuples, lists and dicts; everything else is a leaf."""
    if isinstance(tree, (tuple, list)):
        for i, item in enumerate(tree):
            yield from leaves_with_paths(item, (*path, i))
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from leaves_with_paths(item, (*path, key))
    else:
        yield path, tree
