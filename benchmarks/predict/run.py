"""How long predictions take: CPU seconds of a 70B model with all recipes of the library.

    python -m benchmarks.predict.run             # Llama 3 70B's sizes, 8 ranks
    python -m benchmarks.predict.run --pareto    # and all TP degrees and batches

Printed are the seconds of imports, and those of the prediction, tracing and rewriting included. They are CPU seconds of
one process (time.process_time): what else the machine does counts little.
"""

from __future__ import annotations

import argparse
import sys
import time

GOAL = 10.0  # CPU seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabric", default="h100-nvlink")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--eager", action="store_true", help="as emitted, without a compiler and CUDA graphs")
    parser.add_argument("--pareto", action="store_true")
    options = parser.parse_args()

    from transformers import LlamaConfig

    from rewriter import api
    from rewriter.predict.candidates import all_recipes

    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=options.layers, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False,
        dtype="bfloat16",
    )  # fmt: skip
    # what torch and transformers import when a model is traced for the first time
    tiny = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    api.predict(tiny, ["tensor-parallel"], api.Workload(tp=2))
    print(f"imports {time.process_time():6.2f} s")
    began = time.process_time()
    found = api.predict(
        config,
        all_recipes(),
        api.Workload(tp=options.tp, graphed=not options.eager),
        api.Cluster(fabric=options.fabric),
        pareto=options.pareto,
    )
    took = time.process_time() - began
    for p in found.predictions:
        print(
            f"{p.recipe:22} prefill {p.prefill.seconds * 1e3:8.2f} ms, decode {p.decode.seconds * 1e3:7.2f} ms, "
            f"speedup {p.end_to_end:5.2f}"
        )
    for skipped in found.skipped:
        print(f"{skipped.recipe:22} {skipped.reason}")
    print(f"predicted {len(found.predictions)} recipes in {took:.2f} s, {took / len(found.predictions):.2f} s each")
    sys.exit(took >= GOAL and not options.pareto)


if __name__ == "__main__":
    main()
