"""One variant of benchmarks/serving in vLLM. Its workers import this file, too: their all-reduces take longer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.serving.vllm_settings import set_up
from benchmarks.serving.workload import PROMPT, SEQUENCES, STEPS, Asked, Late, Tokens, asked, prompts, serve

set_up(PYTHONPATH=str(Path(__file__).parents[2]))  # of workers

_delay = 0.0


class Delay:
    """Mixed into vLLM's Worker by its `worker_extension_cls`."""

    def delay_all_reduces(self, seconds: float) -> None:
        global _delay
        if not hasattr(Delay, "patched"):
            Delay.patched = True  # type: ignore[attr-defined]
            patch()
        _delay = seconds


def patch() -> None:
    """All ways in which a model sums: vLLM's own, and the plugin's."""
    from torch import Tensor
    from vllm.distributed.parallel_state import GroupCoordinator

    from rewriter.runtime.serving.vllm.engine import VllmEngine

    all_reduce, begin = GroupCoordinator._all_reduce_out_place, VllmEngine.begin

    def late_all_reduce(self: GroupCoordinator, x: Tensor) -> Tensor:
        time.sleep(_delay)
        return all_reduce(self, x)

    def late_begin(self: VllmEngine, x: Tensor) -> tuple[Tensor, Any] | None:
        begun = begin(self, x)
        return None if begun is None else (begun[0], Late(begun[1], _delay))

    GroupCoordinator._all_reduce_out_place, VllmEngine.begin = late_all_reduce, late_begin


def main(given: Asked) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        given.directory,
        tensor_parallel_size=given.ranks,
        dtype="float32",
        max_model_len=PROMPT + STEPS + 1,
        max_num_seqs=SEQUENCES,
        num_gpu_blocks_override=2 * SEQUENCES,  # little memory, as all variants are there at once
        enforce_eager=not given.compiled,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        trust_remote_code=True,
        worker_extension_cls="benchmarks.serving.vllm_engine.Delay",
    )
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in prompts()]

    def generate(steps: int) -> tuple[float, Tokens]:
        sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = engine.generate(batch, sampling, use_tqdm=False)
        return time.perf_counter() - begin, [list(o.outputs[0].token_ids) for o in outputs]

    def run(delay: float) -> tuple[float, Tokens]:
        engine.collective_rpc("delay_all_reduces", args=(delay,))
        first, (whole, tokens) = generate(1)[0], generate(STEPS + 1)
        return (whole - first) / STEPS, tokens

    serve(given, run(0.0)[1], run)


if __name__ == "__main__":
    main(asked())
