"""Workloads of benchmarks/emulation/steps.py: models, and how a step of each is timed. The programs know no emulation.

    python benchmarks/emulation/workloads.py SPEC.json

joins the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, over gloo as it believes, and times every
workload that SPEC names when it is this job's turn. Inference: modules emitted for two ranks, as they lie in SPEC's
directory. Training: models of transformers under DistributedDataParallel as it comes with torch.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    ResNetConfig,
    ResNetForImageClassification,
)

from benchmarks.emulation.jobs import Turns
from benchmarks.overlap.rank import build
from rewriter.runtime import Context
from rewriter.runtime.cache import StaticCache

PROMPT = 384  # tokens of a prefill: a message is above 1 MiB, from which on the quantizing recipe quantizes
ROWS, LENGTH = 2, 128  # of a training step of a language model
IMAGES, PIXELS = 8, 64

INFERENCE: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=4,
        vocab_size=4096, max_position_embeddings=512, tie_word_embeddings=False,
    ),
    "gpt-neox": GPTNeoXConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=12, vocab_size=4096,
        max_position_embeddings=512, use_parallel_residual=False,
    ),
}  # fmt: skip
RECIPES = {
    "standard": "tensor-parallel",
    "ladder": "ladder",
    "desync": "desync-2x",
    "int8": "tensor-parallel-int8",
}
EXACT_DECODE = ("int8",)  # a decode step's messages are short: it is that of the standard recipe


def training_model(name: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A model with random weights, and its loss on rows of this rank's own."""
    torch.manual_seed(0)
    if name == "resnet":
        model: nn.Module = ResNetForImageClassification(
            ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic",
                         num_labels=100)
        )  # fmt: skip
        pixels, classes = torch.randn(IMAGES, 3, PIXELS, PIXELS), torch.randint(0, 100, (IMAGES,))
        return model, lambda wrapped: wrapped(pixel_values=pixels, labels=classes).loss
    config = INFERENCE[name]
    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
    return AutoModelForCausalLM.from_config(config), lambda wrapped: wrapped(input_ids=ids, labels=ids).loss


TRAINING = ("llama", "gpt-neox", "resnet")
ALL_REDUCE = dist.all_reduce


class Later:
    """Ends all-reduces some time after they have ended: on real ranks, the longer network of the added delays.

    It must not take the core from what computes meanwhile, so whoever waits sleeps the time that is left. Only DDP,
    which waits in C++ for what a communication hook returns, has a thread for each of its few buckets.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def install(self) -> None:
        """From now on all-reduces of this process end later."""

        def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> LateWork | None:
            if async_op:
                return LateWork(ALL_REDUCE(tensor, *args, async_op=True, **kwargs), self.seconds)
            ALL_REDUCE(tensor, *args, **kwargs)
            sleep_until(time.monotonic() + self.seconds)
            return None

        dist.all_reduce = all_reduce

    def of_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's own all-reduce of a bucket, later."""
        buffer = bucket.buffer().div_(dist.get_world_size())
        late: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def release(until: float) -> None:
            sleep_until(until)
            late.set_result(buffer)

        def ended(done: Any) -> None:
            threading.Thread(target=release, args=(time.monotonic() + self.seconds,), daemon=True).start()

        ALL_REDUCE(buffer, async_op=True).get_future().then(ended)
        return late


class LateWork:
    """The handle of an operation: `wait` returns `seconds` after it has ended."""

    def __init__(self, work: Any, seconds: float) -> None:
        self._work, self._seconds, self._ended = work, seconds, math.inf
        work.get_future().add_done_callback(self._note)

    def _note(self, done: Any) -> None:
        self._ended = time.monotonic()

    def wait(self) -> bool:
        self._work.wait()
        sleep_until(min(self._ended, time.monotonic()) + self._seconds)
        return True


def sleep_until(moment: float) -> None:
    """Return at `moment` of time.monotonic, to some ten microseconds."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def inference(spec: dict[str, Any], mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, one step) of every prefill and decode that `spec` asks for."""
    root, rank = Path(spec["directory"]), dist.get_rank()
    for workload in spec["inference"]:
        family, recipe = workload.split("/")
        model = build(root / family, recipe, rank, mesh, False)
        ids = torch.randint(0, 4096, (1, PROMPT), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(PROMPT)[None]
        cache = StaticCache(model.slots, 1, PROMPT + 1, torch.float32, torch.device("cpu"))
        filled = Context(cache=cache)
        model(ids, positions, filled, logits_to_keep=1)

        def prefill(model: nn.Module = model, ids: torch.Tensor = ids, positions: torch.Tensor = positions) -> None:
            model(ids, positions, Context(), logits_to_keep=1)

        def decode(model: nn.Module = model, cache: StaticCache = cache) -> None:
            # the same position again and again: every step has as many keys before it
            step = Context(cache, torch.tensor(PROMPT))
            model(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), PROMPT), step)

        if "prefill" in spec["phases"]:
            yield f"{family} prefill {recipe}", prefill
        if "decode" in spec["phases"] and recipe not in EXACT_DECODE:
            yield f"{family} decode {recipe}", decode


def training(spec: dict[str, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, one step) of every data-parallel training that `spec` asks for."""
    for name in spec["training"]:
        model, loss = training_model(name)
        wrapped = DistributedDataParallel(model)
        if spec["added"]:
            later = Later(spec["added"])
            # without annotations, which DDP would compare with its own
            wrapped.register_comm_hook(None, lambda state, bucket, later=later: later.of_bucket(bucket))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)

        def step(
            wrapped: nn.Module = wrapped, loss: Callable[[nn.Module], torch.Tensor] = loss,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> None:  # fmt: skip
            loss(wrapped).backward()
            optimizer.step()
            optimizer.zero_grad()

        yield f"{name} step", step


def timed(step: Callable[[], None], times: int) -> dict[str, list[float]]:
    """`times` steps from a barrier on: the seconds of each, and the share of them that this process computed."""
    taken, busy = [], []
    for _ in range(times):
        dist.barrier()
        begin, worked = time.perf_counter(), time.process_time()
        step()
        seconds, used = time.perf_counter() - begin, time.process_time() - worked
        taken.append(seconds)
        busy.append(used / seconds)
    return {"seconds": taken, "busy": busy}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = []
    if spec["inference"]:
        if spec["added"]:
            Later(spec["added"]).install()
        with torch.no_grad():
            steps += list(inference(spec, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))))
    steps += list(training(spec))
    turns = Turns(spec["turns"]) if dist.get_rank() == spec["reporter"] else None
    if turns is not None:
        turns.tell([name for name, _ in steps])
    for _ in range(spec["repetitions"]):
        for name, step in (one for one in steps for _ in range(spec["each"])):
            if turns is not None:
                turns.wait()  # other ranks wait in the barrier
            with torch.set_grad_enabled(name.endswith(" step")):
                found = timed(step, spec["decodes"] if "decode" in name else 1)
            if turns is not None:
                turns.tell(found)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of added delays do not matter any more


if __name__ == "__main__":
    main()
