"""Delay models of other packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.suggestions import did_you_mean
from rewriter.fabric.delays import DelayModel

GROUP = "rewriter.delay_models"
BUILT_IN = ("measured", "alpha-beta")


def find_model(name: str) -> Callable[..., DelayModel]:
    """What makes a delay model of (fabric, library, graphed): `module:Class`, or an entry point of the group
    `rewriter.delay_models`. Modules are found as by `python`, in the working directory too.

    Raises RewriterError for what cannot be imported or has no such name.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        known = {point.name: point for point in entry_points(group=GROUP)}
        if name not in known:
            raise RewriterError(
                f"delay model {name!r:.60}: neither built in, nor an entry point of {GROUP}, nor module:Class. "
                f"{did_you_mean(name, (*BUILT_IN, *known))}"
            )
        module, attribute = known[name].module, known[name].attr
    if "" not in sys.path:
        sys.path.append("")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, ValueError, AttributeError) as error:
        raise RewriterError(f"delay model {name!r:.60}: cannot be imported: {error}. Write module:Class.") from None
    if not callable(found):
        raise RewriterError(f"delay model {name!r:.60}: {type(found).__name__} is no class. Write module:Class.")

    def make(*arguments: object) -> DelayModel:
        model = found(*arguments)
        if not isinstance(model, DelayModel):
            raise RewriterError(f"delay model {name!r:.60}: it has no method delay(call), which a model has.")
        return model

    return make
