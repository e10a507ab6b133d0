"""A checkpoint's parameters in fp32, read when they are asked for and forgotten when others need their place."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping

import torch

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.verify.drift import available_memory
from rewriter.weights import Checkpoint


class StreamedWeights(Mapping[str, torch.Tensor]):
    """The full tensors of `program` (as traced) by runtime name, of which at most `limit` bytes are kept.

    By default a third of the memory that is free. A model that is computed layer by layer reads each weight once per
    pass, whatever the limit. Safe to read from several threads. Raises RewriterError for a program without weights.
    """

    def __init__(self, program: Program, limit: int | None = None) -> None:
        lacking = [name for name, p in program.parameters.items() if p.expression is None]
        if program.source.path is None or lacking:
            what = f"{lacking[0]} is not in the checkpoint" if program.source.path else "it has a config and no weights"
            raise RewriterError(
                f"{program.source.path or program.source.model_type}: {what}, and a rise in loss is measured on the "
                "weights. Give a directory with config.json and safetensors"
            )
        self.program, self.limit = program, available_memory() // 3 if limit is None else limit
        self._checkpoint = Checkpoint.open(program.source.path)
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> torch.Tensor:
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
            expression = self.program.parameters[name].expression
            assert expression is not None
            tensor = self._checkpoint.evaluate(expression)
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            self._kept[name] = tensor
            self._bytes += tensor.nbytes
            while self._bytes > self.limit and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.program.parameters)

    def __len__(self) -> int:
        return len(self.program.parameters)

    def __contains__(self, name: object) -> bool:
        return name in self.program.parameters


class Overlaid(MutableMapping[str, torch.Tensor]):
    """The tensors of `base`, where no others were put in their place."""

    def __init__(self, base: Mapping[str, torch.Tensor]) -> None:
        self.base = base
        self.changed: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.changed[name] if name in self.changed else self.base[name]

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self.changed[name] = tensor

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name}: the tensors of a checkpoint stay")

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)

    def __contains__(self, name: object) -> bool:
        return name in self.changed or name in self.base
