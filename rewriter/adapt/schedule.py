"""Settings and sizes of a run: from its tokens, or from the recipe, and above all from what its options set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rewriter.adapt.options import AdaptOptions
from rewriter.common.errors import RewriterError
from rewriter.recipes.recipe import Adaptation

DEFAULTS: Mapping[str, Any] = {
    # Ladder Residual (arXiv 2501.06589), section 4.2.1
    "optim": "adamw_torch", "learning_rate": 5e-6, "warmup_steps": 200, "lr_scheduler_type": "cosine",
    "num_train_epochs": 2.0, "max_grad_norm": 1.0, "weight_decay": 0.0, "save_total_limit": 2, "logging_steps": 1,
    "seed": 0,
}  # fmt: skip
BATCH = 32  # rows of an optimizer step, over all ranks; the paper's
MICRO_BATCH = 8  # rows that a rank computes at once, at most, where nothing else is said

OWN_TEXT = 98_304  # tokens, where neither data nor --tokens are given
WARMUP = 0.05  # of the steps
SHORTEST_ROW, LONGEST_ROW = 256, 4096  # tokens, where --length does not say
AT_ONCE = 1_024  # tokens of a backward pass on a CPU, where more are no faster and take memory
ROWS = 4  # of a step, at least, where they are no shorter than the shortest

# By tokens of the whole run: those of a step, and the highest learning rate of a model whose stream is `WIDTH` wide;
# Adam's rates go with 1 / width (arXiv 2203.03466, table 3). At 33 million they are those of arXiv 2609.13846 (width
# 1,024), at 3 billion those of Ladder Residual (2501.06589; width 4,096, rate 5e-6), at 24,576 no worse
# than the next higher one (`benchmarks/healing/run.py --rate`). Few tokens need many steps more than exact ones.
WIDTH = 1_024
_TOKENS = (24_576, 400_000, 1_000_000, 33_000_000, 3_000_000_000)
_STEP = (512, 1_024, 2_048, 16_384, 131_072)
_RATE = (2.8e-4, 1.8e-4, 1.5e-4, 5e-5, 2e-5)
BOTH_PHASES = (
    0.2  # of the rate, for weights that serve an exact phase too, which higher ones take away from the original
)
HIGHEST_RATE = 5e-4  # of a narrow model: examples/tiny-llama (width 192) learns less with twice as much
WIDE_ENOUGH = 512  # for bf16 on a CPU: narrower matrices lose more in casts than their products gain


@dataclass(frozen=True)
class RunSizes:
    """Sizes of a run: rows per rank and backward pass, passes per step, steps, and rows per step over all ranks."""

    micro_batch: int
    accumulation: int
    steps: int
    batch: int


@dataclass(frozen=True)
class Budget:
    """A run of `tokens` for a model with a stream of `width`. `both_phases`: it has rewired and exact tokens."""

    tokens: int
    width: int = WIDTH
    both_phases: bool = False

    @property
    def step(self) -> int:
        """Tokens of an optimizer step, a power of two."""
        return max(1, min(1 << round(math.log2(_between(self.tokens, _STEP))), self.tokens))

    def length(self, positions: int) -> int:
        """Tokens of a row: at least `ROWS` rows a step, and no more than the model's `positions`."""
        return max(2, min(positions, max(SHORTEST_ROW, min(LONGEST_ROW, self.step // ROWS))))

    def rows(self, length: int, replicas: int) -> int:
        """Rows of an optimizer step, as many on each of the data-parallel `replicas`."""
        return replicas * max(1, round(self.step / length / replicas))

    @property
    def rate(self) -> float:
        """The highest learning rate, to two digits."""
        highest = min(HIGHEST_RATE, _between(self.tokens, _RATE) * WIDTH / self.width)
        return float(f"{highest * (BOTH_PHASES if self.both_phases else 1):.2g}")

    def settings(self, device: torch.device) -> dict[str, Any]:
        """The Trainer's settings, the warm-up apart, which depends on the steps that are done."""
        wide = device.type == "cuda" or self.width >= WIDE_ENOUGH
        return {
            "optim": "adamw_torch", "learning_rate": self.rate, "adam_beta2": 0.95,
            "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "bf16": wide and multiplies_bf16(device),  # weights and optimizer stay in fp32
        }  # fmt: skip


def multiplies_bf16(device: torch.device) -> bool:
    """True where the device has instructions for products of matrices in bf16; without them, fp32 is faster."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):  # not in every torch
        return False
    instructions = torch.cpu.get_capabilities()
    return any(instructions.get(name) for name in ("avx512_bf16", "amx_bf16"))


def _between(tokens: int, values: tuple[float, ...]) -> float:
    """Straight lines between the points, in logarithms; level outside of them."""
    return float(np.exp(np.interp(math.log(tokens), np.log(_TOKENS), np.log(values))))


def tokens_of_run(options: AdaptOptions, tokens_of_data: int) -> int:
    """The tokens that a run sees: those that --tokens asks for, else those of the data in its epochs (one)."""
    return options.tokens or max(1, int(tokens_of_data * float(options.settings.get("num_train_epochs", 1))))


def plan(
    adapt: Adaptation | None,
    options: AdaptOptions,
    rows: int,
    length: int,
    width: int,
    replicas: int,
    device: torch.device,
    both_phases: bool = False,
) -> tuple[dict[str, Any], RunSizes]:
    """The Trainer's settings, and the sizes that follow: from the tokens of the run, or from the recipe's `adapt`
    section (else the paper's), and above all from what the options set. The data are `rows` of `length` tokens, the
    model's stream is `width` wide; `both_phases`: its weights serve rewired and exact tokens. Raises RewriterError
    where rows cannot be divided over ranks."""
    given = options.settings
    if options.budgeted:
        settings, sizes = _budgeted(adapt, options, rows, length, width, replicas, device, both_phases)
    else:
        settings = dict(DEFAULTS)
        if adapt is not None:
            settings |= {
                "learning_rate": adapt.learning_rate, "warmup_steps": adapt.warmup_steps,
                "lr_scheduler_type": adapt.schedule, "num_train_epochs": adapt.epochs,
            }  # fmt: skip
        sizes = schedule(settings | dict(given), adapt, rows, replicas)
    settings |= given
    # a warm-up longer than the run would end below the learning rate that was asked for
    return settings | {"warmup_steps": min(settings["warmup_steps"], max(0, sizes.steps - 1))}, sizes


def _budgeted(
    adapt: Adaptation | None,
    options: AdaptOptions,
    rows: int,
    length: int,
    width: int,
    replicas: int,
    device: torch.device,
    both_phases: bool = False,
) -> tuple[dict[str, Any], RunSizes]:
    """Settings and sizes by the tokens of the run, without the settings that the options give."""
    given, tokens = dict(options.settings), tokens_of_run(options, rows * length)
    batch = Budget(tokens).rows(length, replicas)
    if device.type == "cpu" and "gradient_accumulation_steps" not in given:
        own = batch // replicas
        fitting = [n for n in range(1, own + 1) if own % n == 0 and n * length <= AT_ONCE]
        given.setdefault("per_device_train_batch_size", max(fitting, default=1))
    sizes = schedule(given, adapt, rows, replicas, batch)
    if not given.get("max_steps", 0) > 0:
        sizes = replace(sizes, steps=max(1, tokens // (sizes.batch * length)))
    done = Budget(sizes.steps * sizes.batch * length, width, both_phases)
    settings = {**DEFAULTS, **done.settings(device), "warmup_steps": math.ceil(WARMUP * sizes.steps)}
    if "lr_scheduler_type" in given:
        del settings["lr_scheduler_kwargs"]  # of another schedule
    return settings, sizes


def schedule(
    settings: Mapping[str, Any], adapt: Adaptation | None, rows: int, replicas: int, budgeted: int | None = None
) -> RunSizes:
    """The sizes for `rows` rows of data and `replicas` data-parallel ranks.

    A step sees `gradient_accumulation_steps × per_device_train_batch_size × replicas` rows where the former is set;
    else as many as are `budgeted`, or as the recipe's `batch_size` says, on any number of ranks. Raises RewriterError
    where that does not divide.
    """
    micro = settings.get("per_device_train_batch_size")
    accumulation = settings.get("gradient_accumulation_steps")
    if accumulation is not None:
        micro = micro or MICRO_BATCH
        batch = _count("gradient_accumulation_steps", accumulation) * micro * replicas
    else:
        batch = budgeted or (BATCH if adapt is None else adapt.batch_size)
        if batch % replicas:
            raise RewriterError(
                f"a step of {batch} rows cannot be divided over {replicas} data-parallel ranks. Use a number of ranks "
                "that divides it, or --set gradient_accumulation_steps=N, which makes it a multiple"
            )
        own = batch // replicas
        if micro is None:
            micro = max(n for n in range(1, min(own, MICRO_BATCH) + 1) if own % n == 0)
        if own % _count("per_device_train_batch_size", micro):
            raise RewriterError(
                f"per_device_train_batch_size={micro}: a rank has {own} of the {batch} rows of a step, which it does "
                f"not divide. Use a divisor of {own}, or set gradient_accumulation_steps too"
            )
        accumulation = own // micro
    steps = settings.get("max_steps", -1)
    if steps is None or steps <= 0:
        steps = max(1, int(rows * float(settings.get("num_train_epochs", 1.0)) // batch))
    return RunSizes(int(micro), int(accumulation), int(steps), int(batch))


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise RewriterError(f"--set {name}={value}: expected a whole number from 1")
    return value
