"""A decode step in vLLM of a checkpoint that rewires prompts alone, against the original's: 1 is expected.

    .venv-serving/bin/python -m benchmarks.serving.decode_pair [--ranks 1] [--steps 600]

Both engines are compiled and step in turns, each first every second time; a third one, of the original again, says how
far equal engines are apart. Reported are medians in milliseconds, of time and of this process's time on a CPU, and of
the ratios of neighbouring steps to the first engine's, ± a standard error.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.serving.vllm_settings import set_up

set_up(VLLM_ENABLE_V1_MULTIPROCESSING="0")

SEQUENCES, FIRST = 4, 40  # steps before the first that counts


def written(root: Path, ranks: int) -> dict[str, Path]:
    """The directories of the original and of what rewires its prompts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rewriter.api import convert
    from rewriter.convert.save_options import SaveOptions

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=4096, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(root / "original")
    recipe, options = "prefill-ladder-upper-half", SaveOptions(verify="none")
    convert(root / "original", recipe, out=root / "rewired", tp=ranks, options=options)
    return {"original": root / "original", "rewired": root / "rewired", "original again": root / "original"}


def engine(directory: Path, asked: argparse.Namespace) -> Any:
    """An engine that decodes, all its prompts done."""
    from vllm import LLM, SamplingParams, TokensPrompt

    steps = asked.steps + FIRST + SEQUENCES
    made = LLM(
        str(directory), dtype="float32", max_model_len=steps + 16, max_num_seqs=SEQUENCES, skip_tokenizer_init=True,
        tensor_parallel_size=asked.ranks, num_gpu_blocks_override=4 * SEQUENCES, block_size=512,
    ).llm_engine  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
    for number in range(SEQUENCES):
        made.add_request(str(number), TokensPrompt(prompt_token_ids=list(range(3 + number, 13 + number))), sampling)
    for _ in range(FIRST):
        made.step()
    return made


def report(what: str, times: dict[str, list[float]]) -> None:
    first = next(iter(times.values()))
    for name, found in times.items():
        ratios = [b / a for a, b in zip(first, found, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        error = 1.2533 * (high - low) / 1.349 / len(ratios) ** 0.5  # of a median, were they normal
        print(f"{what:6}{name:16}{median(found) * 1e3:9.3f} ms   × {median(ratios):.4f} ± {error:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="decode-pair-") as root:
        engines = {name: engine(path, asked) for name, path in written(Path(root), asked.ranks).items()}
        wall: dict[str, list[float]] = {name: [] for name in engines}
        cpu: dict[str, list[float]] = {name: [] for name in engines}
        for step in range(asked.steps):
            for name in list(engines)[:: 1 if step % 2 else -1]:
                begin, worked = time.perf_counter(), time.process_time()
                engines[name].step()
                wall[name].append(time.perf_counter() - begin)
                cpu[name].append(time.process_time() - worked)
        report("time", wall)
        report("CPU", cpu)


if __name__ == "__main__":
    main()
