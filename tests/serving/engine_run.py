"""Runs vLLM on some cases and writes the tokens: `python engine_run.py CASES.json RESULTS.json`.

A case is {"model": DIR, "prompts": [[token, …], …], "tokens": N, "engine": {arguments of LLM}, "adapter": DIR of a LoRA
or None, "every": steps of the engine between two requests or None, "fault": a fault to put into the plugin or None}.
Its result is {"tokens": [[…], …], "cached": number of prompt tokens that were in the cache, "batches": number of
batches by whether their tokens are "exact", "rewired" or "both", and of requests "preempted", in this process}, or
{"error": text}.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewriter.output.sum_schedule import Sum, SumStep

MARK = "--- the next case"  # a line of the log
ORIGINALS: list[Any] = []
WIRING: list[Any] = []

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


def with_fault(fault: str | None, batches: Counter[str]) -> None:
    """Put a fault into what the plugin knows of phases, and count batches by their tokens, and preemptions."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from rewriter.runtime.serving.vllm import phases

    rows_of, exact_from, preempt = originals = ORIGINALS or (
        phases.rows_of,
        phases.exact_from,
        Scheduler._preempt_request,
    )
    ORIGINALS[:] = originals

    def counted(phase: Any, prompts: Any, computed: Any, *others: Any) -> Any:
        rows = rows_of(phase, prompts, computed + (fault == "shifted"), *others)
        batches["exact" if rows is None else "both" if len(rows.exact) else "rewired"] += 1
        return rows

    def preempted(*given: Any, **named: Any) -> Any:
        batches["preempted"] += 1
        return preempt(*given, **named)

    Scheduler._preempt_request = preempted
    phases.rows_of = counted
    phases.exact_from = (lambda phase, prompt: 1 << 30) if fault == "unsalted" else exact_from
    with_wiring_fault(fault)


def with_wiring_fault(fault: str | None) -> None:
    """Put a fault into the wiring of rewired layers, in this process: no block reads late, or of a block's children the
    first alone runs."""
    from rewriter.runtime.serving.vllm import model
    from rewriter.runtime.serving.vllm.rewired_layer import RewiredLayer

    schedule_of, call = originals = WIRING or (model.schedule_of, RewiredLayer.call)
    WIRING[:] = originals

    def on_time(*given: Any) -> Any:
        schedule = schedule_of(*given)
        steps = SumStep(late=False, own=False, sum=Sum.INSIDE, factor=1.0)
        return replace(schedule, layers=tuple((steps,) * len(layer) for layer in schedule.layers))

    def alone(layer: Any, branch: Any, *given: Any) -> Any:
        return call(layer, replace(branch, calls=branch.calls[:1]), *given)

    model.schedule_of = on_time if fault == "on time" else schedule_of
    RewiredLayer.call = alone if fault == "alone" else call


def generated(engine: Any, prompts: list[Any], sampling: Any, every: int) -> list[Any]:
    """The tokens that the engine makes of requests that come one after the other, `every` steps apart."""
    done: dict[str, Any] = {}
    waiting, step = list(enumerate(prompts)), 0
    while waiting or engine.has_unfinished_requests():
        if waiting and step % every == 0:
            number, prompt = waiting.pop(0)
            engine.add_request(str(number), prompt, sampling)
        done |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
    return [done[str(number)] for number in range(len(prompts))]


def run(case: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    arguments = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True, "seed": 0} | case["engine"]
    batches: Counter[str] = Counter()
    with_fault(case["fault"], batches)
    try:
        engine = LLM(case["model"], **arguments)
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in case["prompts"]]
        sampling = SamplingParams(temperature=0, max_tokens=case["tokens"], ignore_eos=True, detokenize=False)
        adapter = LoRARequest("adapter", 1, case["adapter"]) if case["adapter"] else None
        if case["every"]:
            outputs = generated(engine.llm_engine, prompts, sampling, case["every"])
        else:
            outputs = engine.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        engine = None
        cleanup_dist_env_and_memory()
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": sum(output.num_cached_tokens or 0 for output in outputs),
        "batches": batches,
    }


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    found = []
    fork_workers()
    for case in cases:
        print(MARK, flush=True)
        found.append(run(case))
        Path(sys.argv[2]).write_text(json.dumps(found))
