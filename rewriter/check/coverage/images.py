"""Image-text-to-text types: the checks of one type by text, and what it emits given a picture.

The config is the type's real one, with its towers and the class that its checkpoints name, shrunken.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rewriter.check.coverage.check import Subject, _require_equal, checked, ladder_reference
from rewriter.check.coverage.configs import image_config
from rewriter.check.coverage.report import Coverage
from rewriter.check.pictures import picture
from rewriter.tracing.image_features import require_text_alone

CHECKS = ("builds", "traces", "ladder", "tp2", "emitted", "pixels")


@dataclass
class ImageCoverage(Coverage):
    """The row of an image-text type. `pixels`: given a picture, the emitted ladder gives what hooks on the source do,
    and gives something else for other pixels."""

    pixels: bool = False


def check_images(model_type: str) -> ImageCoverage:
    """Everything about one image-text type; raises nothing that a model or a rewrite may cause."""
    row = ImageCoverage(model_type)
    checked(row, ImageSubject, CHECKS)
    return row


class ImageSubject(Subject):
    """A small image-text model, its program by text, and what it gives for a picture."""

    result: ImageCoverage

    def small_config(self) -> PreTrainedConfig:
        return image_config(self.result.type)

    def try_all(self, checks: Collection[str]) -> None:
        """By text, then with a picture."""
        self.run(checks)
        if self.result.emitted:
            with self.noted("pixels"):
                self._pixels()
        else:
            self.result.reasons["pixels"] = self.result.reasons.get("emitted", "")

    def _checkpoint(self, model: PreTrainedModel) -> PreTrainedModel:
        try:
            return super()._checkpoint(model)
        except Exception as error:  # the model's own code may raise any
            require_text_alone(model, error)
            raise

    def _layers(self) -> list[int]:
        """Those that can be rewired: features of images are added between the first ones."""
        joined = self.program.source.joined
        return [layer for layer in super()._layers() if not joined or layer > joined]

    @torch.no_grad()
    def _pixels(self) -> None:
        inputs = picture(self.model)
        layers = {index for index, kind in enumerate(self.emitted.config.rewriter_layers) if kind.startswith("ladder")}
        ids = inputs.pop("input_ids")
        expected = ladder_reference(self.program, layers)(self.model, ids, given=inputs)
        given = self.emitted(input_ids=ids, **inputs, use_cache=False).logits
        _require_equal(given, expected, self.limit, "with a picture, what is emitted")
