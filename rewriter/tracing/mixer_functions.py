"""Recurrent mixers, lifted as attention is: the functions that their forwards call become operators of the IR.

transformers computes convolutions and recurrences by module-level functions, each with one body in all files that
define it, which kernels of `fla`, `causal_conv1d` and `mamba_ssm` replace under the same signature. While a model is
traced, the names of these functions in the globals of its forwards record one operator of `rewriter_trace` each;
`rewriter.ir.ops` says what it computes. A mixer of a version of transformers with other names records nothing, and
stays the source's own module.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from rewriter.common.errors import RewriterError
from rewriter.ir.ops import ACTIVATIONS
from rewriter.tracing.interception import unknown_keywords
from rewriter.tracing.written_mixers import computes_lightning_attention

_library = torch.library.Library("rewriter_trace", "FRAGMENT")
_library.define("causal_conv(Tensor x, Tensor weight, Tensor? bias, str options) -> Tensor")
_library.define("delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, str options) -> Tensor")
_library.define(
    "state_space(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, str options) -> Tensor"
)
_library.define("linear_scan(Tensor x, Tensor log_decay, str options) -> Tensor")
_library.define(
    "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "str options) -> Tensor"
)
_traced = torch.ops.rewriter_trace


@torch.library.register_fake("rewriter_trace::causal_conv", lib=_library)
@torch.library.register_fake("rewriter_trace::state_space", lib=_library)
@torch.library.register_fake("rewriter_trace::selective_scan", lib=_library)
@torch.library.register_fake("rewriter_trace::linear_scan", lib=_library)
def _like_first(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("rewriter_trace::delta_rule", lib=_library)
def _like_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    return v.new_empty(v.shape)


# keywords that the forwards of layers hand on and the plain bodies of these functions leave alone
_INERT_KEYWORDS = (
    "use_cache", "output_attentions", "output_router_logits", "cache_position", "logits_to_keep", "position_ids",
    "input_ids", "position_embeddings", "past_key_values", "chunk_size", "use_mambapy", "use_associative_scan",
)  # fmt: skip


def _require_known(function: str, keywords: dict[str, Any]) -> None:
    if unknown := unknown_keywords(keywords, _INERT_KEYWORDS):
        raise RewriterError(f"a recurrent mixer passes {unknown} to {function}, which this version cannot represent")


def causal_conv1d_fn(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **keywords: Any,
) -> torch.Tensor:
    """[B, C, S] in, [B, C, S] out."""
    _require_known("causal_conv1d_fn", keywords)
    activation = "silu" if activation == "swish" else activation
    if activation is not None and activation not in ACTIVATIONS:
        raise RewriterError(
            f"the convolution of a recurrent mixer ends in {activation}, which this version does not know: "
            f"{', '.join(sorted(ACTIVATIONS))}"
        )
    return _traced.causal_conv(hidden_states, weight, bias, json.dumps({"activation": activation}))


def chunk_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule, and Kimi delta attention, whose decay `g` has a value per key channel."""
    _require_known("the delta rule", keywords)
    options = {"l2norm": use_qk_l2norm_in_kernel, "scale": float(query.shape[-1]) ** -0.5}
    shape = (value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    state = value.new_empty(shape) if output_final_state else None
    return _traced.delta_rule(query, key, value, g, beta, json.dumps(options)), state


def mamba2_chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **keywords: Any,
) -> Any:
    """The state space of Mamba 2."""
    _require_known("mamba2_chunk_scan", keywords)
    options = json.dumps({"softplus": dt_softplus, "limit": [float(x) for x in dt_limit]})
    out = _traced.state_space(hidden_states, dt, A, B, C, D, dt_bias, options)
    return (out, None) if return_final_states else out


def mamba_selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **keywords: Any,
) -> Any:
    """The selective scan of Mamba 1."""
    _require_known("mamba_selective_scan", keywords)
    options = json.dumps({"softplus": delta_softplus})
    out = _traced.selective_scan(hidden_states, dt, A, B, C, D, z, delta_bias, options)
    return (out, None) if return_last_state else out


def rnn_scan(
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """The linear recurrence of RG-LRU, a method of its module. `reset` is where a sequence begins, at its state of
    zeros."""
    _require_known("_rnn_scan", keywords)
    return _traced.linear_scan(hidden_states, recurrent_gate.float().log(), "{}"), None


def depthwise(convolution: nn.Conv1d) -> bool:
    """True for a causal convolution of each channel, whose caller keeps as many outputs as there are tokens."""
    taps = convolution.kernel_size[0]
    return (
        convolution.groups == convolution.in_channels == convolution.out_channels
        and taps > 1
        and (convolution.padding, convolution.stride, convolution.dilation) == ((taps - 1,), (1,), (1,))
        and convolution.padding_mode == "zeros"
    )


def is_recurrent(module: nn.Module) -> bool:
    """True for a module whose own forward is recorded as an operator: its caller holds the state."""
    return bool(_methods(module)) or (type(module) is nn.Conv1d and depthwise(module))


def _methods(module: nn.Module) -> list[str]:
    """The names of the methods of a module that are recorded as operators."""
    return [name for name in _METHODS if hasattr(type(module), name)]


def _convolved(self: nn.Conv1d, x: torch.Tensor) -> torch.Tensor:
    """[B, C, S] of a depthwise causal convolution, the outputs behind the last token left out."""
    if not depthwise(self):
        return _plain_convolution(self, x)
    return _traced.causal_conv(x, self.weight.squeeze(1), self.bias, json.dumps({"activation": None}))


_plain_convolution = nn.Conv1d.forward
_METHODS = {"_rnn_scan": rnn_scan}


def _step(name: str) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise RewriterError(f"it calls {name}, the form of a decode step, on a sequence without earlier tokens")

    return function


_LIFTED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": chunk_delta_rule,
    "chunk_kimi_delta_attention": chunk_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba_selective_scan": mamba_selective_scan,
}
_STEPS = (
    "causal_conv1d_update", "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update", "mamba_selective_state_update",
)  # fmt: skip


@contextlib.contextmanager
def lifted_mixers(model: nn.Module) -> Iterator[None]:
    """Within it, forwards of modules of `model` record operators where they call the functions above."""
    functions = {**_LIFTED, **{name: _step(name) for name in _STEPS}}
    namespaces = {id(names): names for m in model.modules() if (names := _globals_of(type(m))) is not None}
    before = [(names, {n: names[n] for n in functions if n in names}) for names in namespaces.values()]
    methods = [(m, name) for m in model.modules() for name in _methods(m)]
    try:
        for module, name in methods:
            setattr(module, name, _METHODS[name])
        for names, own in before:
            names.update({n: functions[n] for n in own})
        with mock.patch.object(nn.Conv1d, "forward", _convolved):
            yield
    finally:
        for module, name in methods:
            vars(module).pop(name, None)
        for names, own in before:
            names.update(own)


# of these, the plain form is a loop over a sequence or its chunks, as many times as the sequence is long
_LOOPS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba_selective_scan", "_rnn_scan")


def loop_over_tokens(model: nn.Module) -> str | None:
    """The first module of `model` whose forward loops over tokens in Python, and the function that does; None where
    there is none."""
    for path, module in model.named_modules():
        if computes_lightning_attention(module):
            return f"{path} (forward)"
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if looping := next((name for name in _LOOPS if code is not None and name in code.co_names), None):
            return f"{path} ({looping})"
    return None


def is_lifted(module: nn.Module) -> bool:
    """True if a forward in `module` can call one of the functions above."""
    functions = any(_LIFTED.keys() & (_globals_of(type(m)) or {}).keys() for m in module.modules())
    return functions or any(map(_methods, module.modules()))


def _globals_of(kind: type[nn.Module]) -> dict[str, Any] | None:
    """The namespace in which a class's forward finds its functions, below decorators."""
    names: dict[str, Any] | None = getattr(inspect.unwrap(kind.forward), "__globals__", None)
    return names
