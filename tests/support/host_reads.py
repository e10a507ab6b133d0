"""What on a GPU would make the host wait for the device, counted on CPU tensors.

with HostReads() as reads:
    step()
assert reads.counts == {}
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result the host reads, or whose size depends on values; and `lift_fresh`: a tensor from host numbers,
# which a device would get by a copy from pageable memory.
DISPATCHED = frozenset(
    {
        *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
        *("repeat_interleave", "bincount", "multinomial", "equal", "lift_fresh"),
    }
)
# Methods that read memory of the CPU without an operator.
CALLED = ("tolist", "numpy", "__array__")


class HostReads(TorchDispatchMode):
    """Within the `with`, `counts` says how often each of them was called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._calls = _Calls(self.counts)

    def __enter__(self) -> HostReads:
        self._calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        masked = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if masked or name in DISPATCHED:
            self.counts[f"{name} of a mask" if masked else name] += 1
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in CALLED:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))
