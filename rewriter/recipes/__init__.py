"""Recipes: a list of passes with their options, as YAML. `Recipe.load("ladder-upper-half").build()` gives the passes.

`rewriter.common.yaml_documents` reads YAML with line numbers, `recipe` says what a recipe holds and words its faults,
`pass_options` makes the passes, `catalogue` lists what ships in `library/`. The catalogue needs neither pydantic nor
torch, so this room is lazy too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewriter.recipes.pass_options import PassSpec
    from rewriter.recipes.recipe import Adaptation, Recipe

__all__ = ["Adaptation", "PassSpec", "Recipe"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rewriter.recipes' has no attribute {name!r}")
    from rewriter.recipes import recipe

    return getattr(recipe, name)
