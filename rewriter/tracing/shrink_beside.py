"""Parts beside the language model of a shrunken config, made to fit it: towers, projectors, special tokens.

The names are those that types of transformers use; a rule per name, none per type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rewriter.common.shrink_sizes import LAYERS, SMALL, WINDOWS
from rewriter.common.text_settings import special_tokens

TOWER_DEPTH = 2
# Of a tower: as wide as the language model that takes its features.
_AS_TEXT = ("out_hidden_size", "text_hidden_size", "adapter_out_dim", "output_dim", "projection_dim")
_PER_IMAGE = ("mm_tokens_per_image",)
# The layers of a tower whose output is used, or that attend to everything.
_OF_TOWER = (
    "deepstack_visual_indexes",
    "global_attn_indexes",
    "fullatt_block_indexes",
    "vision_feature_layer",
    "vision_feature_layers",
)

Shrink = Callable[[dict[str, Any], range, int], dict[str, Any]]


def shrunken_beside(value: Any, text: Mapping[str, Any], shrink: Shrink) -> Any:
    """A config inside another one, of what is not the language model, with two layers; anything else as it is.

    `text` is the shrunken language model's table, `shrink` makes one of a table, its layers and their real number.
    """
    if not isinstance(value, dict) or "model_type" not in value:
        return value
    inside = {name: shrunken_beside(v, text, shrink) for name, v in value.items()}
    count = next((value[n] for n in (*LAYERS, "depth") if isinstance(value.get(n), int)), 0)
    small = shrink(inside, range(min(count, TOWER_DEPTH)), count)
    if isinstance(value.get("depth"), int):
        small["depth"] = min(count, TOWER_DEPTH)
    return fitted(small, value, text)


def fitted(small: dict[str, Any], real: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a tower, or of the whole, whose settings agree with the small language model and small towers."""
    if isinstance(width := text.get("hidden_size"), int):
        small |= {name: width for name in _AS_TEXT if isinstance(real.get(name), int)}
        if "embed_dim" in real and "hidden_size" in real and "mlp_ratio" in real:  # the tower's own width is the first
            small["hidden_size"] = width
    small |= {name: min(real[name], SMALL[name]) for name in _PER_IMAGE if isinstance(real.get(name), int)}
    small |= {name: real[name] for name in WINDOWS if "text_config" not in real and isinstance(real.get(name), int)}
    for name in _OF_TOWER:
        if isinstance(given := real.get(name), (list, tuple)):
            small[name] = list(dict.fromkeys(max(-TOWER_DEPTH, min(layer, TOWER_DEPTH - 1)) for layer in given))
    return small


def grids_inside(table: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of pictures that a config around a tower lists, as many of the small tower's images as of the real."""
    sides = [side for v in table.values() if isinstance(v, dict) and isinstance(side := v.get("image_size"), int)]
    grids = table.get("image_grid_pinpoints")
    if not sides or not isinstance(grids, (list, tuple)):
        return {}
    small = min(sides[0], SMALL["image_size"])
    return {"image_grid_pinpoints": [[max(size // sides[0], 1) * small for size in grid] for grid in grids]}


def tokens_inside(table: Mapping[str, Any], vocabulary: int) -> dict[str, int]:
    """Special tokens of a config around a language model, as different as they are, the last of a small vocabulary."""
    given = special_tokens(table)
    places = {token: vocabulary - 1 - place for place, token in enumerate(sorted(set(given.values()), reverse=True))}
    return {name: places[token] for name, token in given.items()}
