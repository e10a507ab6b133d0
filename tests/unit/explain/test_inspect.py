"""`rewrite inspect`: what it says of blocks, collectives, memory and rules, and that it reads config.json only."""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import image_models
import pytest
import torch
import zoo
from repository import ROOT
from rich.console import Console
from transformers import AutoModelForImageTextToText, LlamaConfig

from rewriter.check.coverage.configs import small_config
from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.explain.inspection import inspect
from rewriter.explain.inspection_tables import tables
from rewriter.ir.ops import SequencePlan
from rewriter.passes.sequence.distributed_attention import AttentionShape, wire_bytes
from rewriter.recipes import Recipe
from rewriter.recipes.apply import load_recipe


def data(family: str, recipe: str | None = "ladder", tp: int = 2) -> dict[str, Any]:
    return json.loads(inspect(zoo.config(family), recipe, tp).to_json())


def test_a_ladder_hides_every_reduction_but_the_last() -> None:
    found = data("llama")
    assert [b["reads"] for b in found["blocks"][:4]] == [
        "the embedding",
        "the embedding (stale: misses attention 0)",
        "x after attention 0 (stale: misses mlp 0)",
        "x after mlp 0 (stale: misses attention 1)",
    ]
    assert [b["stale"] for b in found["blocks"]] == [False] + [True] * 7
    assert [b["reductions"][0]["hidden"] for b in found["blocks"]] == [True] * 7 + [False]
    assert {b["on_ranks"] for b in found["blocks"]} == {"split"}


def test_blocks_are_named_by_what_they_are() -> None:
    """BERT's attention has its projection in a module beside it, which is no MLP; GPT-J's MLP is beside attention."""
    kinds = {name: {b["kind"] for b in inspect(small_config(name)).data["blocks"]} for name in ("bert", "gptj")}
    assert kinds == {"bert": {"attention", "mlp"}, "gptj": {"parallel"}}


def test_what_every_rank_computes_is_local_and_never_missed() -> None:
    """Gemma 4's embeddings per layer are a block without a sum: what it adds is there at once."""
    inspection = inspect(small_config("gemma4_text"), "ladder", 2)
    attention = next(b for b in inspection.data["blocks"] if (b["layer"], b["kind"]) == (1, "attention"))
    assert attention["reads"] == "x after attention 0 (stale: misses mlp 0)"
    assert re.search(r"local mlp +x after attention i \(stale: misses mlp i\) +as it is +none", printed(inspection))


def test_bytes_per_token_are_payloads() -> None:
    """8 blocks and the embedding reduce 64 floats, the head gathers 256."""
    communication = data("llama")["communication"]
    for side, hidden in (("before", 0), ("after", 7)):
        total = communication[side]["total"]
        assert (total["collectives"], total["hidden"]) == (10, hidden)
        assert total["bytes_per_token"] == 9 * 64 * 4 + 256 * 4
        assert total["exposed_bytes_per_token"] == (9 - hidden) * 64 * 4 + 256 * 4
        assert [row["bytes_per_token"] for row in communication[side]["layers"]] == [2 * 64 * 4] * 4


def test_parallel_blocks_need_one_reduction_after_merging() -> None:
    places = {side: data("gpt_neox")["communication"][side]["places"] for side in ("before", "after")}
    assert places["before"]["block"]["collectives"] == 8
    assert places["after"]["block"]["collectives"] == 4


def test_norm_statistics_inside_blocks_are_counted() -> None:
    found = data("olmo2", "tensor-parallel")
    inside = found["communication"]["after"]["places"]["inside a block"]
    assert (inside["collectives"], inside["bytes_per_token"]) == (8, 8 * 4)  # one fp32 mean for queries, one for keys
    assert inside["hidden"] == 0


def test_memory_is_that_of_a_rank() -> None:
    one, two = data("llama", None, 1)["memory"], data("llama", None, 2)["memory"]
    parameters = sum(p.numel() for p in zoo.shared("llama").parameters()) * 4
    norms = 9 * 64 * 4
    assert one["parameters"] == one["parameters_per_rank"] == two["parameters"] == parameters
    assert two["parameters_per_rank"] == (parameters - norms) // 2 + norms
    config = zoo.config("llama")
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    assert one["cache_per_token"] == 4 * 2 * config.num_key_value_heads * size * 4 == 2 * two["cache_per_token"]
    assert one["logits_per_token"] == two["logits_per_token"] == 256 * 4


def test_what_text_does_not_use_is_named() -> None:
    config = image_models.config("gemma3")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    found = inspect(config, "ladder", 2)
    described = found.data["model"]
    assert described["beside_text"] == {
        f"model.{name}": sum(p.numel() for p in model.model.get_submodule(name).parameters())
        for name in ("vision_tower", "multi_modal_projector")
    }
    assert described["parameters"] + sum(described["beside_text"].values()) == model.num_parameters()
    assert "forward on text does not use (model.vision_tower, model.multi_modal_projector)" in printed(found)
    assert data("llama")["model"]["beside_text"] == {}


def printed(inspection: Any, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(inspection)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rules_that_did_not_fire_say_why() -> None:
    rules = {(r["rule"], r["reason"]) for r in data("qwen2", "ladder-upper-half")["rules"]}
    text = "\n".join(f"{rule}: {reason}" for rule, reason in rules)
    assert (
        "tensor_parallel: model.embed_tokens and 1 like it replicated: a vocabulary of 259 does not divide by 2" in text
    )
    assert "merge_reductions: no pair of all-reduces is added" in text
    assert "ladder: layers 0–1 keep their reads" in text


def test_one_device_communicates_nothing() -> None:
    found = data("llama", "ladder", 1)
    assert found["communication"]["before"]["total"]["collectives"] == 0
    assert ("tensor_parallel", "one rank: nothing to split") in {(r["rule"], r["reason"]) for r in found["rules"]}


def test_a_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(RewriterError, match="query heads do not divide by 3"):
        inspect(zoo.config("llama"), "ladder", 3)


def test_a_bare_config_prints_as_tables_with_alike_layers_folded(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(zoo.config("llama").to_dict() | {"num_hidden_layers": 12, "dtype": "bfloat16"}))
    inspection = inspect(file, "ladder-upper-half", 2)
    text = printed(inspection, 100)
    assert "6–10 ×5" in text
    assert "1–4 ×4" in text
    assert "x after attention i-1 (stale: misses mlp i-1)" in text
    assert "bfloat16" in text
    assert inspection.data["communication"]["before"]["layers"][0]["bytes_per_token"] == 2 * 64 * 2
    assert list(tmp_path.iterdir()) == [file]


def test_the_command_prints_the_plan_of_every_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(zoo.config("mixtral").to_dict()))
    assert main(["inspect", str(file), "--recipe", "ladder-own-partial", "--tp", "2", "--plan"]) == 0
    shown = capsys.readouterr().out
    assert shown == inspect(file, "ladder-own-partial", 2).plan
    assert re.search(r"^layers 1–2: 2 collectives \(2 hidden\)", shown, re.MULTILINE)
    assert re.search(r"self_attn +own_partial +x of 1 block before \+ own part +behind 1 block +split", shown)
    assert re.search(r"mlp.experts.down_proj +MixtralSparseMoeBlock +by input +4 × 64 × 56 +4 × 64 × 112", shown)


LARGE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.slow
def test_a_70b_config_is_inspected_in_seconds(tmp_path: Path) -> None:
    """CPU time with room for a busy machine; `benchmarks/inspect/run.py` measures against the real limits."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    code = (
        "import re, resource, sys; from rewriter.cli import main; code = main(sys.argv[1:]);"
        "used = resource.getrusage(resource.RUSAGE_SELF);"
        # not ru_maxrss, which begins with what the process had that started this one
        "peak = re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1];"
        "print(used.ru_utime + used.ru_stime, peak, file=sys.stderr); sys.exit(code)"
    )
    words = f"inspect {tmp_path} --recipe ladder-upper-half --tp 8 --json".split()
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, kilobytes = map(float, done.stderr.split()[-2:])
    found = json.loads(done.stdout)
    assert len(found["blocks"]) == 160
    assert found["memory"]["parameters"] == 70_553_706_496 * 2
    assert seconds < 16
    assert kilobytes < 1.5e6


# --- tokens over ranks -----------------------------------------------------------------------------------------------


@functools.cache
def planned(family: str, recipe: str | None, tp: int, sp: int, tokens: int | None = None) -> dict[str, Any]:
    return json.loads(inspect(zoo.config(family), recipe, tp, sp=sp, tokens=tokens).to_json())


def test_one_rank_shares_no_tokens() -> None:
    assert planned("llama", None, 1, 1)["sequence"] is None


def test_plans_are_those_of_the_planner() -> None:
    """8 query heads on 2 key/value heads in fp32, halved by two tensor-parallel ranks."""
    found = planned("llama", None, 2, 4, 1000)["sequence"]
    shape = AttentionShape(4, 1, 8, 8, layers=4, dtype_bytes=4)
    assert found["attention"] == [
        dict(layers=4, q_heads=4, kv_heads=1, head_dim=8, value_dim=8, causal=True, window=None)
    ]
    assert len(found["plans"]) == 2 + 2 * 5  # ring, Ulysses, and five grids that overlap or not
    for row in found["plans"]:
        plan = SequencePlan(row["kind"], tuple(row["grid"]), row["overlap"])
        per_rank = [wire_bytes(plan, shape, 1000, rank) for rank in range(4)]
        assert row["bytes_forward"] == 4 * max(wire.forward for wire in per_rank)
        assert row["bytes_backward"] == 4 * max(wire.backward for wire in per_rank)
        least = found["lower_bound"]["forward"] + found["lower_bound"]["backward"]
        sent = row["bytes_forward"] + row["bytes_backward"]
        assert row["times_lower_bound"] == pytest.approx(sent / least)
    assert found["tokens"] == 1000
    assert not found["applied"]
    assert [row["chosen"] for row in found["plans"]] == [True] + [False] * 11
    assert found["chosen"]["name"] == found["plans"][0]["name"]


def test_the_plan_of_the_recipe_is_shown_and_a_faster_one_named() -> None:
    found = planned("gemma3_text", "ring-attention", 1, 4)
    sequence = found["sequence"]
    assert found["mesh"] == {"sp": 4}
    assert sequence["applied"]
    assert sequence["chosen"]["kind"] == "ring"
    assert [row["kind"] for row in sequence["plans"] if row["chosen"]] == ["ring"]
    assert sequence["tokens"] == zoo.MAX_POSITIONS  # what its config says, for neither recipe nor user names a length
    # sliding layers have other arithmetic, and no fewer bytes
    assert sorted((a["layers"], a["window"]) for a in sequence["attention"]) == [(2, None), (4, 9)]
    assert any(note.startswith("Windows or chunks (4 of 9 tokens)") for note in sequence["notes"])
    # logits are gathered over the tokens, once
    assert found["communication"]["after"]["places"] == {
        "head": dict(collectives=1, exposed=1, hidden=0, bytes_per_token=1024, exposed_bytes_per_token=1024)
    }


@functools.cache
def planned_wide(sp: int, tokens: int | None, fixed: int | None = None, positions: int = 8192) -> dict[str, Any]:
    """`long-context` for 32:8 heads of 128 in bf16, without much else, with `fixed` as its own length."""
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=positions,
        dtype="bfloat16",
    )
    recipe = load_recipe("long-context", {"sequence_parallel.tokens": fixed} if fixed else None)
    return dict(inspect(config, recipe, sp=sp, tokens=tokens).data)


def summary_of(found: dict[str, Any]) -> str:
    return next(entry["summary"] for entry in found["passes"] if entry["name"] == "sequence_parallel")


@pytest.mark.parametrize("ranks", [8, 64])
def test_an_automatic_plan_is_the_first_of_the_table_at_every_length(ranks: int) -> None:
    chosen = {}
    for tokens in (4096, 32_768, 131_072):
        found = planned_wide(ranks, tokens)
        sequence = found["sequence"]
        assert sequence["applied"]
        assert sequence["tokens"] == tokens
        assert sequence["chosen"]["name"] == sequence["plans"][0]["name"]
        assert sequence["plans"][0]["chosen"]
        assert summary_of(found).endswith(f"as {sequence['chosen']['name']}, planned for {tokens:,} tokens")
        chosen[sequence["chosen"]["name"]] = tokens
    assert len(chosen) == 3  # another plan at each, so that a length that is not heeded shows


@pytest.mark.parametrize(("positions", "tokens"), [(4096, 4096), (1 << 20, 131_072)])
def test_without_a_length_it_is_the_models_positions_up_to_the_planners_longest(positions: int, tokens: int) -> None:
    found = planned_wide(64, None, positions=positions)
    assert found["sequence"]["tokens"] == tokens
    assert found["sequence"]["plans"][0]["chosen"]
    assert found["sequence"]["chosen"] == planned_wide(64, tokens)["sequence"]["chosen"]


def test_a_length_of_the_recipe_is_kept() -> None:
    alone = planned_wide(64, None, fixed=32_768)
    assert alone["sequence"]["tokens"] == 32_768
    assert alone["sequence"]["plans"][0]["chosen"]
    other = planned_wide(64, 4096, fixed=32_768)
    assert other["sequence"]["tokens"] == 4096
    assert other["sequence"]["chosen"] == alone["sequence"]["chosen"]
    assert not other["sequence"]["plans"][0]["chosen"]
    assert summary_of(other) == summary_of(alone)
    assert summary_of(alone).endswith("planned for 32,768 tokens")
    assert any("Faster at this length" in note for note in other["sequence"]["notes"])


def test_plans_that_heads_forbid_are_named() -> None:
    refused = planned("qwen3", None, 1, 3)["sequence"]["refused"]
    assert refused == [{"reason": "heads=3 does not divide 4 query heads", "grids": [[3, 1, 1]]}]


def test_the_table_says_what_the_json_says() -> None:
    inspection = inspect(zoo.config("qwen3"), "ring-attention", 1, sp=3, tokens=500)
    found = inspection.data["sequence"]
    text = printed(inspection, 220)
    assert "tokens over 3 × 1 rank, recipe: ring-attention" in text
    assert "Attention over 3 ranks, 500 tokens" in text
    assert "Chosen: ring 1×3×1" in text
    ring = " ".join(next(line for line in text.splitlines() if line.startswith("5  ring 1×3×1 overlapped")).split())
    (row,) = (plan for plan in found["plans"] if plan["chosen"])
    assert f"{row['bytes_forward'] / 1e3:,.0f} + {row['bytes_backward'] / 1e3:,.0f}" in ring
    assert f"{row['seconds_forward'] * 1e6:.3g} + {row['seconds_backward'] * 1e6:.3g}" in ring
    assert "Not possible: heads=3 does not divide 4 query heads (grid 3×1×1)." in text
    assert "A rank computes and caches one in 3 tokens." in text


@pytest.mark.parametrize(("options", "message"), [({"sp": 0}, "--sp 0"), ({"sp": 2}, "has no sequence_parallel")])
def test_ranks_that_share_no_tokens_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(RewriterError, match=message):
        inspect(zoo.config("llama"), "ladder", 2, **options)


# --- both phases ---


PROMPT = {"phase": "prompt", "exact_tail": 3, "exact_head": 2}
PASSES: list[dict[str, Any]] = [
    {"pass": "tensor_parallel"},
    {"pass": "desync", "n": 2, "resync": "sum", "layers": "0-1", **PROMPT},
    {"pass": "ladder", "layers": [3]},
    {"pass": "quantize_collectives", "format": "int8", "layers": [2], "min_bytes": 0, **PROMPT},
    {"pass": "overlap"},
]


def of_passes(passes: list[dict[str, Any]]) -> Recipe:
    return Recipe.model_validate({"name": "both", "summary": "Test.", "paper": "None.", "passes": passes})


def test_both_phases_have_their_sums() -> None:
    recipe = of_passes(PASSES)
    found = json.loads(inspect(zoo.config("llama"), recipe, 2).to_json())
    phases = found["phases"]
    assert (phases["exact_head"], phases["exact_tail"]) == (2, 3)
    assert phases["rewired"] == "the prompt but its first 2 and last 3 tokens"
    sides = {"standard": found["communication"]["before"], "rewired": found["communication"]["after"]}
    sides["exact"] = phases["exact"]["communication"]
    counts = {side: traffic["total"]["collectives"] for side, traffic in sides.items()}
    assert counts == {"standard": 10, "rewired": 8, "exact": 10}  # desync leaves one of two out, in two layers
    hidden = {side: traffic["total"]["hidden"] for side, traffic in sides.items()}
    assert hidden["standard"] == 0
    assert hidden["rewired"] == hidden["exact"] > 0  # the ladder is for all tokens
    assert sides["exact"]["total"]["bytes_per_token"] == sides["standard"]["total"]["bytes_per_token"]
    assert sides["rewired"]["total"]["bytes_per_token"] < sides["exact"]["total"]["bytes_per_token"] - 2 * 64 * 4
    assert (sides["rewired"]["quantized"]["reductions"], sides["exact"]["quantized"]) == (2, None)
    without = of_passes([p for p in PASSES if "phase" not in p])
    alone = json.loads(inspect(zoo.config("llama"), without, 2).to_json())
    assert alone["phases"] is None
    assert phases["exact"]["plan"] == alone["plan"]
    assert phases["exact"]["blocks"] == alone["blocks"]


def test_both_phases_are_shown() -> None:
    inspection = inspect(zoo.config("llama"), of_passes(PASSES), 2)
    text = printed(inspection, 120)
    shown = text[text.index("Rewired tokens") : text.index("of the embedding")]
    assert "\n".join(line.rstrip() for line in shown.splitlines()) == BOTH_PHASES
    plan = inspection.plan
    head, rewired, exact = re.split(r"\n\n(?:rewired|exact) tokens\n", plan)
    assert head.splitlines()[1] == (
        "rewired tokens: the prompt but its first 2 and last 3 tokens; exact tokens: all others, and what is generated"
    )
    assert "left out" in rewired
    assert "left out" not in exact
    assert plan.count("self_attn.q_proj.weight") == 1  # ranks hold one set of weights


BOTH_PHASES = """\
Rewired tokens: the prompt but its first 2 and last 3 tokens. Exact tokens: all others, and everything that is
generated.

Residual stream, of rewired tokens: each block adds what it computes to x
layer  block      reads                                      reduction  B/token
0      attention  the embedding                              dropped          –
       mlp        this rank's own x after attention 0        exposed        256
1      attention  x after mlp 0                              dropped          –
       mlp        this rank's own x after attention 1        exposed        256
2      attention  x after mlp 1                              exposed         65
       mlp        x after attention 2                        hidden          65
3      attention  x after attention 2 (stale: misses mlp 2)  hidden         256
       mlp        x after mlp 2 (stale: misses attention 3)  exposed        256
Every block is split over the ranks.

Residual stream, of exact tokens: each block adds what it computes to x
layer  block      reads                                      reduction  B/token
0      attention  the embedding                              exposed        256
       mlp        x after attention 0                        exposed        256
1      attention  x after mlp 0                              exposed        256
       mlp        x after attention 1                        exposed        256
2      attention  x after mlp 1                              exposed        256
       mlp        x after attention 2                        hidden         256
3      attention  x after attention 2 (stale: misses mlp 2)  hidden         256
       mlp        x after mlp 2 (stale: misses attention 3)  exposed        256
Every block is split over the ranks.

Communication per forward pass
                                  standard            rewired tokens  exact tokens
collectives                             10                         8            10
  hidden behind computation              0                         2             2
  exposed                               10                         6             8
bytes per token                      3,328                     2,434         3,328
  exposed                            3,328                     2,113         2,816"""


@pytest.mark.parametrize("width", [60, 80, 140])
def test_routine_passes_that_changed_nothing_are_shown_on_demand(width: int) -> None:
    found = inspect(zoo.config("llama"), "ladder", 2).data

    def shown(verbose: bool) -> list[str]:
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            console.print(tables(found, verbose=verbose))
        return capture.get().splitlines()

    brief, whole = shown(False), shown(True)
    assert max(map(len, whole)) <= width
    assert "merge_reductions" not in "".join(brief)
    assert sum(line.startswith("merge_reductions") for line in whole) == 2  # as a pass, and as a rule
    assert any(line.startswith("ladder") for line in brief)
    assert ("B/token" in "".join(brief)) == (width > 80)
