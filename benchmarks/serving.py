"""What Ladder Residual wins in vLLM on CPUs: time per output token where all-reduces take longer.

    make serving-venv
    .venv-serving/bin/python benchmarks/serving.py [--ranks 2] [--compiled] [--json FILE]

Every variant is an output of `rewrite` of one random Llama model, served by an engine of its own. Each all-reduce of
its ranks is delayed by so many milliseconds, at one place for all: GroupCoordinator's. A round decodes a batch of
sequences at every delay. Reported are medians over rounds, in milliseconds per step, and per variant the share of the
added time that it hides: 1 − (its time − its time without delay) / (the standard model's, likewise). Tokens of every
variant are the same at every delay, or the benchmark ends with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VARIANTS = {
    "standard": "tensor-parallel",
    "ladder-upper-half": "ladder-upper-half",
    "ladder": "ladder",
    "parallel": "parallel",
}
DELAYS = (0.0, 1e-3, 3e-3, 10e-3)
HIDDEN, LAYERS, VOCABULARY = 1024, 12, 4096
SEQUENCES, PROMPT, STEPS = 16, 16, 16
for name, value in {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONPATH": str(Path(__file__).parent),  # of workers, which import serving_delay
}.items():
    os.environ.setdefault(name, value)


def write_models(directory: Path, ranks: int) -> None:
    """The source, and an output for every variant."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rewriter.api import convert

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 128,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory / "source")
    for name, recipe in VARIANTS.items():
        convert(directory / "source", recipe, out=directory / name, tp=ranks, verify="none")


def measure(directory: Path, ranks: int, compiled: bool, rounds: int) -> dict[float, list[float]]:
    """Seconds per step at every delay, one per round, of one variant."""
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        str(directory),
        tensor_parallel_size=ranks,
        dtype="float32",
        max_model_len=PROMPT + STEPS + 1,
        max_num_seqs=SEQUENCES,
        enforce_eager=not compiled,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        trust_remote_code=True,
        worker_extension_cls="serving_delay.Delay",
    )
    prompts = [TokensPrompt(prompt_token_ids=[3 + 7 * i + j for j in range(PROMPT)]) for i in range(SEQUENCES)]

    def run(steps: int) -> tuple[float, Any]:
        sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin, [tuple(o.outputs[0].token_ids) for o in outputs]

    found: dict[float, list[float]] = {delay: [] for delay in DELAYS}
    expected = run(STEPS + 1)[1]
    for _ in range(rounds):
        for delay in DELAYS:
            engine.collective_rpc("delay_all_reduces", args=(delay,))
            first, (whole, tokens) = run(1)[0], run(STEPS + 1)
            if tokens != expected:
                raise SystemExit(f"serving: {directory.name}: other tokens where all-reduces take {delay * 1e3:g} ms")
            found[delay].append((whole - first) / STEPS)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="by torch.compile, as vLLM does by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", type=Path, help=argparse.SUPPRESS)  # one variant, in a process of its own
    asked = parser.parse_args()
    if asked.only is not None:
        asked.json.write_text(json.dumps(measure(asked.only, asked.ranks, asked.compiled, asked.rounds)))
        return 0
    results = {}
    with tempfile.TemporaryDirectory(prefix="serving-") as name:
        write_models(Path(name), asked.ranks)
        for variant in VARIANTS:
            out = Path(name) / f"{variant}.json"
            again = [__file__, *sys.argv[1:], "--only", str(Path(name) / variant), "--json", str(out)]
            if os.spawnv(os.P_WAIT, sys.executable, [sys.executable, *again]):
                return 2
            results[variant] = {float(d): statistics.median(s) for d, s in json.loads(out.read_text()).items()}
    report(results)
    if asked.json is not None:
        asked.json.write_text(json.dumps(results, indent=2))
    return 0


def report(results: dict[str, dict[float, float]]) -> None:
    """A table: milliseconds per step, and the share of the added time that is hidden."""
    print("ms per step   " + "".join(f"{d * 1e3:>12g} ms" for d in DELAYS))
    standard = results["standard"]
    for variant, times in results.items():
        cells = ""
        for delay in DELAYS:
            added = standard[delay] - standard[0.0]
            share = f"({1 - (times[delay] - times[0.0]) / added:4.0%})" if delay and variant != "standard" else ""
            cells += f"{times[delay] * 1e3:8.1f} {share:>6}"
        print(f"{variant:18}{cells}")


if __name__ == "__main__":
    sys.exit(main())
