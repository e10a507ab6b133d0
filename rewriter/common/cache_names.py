"""The name that transformers gives a cache of keys and values: it changed in 5.24."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

NAMES = ("cache", "past_key_values", "cache_params")  # from 5.24 on; before, and before in recurrent models


def cache_argument(model: Any) -> str:
    """The argument by which the forward of `model`, a transformers model, takes a cache."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in NAMES if name in parameters), NAMES[1])


def cache_of(output: Mapping[str, Any]) -> Any:
    """The cache in what a transformers model returned. Raises KeyError where there is none."""
    return output[next((name for name in NAMES if name in output), NAMES[0])]
