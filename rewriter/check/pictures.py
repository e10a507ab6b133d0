"""A random picture with text around it, as the inputs of any image-text-to-text model, found without its processor.

Models differ in the form of pixels that they take: whole images, tiles of images, rows of patches with the grid that
they came from. The arguments of `forward` and the sizes in the config leave few, and the model itself says which one it
takes, and how many tokens it makes of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rewriter.check.comparison import DIFFERENT, relative_error
from rewriter.common.errors import RewriterError
from rewriter.common.text_settings import image_token

Inputs = dict[str, torch.Tensor]
_TEXT = 7  # tokens on either side of a picture
_SIDE = 64  # pixels, where a config does not say


@torch.no_grad()
def picture(model: PreTrainedModel, seed: int = 0) -> Inputs:
    """Inputs of `model`: a row of random tokens with one random picture between them, fp32 pixels of about 1.

    What is drawn follows from `seed`. The form is one for which other pixels give other logits. Raises RewriterError
    where no form is found that the model takes.
    """
    reasons: list[str] = []
    for form in _forms(model):
        try:
            inputs = _with_text(model, form, seed)
            others = {name: t + 1 if t.is_floating_point() else t for name, t in inputs.items()}
            first, second = (model(**given, use_cache=False).logits for given in (inputs, others))
        except Exception as error:  # a form that is not the model's: its own code says so as it likes
            reasons.append(" ".join(f"{type(error).__name__}: {error}".split())[:160])
            continue
        if bool(first.isfinite().all()) and relative_error(second, first) >= DIFFERENT:
            return inputs
        reasons.append("other pixels give the same logits")
    tried = f"; of {len(reasons)} tried, one said: {reasons[0]}" if reasons else ""
    raise RewriterError(
        f"{type(model).__name__}: no form of pixels was found that it takes{tried}. Give it a picture by its own "
        "processor, in transformers"
    )


def _with_text(model: PreTrainedModel, form: Inputs, seed: int) -> Inputs:
    """Random pixels of that form, and the tokens that they stand at."""
    generator = torch.Generator().manual_seed(seed)
    pixels = {
        name: torch.randn(t.shape, generator=generator) if t.is_floating_point() else t for name, t in form.items()
    }
    config: Any = model.config
    place = image_token(config.to_dict())
    if place is None:
        raise RewriterError("its config names no token for images")
    count, text = _features(model, pixels), config.get_text_config()
    before, after = torch.randint(3, text.vocab_size // 2, (2, _TEXT), generator=generator).tolist()
    start, end = (getattr(config, f"{part}_token_id", None) for part in ("vision_start", "vision_end"))
    before += [start] if isinstance(start, int) else []
    after = ([end] if isinstance(end, int) else []) + after
    ids = torch.tensor([[*before, *[place] * count, *after]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
    taken = inspect.signature(type(model).forward).parameters
    kinds = {name: (ids == place).long() for name in _KINDS if name in taken}
    return inputs | kinds


_KINDS = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")  # 0 for text, 1 for images


def _features(model: PreTrainedModel, pixels: Inputs) -> int:
    """The number of tokens that the model makes of them."""
    owners = [m for m in (model, model.base_model) if hasattr(m, "get_image_features")]
    if not owners:
        raise RewriterError(f"{type(model).__name__} has no get_image_features")
    made = owners[-1].get_image_features(**pixels)
    made = getattr(made, "pooler_output", made)
    width = model.get_input_embeddings().weight.shape[-1]
    return sum(t.numel() for t in _tensors(made)) // width


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)


# --- the forms of pixels


def _forms(model: PreTrainedModel) -> Iterator[Inputs]:
    """The forms that the arguments of the model's `forward` allow, the likeliest first; of pixels, their shape."""
    taken = inspect.signature(type(model).forward).parameters
    sizes = _Sizes(model.config)
    side, channels, patch = sizes.side, sizes.channels, sizes.patch
    rows, columns = 2 * sizes.merge, 4 * sizes.merge
    count = rows * columns
    grids = {"image_grid_thw": [[1, rows, columns]], "image_grid_hw": [[rows, columns]]}
    beside = {"image_merge_sizes": torch.tensor([sizes.merge])} if "image_merge_sizes" in taken else {}
    if grid := next((name for name in grids if name in taken), None):
        for shape in _patches(count, channels, patch, sizes.frames):
            yield {"pixel_values": torch.empty(shape), grid: torch.tensor(grids[grid]), **beside}
    row = torch.empty(1, count, channels * patch * patch)
    if "spatial_shapes" in taken:
        mask = torch.ones(1, count, dtype=torch.int64)
        yield {"pixel_values": row, "spatial_shapes": torch.tensor([[rows, columns]]), "pixel_attention_mask": mask}
    if "image_position_ids" in taken:
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)[None]
        yield {"pixel_values": row, "image_position_ids": places}
    if "image_patches" in taken:
        yield {"pixel_values": row}
    if "target_sizes" in taken:
        target = torch.tensor([[rows, columns]])
        yield {"pixel_values": torch.empty(1, channels, patch, count * patch), "target_sizes": target}
    for lead in ((1,), (1, 1), (1, 2), (1, 3), (1, 5), (2,), (5,)):
        whole = {"pixel_values": torch.empty(*lead, channels, side, side)}
        if "high_res_pixel_values" in taken:
            whole["high_res_pixel_values"] = torch.empty(*lead, channels, sizes.largest, sizes.largest)
        yield whole
        if "image_sizes" in taken:
            yield whole | {"image_sizes": torch.tensor([[side, side]])}
        if "pixel_attention_mask" in taken:
            yield whole | {"pixel_attention_mask": torch.ones(*lead, side, side, dtype=torch.bool)}
            yield whole | {"pixel_attention_mask": torch.ones(*lead, dtype=torch.bool)}
    yield {"pixel_values": torch.empty(count, sizes.frames, patch, patch, channels)}


def _patches(count: int, channels: int, patch: int, frames: int) -> Iterator[tuple[int, ...]]:
    yield count, channels * frames * patch * patch
    yield count, channels * patch * patch
    yield count, channels * 2 * patch * patch  # two frames of a video, where the config does not say so
    yield count, channels, patch, patch
    yield count * patch * patch, channels


class _Sizes:
    """Sizes of pictures that a config states, of its vision tower where that has a config of its own."""

    def __init__(self, config: PreTrainedConfig) -> None:
        inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
        visual = [c for c in inner if c is not config.get_text_config() and self._of(c, "patch_size", "image_size")]
        self.configs = [*visual, config]
        self.side = self._first(_SIDE, "image_size")
        self.largest = max((s for c in visual if (s := self._of(c, "image_size"))), default=self.side)
        self.patch = self._first(16, "patch_size")
        self.channels = self._first(3, "num_channels", "in_channels", "in_chans")
        self.frames = self._first(1, "temporal_patch_size")
        merges = self._first(1, "spatial_merge_size", "merge_size", "downsample_factor", "merge_kernel_size")
        self.merge = math.lcm(merges, 1)

    def _first(self, default: int, *names: str) -> int:
        return next((size for config in self.configs if (size := self._of(config, *names))), default)

    @staticmethod
    def _of(config: PreTrainedConfig, *names: str) -> int | None:
        for name in names:
            value = getattr(config, name, None)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None
