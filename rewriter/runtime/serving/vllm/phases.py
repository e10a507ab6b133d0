"""Tokens of a batch that are rewired, where passes rewire tokens of the prompt alone (`rewriter.ir.phases`): which rows
those are, from the numbers that vLLM's model runner has of each request.

A batch without rewired tokens runs vLLM's own layers, compiled and captured. One with some runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rewriter.ir.phases import PromptPhase

EXACT_FROM = "rewriter exact from"  # names a key of the hash of a cached block


@dataclass(frozen=True)
class Rows:
    """Rows of a batch: those of rewired tokens (int64 [R], R > 0) and of all others (int64 [E]), padding among them."""

    rewired: Tensor
    exact: Tensor

    def split(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rewired and other rows of `x` [R + E, ...], the latter None where there are none."""
        return (x[self.rewired], x[self.exact]) if len(self.exact) else (x, None)

    def join(self, rewired: Tensor, exact: Tensor | None) -> Tensor:
        """The rows that `split` took apart, in their order again."""
        if exact is None:
            return rewired
        whole = rewired.new_empty(len(self.rewired) + len(self.exact), *rewired.shape[1:])
        whole[self.rewired], whole[self.exact] = rewired, exact
        return whole


def phase_of(config: Any) -> PromptPhase | None:
    """The phase of the model that `config` (of transformers) describes; None where all tokens are computed alike."""
    said = getattr(config, "rewriter_phase", None)
    return None if said is None else PromptPhase(**said)


def rows_of(
    phase: PromptPhase, prompts: np.ndarray, computed: np.ndarray, scheduled: np.ndarray, total: int, device: Any
) -> Rows | None:
    """The rows of a batch of `total` tokens, None where no token is rewired. int [N] each: the length of every
    request's prompt, how many of its tokens are in the cache, and how many are in this batch, one request after the
    other; what is left of the batch is padding."""
    ends = np.cumsum(scheduled)
    place = np.arange(ends[-1]) + np.repeat(computed - (ends - scheduled), scheduled)
    rewired = np.zeros(total, dtype=bool)
    rewired[: len(place)] = (place >= phase.exact_head) & (place < np.repeat(prompts - phase.exact_tail, scheduled))
    if not rewired.any():
        return None
    parts = (torch.from_numpy(np.flatnonzero(of)).to(device, non_blocking=True) for of in (rewired, ~rewired))
    return Rows(*parts)


def exact_from(phase: PromptPhase, prompt: int) -> int:
    """The first token behind all rewired ones of a prompt, from which on every token is exact."""
    return max(phase.exact_head, prompt - phase.exact_tail)


# --- functions of vLLM that have to know; each is changed once per process


def tell_rows() -> None:
    """Let vLLM's model runner tell the layers which rows of a batch are rewired.

    Only the runner knows how long the prompts are. `_model_forward` is where every batch of requests goes through, and
    neither a profile nor a capture does. A batch with rewired rows does without the compiled model and captured graphs:
    they hold vLLM's own layers.
    """
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from rewriter.runtime.serving.vllm import engine

    def telling(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def told(runner: Any, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
            phase, batch = phase_of(runner.model_config.hf_config), runner.input_batch
            if phase is not None:
                n, total = batch.num_reqs, positions.shape[-1]
                scheduled = np.diff(runner.query_start_loc.np[: n + 1])
                prompts, computed = batch.num_prompt_tokens[:n], batch.num_computed_tokens_cpu[:n]
                engine.engine.rows = rows_of(phase, prompts, computed, scheduled, total, positions.device)
                if engine.engine.rows is not None:
                    context = get_forward_context()
                    context.skip_compiled, context.cudagraph_runtime_mode = True, CUDAGraphMode.NONE
            try:
                return forward(runner, input_ids, positions, *args, **kwargs)
            finally:
                engine.engine.rows = None

        return told

    _change(GPUModelRunner, "_model_forward", telling)


def keep_cached_blocks_apart() -> None:
    """Let vLLM find a cached block only for a request that would compute the same.

    A block is found by its tokens and those before it. Where prompts of different lengths begin alike, a token may be
    rewired in one and exact in the other. So blocks behind a request's last rewired token are hashed with the place
    where its exact tokens begin. vLLM asks for such keys with a request alone, wherever it computes them; the phase is
    that of the scheduler made last in this process.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.scheduler import Scheduler

    phase: PromptPhase | None = None

    def noting(init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def noted(scheduler: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal phase
            phase = phase_of(vllm_config.model_config.hf_config)
            init(scheduler, vllm_config, *args, **kwargs)

        return noted

    def keyed(keys: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        @wraps(keys)
        def with_place(request: Any, start: int, end: int) -> list[Any]:
            made = keys(request, start, end)
            if phase is None or end <= (place := exact_from(phase, request.num_prompt_tokens)):
                return made
            return [*made, (EXACT_FROM, place)]

        return with_place

    _change(Scheduler, "__init__", noting)
    _change(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", keyed)


def use_known_runner() -> None:
    """Let vLLM run checkpoints with a phase on its model runner V1, to which `tell_rows` is fitted.

    vLLM keeps a list of what its V2 cannot do, and takes V1 for that; it refuses V2 where it was asked for.
    """
    from vllm.config import VllmConfig

    def noting(unsupported: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
        @wraps(unsupported)
        def noted(config: Any) -> list[str]:
            model = config.model_config
            phased = model is not None and phase_of(model.hf_config) is not None
            return [*unsupported(config), *["rewriter's checkpoints that rewire the prompt alone"] * phased]

        return noted

    _change(VllmConfig, "_get_v2_model_runner_unsupported_features", noting)


def _change(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Put a function around `owner`'s; one that is there already stays."""
    function = getattr(owner, name)
    if not hasattr(function, "rewriter"):
        changed = around(function)
        changed.rewriter = True
        setattr(owner, name, changed)
