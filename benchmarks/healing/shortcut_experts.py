"""Does an MoE whose experts read the stream before attention heal better with two norms of its own?

    python -m benchmarks.healing.shortcut_experts

A small Qwen3-MoE learns bytes of Python's documentation (`pydoc_data.topics`) and is then rewired, each time from the
same weights:

    parallel        x + attn(N1 x) + experts(N1 x)                what the recipe `parallel` makes
    parallel-own    x + attn(N1 x) + experts(N2 x)                `parallel_block` with norm: own
    shortcut        x + attn(N1 x) + P(experts(N2 x))             ShortcutMoE (Megatron-LM, pull request 6959)

N2 begins as the norm that stood before the experts. P is a norm whose scales begin as the root mean square of what it
is given, by channel, so that the size of what the experts add is kept. Every variant is distilled from the source with
the same tokens, at the learning rate of two that serves it best on held-out text. Prints losses (nats per byte, of
held-out text) by seed, and their mean and spread. With `--check` the two parallel ones are compared with the reference
that conversions are verified with, and nothing is trained.
"""

from __future__ import annotations

import argparse
import copy
import pydoc_data.topics
import statistics
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rewriter.check.comparison import relative_error
from rewriter.check.per_rank_reference import LayerMode, PerRankReference

CONFIG = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
ROWS, WINDOW = 8, 128  # of a step, in bytes
HELD_OUT = 16  # batches
RATES = (1e-3, 3e-3)  # of healing
NORMS: dict[str, Literal["attention", "own"]] = {
    "parallel": "attention",
    "parallel-own": "own",
    "shortcut": "own",
}  # whose norm the experts read through


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes to learn, bytes held out), int64."""
    topics = pydoc_data.topics.topics
    data = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def batches(data: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Windows [ROWS, WINDOW + 1] at random places."""
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - WINDOW, (ROWS,), generator=random)
        yield torch.stack([data[start : start + WINDOW + 1] for start in starts.tolist()])


def logits_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=batch[:, :-1], use_cache=False).logits
    return logits


def cross_entropy(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def loss(model: nn.Module, data: torch.Tensor) -> float:
    """Nats per byte of held-out text."""
    windows = batches(data, 0)
    return statistics.mean(
        float(cross_entropy(logits_of(model, batch), batch)) for batch, _ in zip(windows, range(HELD_OUT), strict=False)
    )


def trained(model: nn.Module, data: torch.Tensor, steps: int, rate: float, seed: int, teacher: Any = None) -> None:
    """Train all weights of `model` on `data`, by cross entropy or to the predictions of `teacher`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max(0.05, 1 - step / steps))
    )
    for batch, _ in zip(batches(data, seed), range(steps), strict=False):
        logits = logits_of(model, batch)
        if teacher is None:
            objective = cross_entropy(logits, batch)
        else:
            with torch.no_grad():
                taught = F.log_softmax(logits_of(teacher, batch), -1).flatten(0, 1)
            objective = F.kl_div(
                F.log_softmax(logits, -1).flatten(0, 1), taught, reduction="batchmean", log_target=True
            )
        optimizer.zero_grad()
        objective.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


class _ExpertsBeside(nn.Module):
    """What a rewired layer adds next to attention: [B, S, D] of the stream → [B, S, D]."""

    def __init__(self, layer: Any, own_norm: bool, post_norm: bool) -> None:
        super().__init__()
        self.norm = layer.post_attention_layernorm if own_norm else layer.input_layernorm
        self.experts, self.post = layer.mlp, copy.deepcopy(layer.post_attention_layernorm) if post_norm else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.experts(self.norm(x))
        return added if self.post is None else self.post(added)


def rewired(source: nn.Module, variant: str, data: torch.Tensor) -> Any:
    """A copy of `source` in which every layer computes attention and experts side by side."""
    model: Any = copy.deepcopy(source)
    for layer in model.model.layers:
        layer.beside = _ExpertsBeside(layer, NORMS[variant] == "own", variant == "shortcut")
        layer.forward = types.MethodType(_forward, layer)
    if variant == "shortcut":
        _fit_scales(model, data)
    return model


def _forward(self: Any, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
    attended: torch.Tensor = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)[0]
    return hidden_states + attended + self.beside(hidden_states)


@torch.no_grad()
def _fit_scales(model: Any, data: torch.Tensor) -> None:
    """Let each norm after the experts keep the size of what it is given, from the first layer to the last."""
    batch = next(batches(data, 1))
    for layer in model.model.layers:
        seen: list[torch.Tensor] = []
        hook = layer.beside.experts.register_forward_hook(_keeping(seen))
        logits_of(model, batch)
        hook.remove()
        layer.beside.post.weight.copy_(seen[0].flatten(0, 1).square().mean(0).sqrt())


def _keeping(seen: list[torch.Tensor]) -> Callable[..., None]:
    return lambda module, args, output: seen.append(output[0] if isinstance(output, tuple) else output)


def check() -> bool:
    """True if the rewired copies compute what conversions by `parallel_block` are verified with."""
    torch.manual_seed(0)
    source: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).eval()
    data, _ = text()
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + torch.rand_like(parameter))
        batch = next(batches(data, 0))
        errors = {}
        for variant in ("parallel", "parallel-own"):
            mode = LayerMode("parallel", norm=NORMS[variant])
            reference = PerRankReference(source, dict.fromkeys(range(4), mode), 1)
            errors[variant] = relative_error(logits_of(rewired(source, variant, data), batch), reference(batch[:, :-1]))
    print(errors)
    return max(errors.values()) < 1e-5


def measured(seed: int, steps: int, budgets: list[int]) -> dict[tuple[str, int], float]:
    """By variant and steps of healing, the loss; that of the source as ("source", 0)."""
    learnt, held_out = text()
    torch.manual_seed(seed)
    source: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))
    trained(source, learnt, steps, 3e-3, seed)
    losses = {("source", 0): loss(source, held_out)}
    print(f"seed {seed} source: {losses}", flush=True)
    for variant in NORMS:
        losses[variant, 0] = loss(rewired(source, variant, learnt), held_out)
        for budget in budgets:
            tried = []
            for rate in RATES:
                student = rewired(source, variant, learnt)
                trained(student, learnt, budget, rate, 1000 + seed, teacher=source)
                tried.append(loss(student, held_out))
            losses[variant, budget] = min(tried)
            print(f"seed {seed} {variant} {budget} steps: {tried}", flush=True)
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400, help="of training the source")
    parser.add_argument("--budget", type=int, action="append", help="steps of healing; may be given again")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.check:
        return 0 if check() else 1
    began, budgets = time.process_time(), args.budget or [80]
    runs = [measured(seed, args.steps, budgets) for seed in range(args.seeds)]
    print(f"{ROWS * WINDOW} bytes a step, {time.process_time() - began:.0f} s of one core")
    for key in runs[0]:
        values = [run[key] for run in runs]
        print(f"{key[0]:>13} {key[1]:>4}  {statistics.mean(values):.4f} ± {statistics.pstdev(values):.4f}  {values}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
