"""What is predicted for the settings of the paper on Ladder Residual: docs/figures/prediction.md, Against the paper.

    python -m benchmarks.predict.ladder_paper

1,024 + 512 tokens, graphed, NCCL, which the paper has, in the design of its code: embedding and head whole on every
rank, attention that is no fused kernel, logits of the whole prompt. `--usual`: as servers have it instead. Each line:
model, fabric, batch, the share of a decode step of the standard model that waits for communication, and speedups with
their intervals.
"""

from __future__ import annotations

import argparse
from typing import Any

from transformers import LlamaConfig

from rewriter import api

SIZES = {
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}
CASES = [
    ("70B", "h100-nvlink", 8, (1, 4, 16, 64), ("ladder", "parallel", "upper-bound", "desync-4x")),
    ("70B", "h100-no-p2p", 8, (1, 4, 16, 64), ("ladder", "parallel", "upper-bound", "desync-4x")),
    ("405B", "h100-2x8-ib", 16, (1, 4, 16), ("ladder",)),
    ("8B", "h100-nvlink", 8, (1, 64), ("ladder-upper-half", "ladder", "desync-4x")),
    ("8B", "h100-no-p2p", 8, (64,), ("desync-4x",)),
]
DESIGN = {"attention": "plain", "all_logits": True}
WHOLE_HEAD = {"tensor_parallel.vocabulary": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--usual", action="store_true", help="sharded vocabulary, fused attention, last logits alone")
    usual = parser.parse_args().usual
    design: dict[str, Any] = {} if usual else DESIGN
    for name, fabric, tp, batches, recipes in CASES:
        hidden, wide, layers, heads = SIZES[name]
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False,
            dtype="bfloat16",
        )  # fmt: skip
        library = None if fabric == "h100-no-p2p" else "nccl"
        for batch in batches:
            found = api.predict(
                config,
                ["tensor-parallel", *recipes],
                api.Workload(tp=tp, batch=batch, **design),
                api.Cluster(fabric=fabric, library=library),
                set=None if usual else WHOLE_HEAD,
            ).predictions
            share = found[0].decode.exposed_seconds / found[0].decode.seconds
            gains = []
            for p in found[1:]:
                assert p.end_to_end_interval is not None
                low, high = p.end_to_end_interval
                gains.append(f"{p.recipe} {p.end_to_end:.2f} ({low:.2f} to {high:.2f})")
            print(f"{name} {fabric} batch {batch}: {share:.0%} waiting;", ", ".join(gains), flush=True)


if __name__ == "__main__":
    main()
