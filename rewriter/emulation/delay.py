"""The engine of delays for the device that an operation's tensors are on."""

from __future__ import annotations

import threading
from typing import Any

import torch

from rewriter.common.errors import RewriterError
from rewriter.emulation.delay_cpu import DelayEngine
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.rendezvous import Rendezvous
from rewriter.fabric import DelayModel


class DelayEngines:
    """A DelayEngine for tensors on the CPU and a CudaDelayEngine for each GPU, made when it is first used."""

    def __init__(self, model: DelayModel, rendezvous: Rendezvous | None = None) -> None:
        self.model = model
        self._rendezvous = rendezvous
        self._cpu = DelayEngine(model, rendezvous)
        self._cuda: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    def submit(self, operation: EmulatedOperation) -> Any:
        for x in (*operation.outputs, *operation.inputs):
            if x.is_cuda:
                return self.on(x.device).submit(operation)
        if operation.call.kind == "barrier" and self._cuda:  # behind what the GPU has to do
            return self.on(torch.device("cuda", torch.cuda.current_device())).submit(operation)
        return self._cpu.submit(operation)

    def on(self, device: torch.device) -> Any:
        """The CudaDelayEngine of `device`. Raises RewriterError where several ranks are real: on GPUs their classes
        run in turn."""
        if device not in self._cuda:
            if self._rendezvous is not None:
                raise RewriterError(
                    f"emulated backend: several real ranks with tensors on {device}. On GPUs run one real rank at a "
                    "time, and take the slowest (rewriter.emulation.heterogeneous)"
                )
            from rewriter.emulation.delay_cuda import CudaDelayEngine

            with self._lock:
                if device not in self._cuda:
                    self._cuda[device] = CudaDelayEngine(self.model, device)
        return self._cuda[device]

    def change(self, model: DelayModel) -> None:
        """Operations take what `model` says from now on; in CUDA graphs that were captured, too."""
        self.model = self._cpu.model = model
        for engine in self._cuda.values():
            engine.change(model)

    def close(self) -> None:
        self._cpu.close()
        for engine in self._cuda.values():
            engine.close()
