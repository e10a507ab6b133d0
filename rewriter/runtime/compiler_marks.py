"""What Dynamo is to know of a function, said without importing it: that takes a second, in every rank.

`torch.compiler.assume_constant_result` and `torch.compiler.disable` say the same, and import Dynamo to do so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def assume_constant_result(function: F) -> F:
    """Dynamo calls it once, while it traces. The private name is what torch.compiler.assume_constant_result sets."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def not_compiled(function: F) -> F:
    """Dynamo does not look into it. Torch's private decorator for its own functions, which imports Dynamo at the first
    call."""
    disabled: F = torch._disable_dynamo(function)  # type: ignore[attr-defined, assignment]
    return disabled
