"""Runs vLLM on some cases and writes the tokens: `python engine_run.py CASES.json RESULTS.json`.

A case is {"model": DIR, "prompts": [[token, …], …], "tokens": N, "engine": {arguments of LLM}, "adapter": DIR of a LoRA
or None}. Its result is {"tokens": [[…], …], "cached": number of prompt tokens that were in the cache}, or
{"error": text}.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

MARK = "--- the next case"  # a line of the log

for name, value in {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)


def fork_workers() -> None:
    """Let workers begin with vLLM imported: the CPU build lets each import it, which takes ten seconds."""
    from vllm.v1.executor import multiproc_executor

    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama"])
    multiproc_executor.get_mp_context = lambda: server


def run(case: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    arguments = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True, "seed": 0} | case["engine"]
    try:
        engine = LLM(case["model"], **arguments)
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in case["prompts"]]
        sampling = SamplingParams(temperature=0, max_tokens=case["tokens"], ignore_eos=True, detokenize=False)
        adapter = LoRARequest("adapter", 1, case["adapter"]) if case["adapter"] else None
        outputs = engine.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        engine = None
        cleanup_dist_env_and_memory()
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": sum(output.num_cached_tokens or 0 for output in outputs),
    }


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    found = []
    fork_workers()
    for case in cases:
        print(MARK, flush=True)
        found.append(run(case))
        Path(sys.argv[2]).write_text(json.dumps(found))
