"""One rank of benchmarks/prefill/serving.py, which starts it at its end of the link: engines of vLLM timed in turns.

Each rank is an engine of its own, as vLLM's external launcher has it, and all take their steps together. The time to
the first token is that of a request's first step, with its scheduling.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.serving.vllm_settings import set_up
from benchmarks.support.link_ranks import main, passed_bytes
from rewriter.common.errors import RewriterError
from rewriter.common.files import read_json
from rewriter.output.sum_schedule import hf_overrides

set_up(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_HOST_IP="127.0.0.1")

BLOCK = 128  # tokens


def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Seconds to the first token by output and length, `repetitions` each in turns, the tokens themselves, and the
    bytes and seconds on a CPU that it took this rank; seconds of a decode step by output, at the longest prompt."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0"}
    share_no_memory(rank)
    engines = {name: engine(place, spec) for name, place in spec["outputs"].items()}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    steps: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, dict[str, list[int]]] = {name: {} for name in engines}
    sent: dict[str, dict[str, int]] = {name: {} for name in engines}
    worked: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for length in spec["lengths"]:
        ids = torch.randint(2, spec["vocabulary"], (length,), generator=torch.Generator().manual_seed(length)).tolist()
        count = spec["steps"] if length == spec["lengths"][-1] else 0
        for repetition in range(spec["warm_up"] + spec["repetitions"]):
            for name, made in engines.items():
                found = answered(made, ids, count)
                sent[name][str(length)], tokens[name][str(length)] = found.sent, found.tokens
                if repetition >= spec["warm_up"]:
                    seconds[name].setdefault(str(length), []).append(found.first)
                    worked[name].setdefault(str(length), []).append(found.worked)
                    steps[name] += [found.step] * bool(count)
    return {"seconds": seconds, "steps": steps, "tokens": tokens, "sent": sent, "worked": worked}


def share_no_memory(rank: int) -> None:
    """Let vLLM find that its ranks are on several hosts, and sum over the link: they would meet in /dev/shm, which a
    network namespace does not divide."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"of rank {rank}")


def engine(directory: str, spec: dict[str, Any]) -> Any:
    """An engine whose batches hold a whole prompt."""
    from vllm import LLM

    length = spec["lengths"][-1] + spec["steps"] + 1
    return LLM(
        directory, tensor_parallel_size=spec["ranks"], distributed_executor_backend="external_launcher", seed=0,
        dtype=spec["dtype"], enforce_eager=True, enable_prefix_caching=False, max_model_len=length, max_num_seqs=1,
        max_num_batched_tokens=length, block_size=BLOCK, num_gpu_blocks_override=length // BLOCK + 2,
        skip_tokenizer_init=True, trust_remote_code=True,
        hf_overrides=hf_overrides(read_json(Path(directory) / "config.json", "")),
    ).llm_engine  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """Seconds to the `first` token, and of them on a CPU (`worked`); bytes `sent` until then; seconds of a further
    `step`."""

    first: float
    worked: float
    sent: int
    step: float
    tokens: list[int]


def answered(made: Any, ids: list[int], steps: int) -> Answer:
    """The answer to a prompt: the first token and one for each of `steps`."""
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(temperature=0, max_tokens=1 + steps, ignore_eos=True, detokenize=False)
    dist.barrier()
    passed, worked, begin = passed_bytes(), time.process_time(), time.perf_counter()
    made.add_request("asked", TokensPrompt(prompt_token_ids=ids), sampling)
    outputs = made.step()
    first = time.perf_counter()
    passed, worked = passed_bytes() - passed, time.process_time() - worked
    if [len(output.outputs[0].token_ids) for output in outputs] != [1]:
        raise RewriterError(f"a prompt of {len(ids)} tokens was no single batch of vLLM's")
    while made.has_unfinished_requests():
        outputs = made.step()
    ended = time.perf_counter()
    tokens = list(outputs[0].outputs[0].token_ids)
    return Answer(first - begin, worked, passed, (ended - first) / max(1, steps), tokens)


if __name__ == "__main__":
    main(measure)
