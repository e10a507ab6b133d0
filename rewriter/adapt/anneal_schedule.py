"""The schedule of annealed conversion: by how much each rewired layer has left the original's wiring, step by step.

It is a function of the step alone, so a run that is resumed goes on where it was. The layers that it is about are found
in the model, which was emitted for it (`emit.annealed.write_annealed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import TrainerCallback

from rewriter.common.errors import RewriterError


@dataclass(frozen=True)
class Annealing:
    """λ of every annealed layer at every step: exactly 1 from step `steps` on, rising linearly until then.

    It is above 0 at step 0: at 0 nothing differs from the original, and nothing would be learnt.

    `layers` are indices of decoder layers (`annealed_layers`). Raises RewriterError when `steps` is not positive, or
    there are no layers.
    """

    steps: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise RewriterError(
                f"annealing: steps={self.steps}: expected 1 or more. Leave annealing out to do without."
            )
        if not self.layers:
            raise RewriterError("annealing: no layer of the model anneals")

    def at(self, step: int) -> dict[int, float]:
        """λ by layer while step `step` is taken, counting optimizer steps from 0."""
        return dict.fromkeys(self.layers, min((step + 1) / (self.steps + 1), 1.0))


def annealed_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The layers of `model` that anneal, by their index among the decoder layers; adapters around it do not matter.

    Raises RewriterError when there are none.
    """
    layers = {
        int(name.rpartition(".")[2]): module for name, module in model.named_modules() if hasattr(module, "annealing")
    }
    if not layers:
        raise RewriterError(
            f"annealing: no layer of {type(model).__name__} has the attribute `annealing`. Load the model that "
            "rewriter.emit.annealed.write_annealed wrote"
        )
    return layers


def set_annealing(model: nn.Module, values: Mapping[int, float]) -> None:
    """Set λ of layers of `model` by index; other layers keep theirs. Nothing is recompiled or loaded for it.

    Raises RewriterError for a layer that does not anneal and for a λ outside 0 … 1.
    """
    layers = annealed_layers(model)
    for index, value in values.items():
        if index not in layers:
            raise RewriterError(f"annealing: layer {index} does not anneal; layers that do: {sorted(layers)}")
        if not 0.0 <= value <= 1.0:
            raise RewriterError(f"annealing: λ = {value} of layer {index}: expected 0 (the original) to 1 (the recipe)")
    for index, value in values.items():
        layers[index].annealing = value  # type: ignore[assignment]


class AnnealingCallback(TrainerCallback):
    """λ follows the number of steps that are done; what is evaluated, and what is left at the end, is the recipe."""

    def __init__(self, model: nn.Module, annealing: Annealing) -> None:
        self.model, self.annealing = model, annealing

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        set_annealing(self.model, self.annealing.at(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        set_annealing(self.model, dict.fromkeys(self.annealing.layers, 1.0))
