"""Sets λ of every annealed layer before each step: see `rewriter.adapt.anneal_schedule`."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from rewriter.adapt.anneal_schedule import Annealing, set_annealing


class AnnealingCallback(TrainerCallback):
    """λ follows the number of steps that are done; what is evaluated, and what is left at the end, is the recipe."""

    def __init__(self, model: nn.Module, annealing: Annealing) -> None:
        self.model, self.annealing = model, annealing

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        set_annealing(self.model, self.annealing.at(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        set_annealing(self.model, dict.fromkeys(self.annealing.layers, 1.0))
