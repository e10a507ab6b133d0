"""`rewrite coverage`: what it finds on small models, that a wrong result is loud, and that no type can stop a run."""

from __future__ import annotations

import inspect
import json
from typing import Any

import coverage_faults
import pytest
import torch
from repository import ROOT
from subprocesses import load_module

from rewriter.check.coverage import check as check_module
from rewriter.check.coverage import images, pool
from rewriter.check.coverage.check import check
from rewriter.check.coverage.configs import image_oddities, image_types, oddities, registered_types, small_config
from rewriter.check.coverage.images import check_images
from rewriter.check.coverage.report import CHECKS, PARTS, Coverage
from rewriter.check.random_model import build_model, random_ids
from rewriter.check.reference_modes import original_logits
from rewriter.cli import main
from rewriter.convert import main_job
from rewriter.ir import Body, Program
from rewriter.tracing import per_head, trace
from rewriter.tracing.meta_model import build_skeleton
from rewriter.tracing.shrink import depth, representatives, shrink, text_config

pytestmark = pytest.mark.tracer

coverage_pages = load_module("coverage_pages", ROOT / "tools/docs/coverage_pages.py")

# Types


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "mixtral"])
@pytest.mark.fast("llama")
def test_what_the_product_promises_holds_for_a_type(model_type: str) -> None:
    row = check(model_type)
    assert all(getattr(row, name) for name in PARTS), row.reason
    assert row.reason is None
    assert row.split is not None
    assert 0.97 < row.split < 1  # all but norms, and the biases of rows
    assert row.reductions == 8
    assert row.stream
    assert row.blocks == (4 if model_type == "gpt_neox" else 8)
    assert not row.wrong
    assert not row.replicated


@pytest.mark.slow
def test_switches_of_a_config_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that the default config does not show is found in the variant that does."""
    row = coverage_pages.check("stablelm")
    assert set(row.variants) == {
        "hidden_act=gelu", "qk_layernorm=True", "use_parallel_residual=True", "use_qkv_bias=True",
    }  # fmt: skip
    assert not any(row.variants.values())
    right = per_head._stacked
    monkeypatch.setattr(per_head, "_stacked", lambda body, count, *rest: reversed_heads(right(body, count, *rest)))
    row = coverage_pages.check("stablelm")
    assert row.reason is None
    assert row.wrong == ["qk_layernorm=True: traces"]


def reversed_heads(body: Body) -> Body:
    """Each head is given the norm of another one."""
    [stack] = [n for n in body.graph.nodes if n.target is torch.ops.aten.stack.default]
    stack.args = (list(reversed(stack.args[0])),)
    return body


def test_variants_are_what_changes_the_forward() -> None:
    config = small_config("stablelm")
    model = build_model(config)
    found = dict(coverage_pages.candidates(config, model))
    assert found["qk_layernorm"] is True
    assert "use_cache" not in found
    assert coverage_pages.changes_forward(model, small_config("stablelm", {"use_parallel_residual": True}))
    assert not coverage_pages.changes_forward(model, small_config("stablelm", {"use_cache": False}))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["beam", "llama4_text"])
def test_desync_where_a_sum_is_multiplied_and_viewed(model_type: str) -> None:
    """Beam multiplies what a norm after the sum gives, Llama 4 views the sum by sizes of the graph."""
    row = check(model_type)
    assert row.desync, row.reason
    assert not row.wrong


def test_a_model_without_residual_stream_says_so_and_is_still_sharded() -> None:
    row = check("inkling2_text")  # what a layer adds joins a list of states, of which later layers read a mean
    assert (row.builds, row.traces, row.tp2, row.tp4) == (True, True, True, True)
    assert (row.stream, row.blocks, row.ladder, row.emitted) == (False, 0, False, False)
    assert (row.reason or "").startswith("ladder, desync, emitted: no residual stream: in layer")


def test_a_wrong_trace_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*args: Any) -> Program:
        program = trace(*args)
        graph, _ = program.edit()
        calls = [node for node in graph.nodes if node.op == "call_module" and str(node.target).endswith("layernorm")]
        calls[0].replace_all_uses_with(calls[0].all_input_nodes[0])  # one norm is skipped
        graph.erase_node(calls[0])
        return program.with_(graph=graph)

    monkeypatch.setattr(check_module, "trace", faulty)
    row = check("llama")
    assert row.wrong == ["traces"]
    assert not any(getattr(row, name) for name in PARTS if name != "builds")
    assert row.reasons["traces"].startswith("WRONG: the traced program differs at")


def test_a_refusal_names_the_line_of_the_model_that_stopped_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def needs_values(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("needs values")

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", needs_values)
    row = check("llama")
    assert not row.traces
    assert not row.wrong
    assert (row.reason or "").startswith("traces: RuntimeError: needs values (llama/modeling_llama.py:")


# The main job


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "bart", "llama4_text", "bloom", "deepseek_v32", "roberta"])
def test_the_main_job_ends_with_the_tokens_of_transformers(model_type: str) -> None:
    row = main_job.check_main_job(model_type)
    assert row.main_job, row.reason
    assert not row.wrong
    if model_type in ("bart", "roberta"):
        assert row.reasons["main_job_ladder"].startswith("no residual stream")
    else:
        assert row.main_job_ladder, row.reason


@pytest.mark.slow
def test_wrong_text_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose text is another model's, and one that is right only where rows are not padded."""
    right = main_job._tokens_of_ranks

    def other(*args: Any) -> Any:
        made = right(*args)
        return made | {"padded": [[row[0], *row[:-1]] for row in made["padded"]]}

    monkeypatch.setattr(main_job, "_tokens_of_ranks", other)
    row = main_job.check_main_job("llama")
    assert row.wrong == ["main_job", "main_job_ladder"]
    assert row.reasons["main_job"].startswith("WRONG: token 2 after a prompt of 21, padded by 0")


# A process per type


def test_types_that_hang_or_crash_cost_their_own_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "PRELOADED", ())
    types = ["crashes", "a", "b"]
    rows = {row.type: row for row in pool.run(types, coverage_faults.check, jobs=2, limit=300.0)}
    assert set(rows) == set(types)
    assert rows["a"].builds
    assert rows["b"].builds
    assert rows["crashes"].reason == "builds: its process died: signal SIGKILL, likely out of memory"
    rows = {row.type: row for row in pool.run(["hangs", "hangs too"], coverage_faults.check, jobs=1, limit=1.0)}
    assert [rows[name].reason for name in ("hangs", "hangs too")] == [
        "builds: it took more than 1 s and was stopped"
    ] * 2


# Configs


def test_oddities_are_of_registered_types() -> None:
    assert len(set(image_oddities()) - {*registered_types(), *image_types()}) <= 2
    assert len(set(oddities()) - set(registered_types())) <= 2  # new types, which older versions of transformers lack
    assert all(set(entry) <= {"default", "layers", "set"} for entry in oddities().values())


@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v3", "gemma3", "falcon_h1", "whisper"])
def test_a_small_config_keeps_the_kinds_of_layers_and_divides_by_four(model_type: str) -> None:
    config = small_config(model_type)
    text = text_config(config)
    if kinds := getattr(text, "layer_types", None):
        assert len(kinds) == depth(config)
    assert text.num_attention_heads % 4 == 0
    model = build_skeleton(config).model
    assert sum(p.numel() for p in model.parameters()) < 3e6


@pytest.mark.parametrize("model_type", ["llama", "mamba2", "dots3_note_text", "deepseek_v3", "falcon_h1"])
def test_a_small_config_can_be_shrunken_again(model_type: str) -> None:
    """As the verification of its conversion does."""
    config = small_config(model_type)
    again = shrink(config, representatives(config, []), 2)
    assert sum(p.numel() for p in build_skeleton(again).model.parameters()) < 3e6


def test_what_attention_reads_beside_the_stream_shrinks_with_it() -> None:
    """Zamba 2's attention reads the embeddings too; what its config says twice stays alike."""
    again = shrink(small_config("zamba2"), [0, 1, 2, 3, 5, 6], 2)
    assert again.hidden_size == 32
    assert again.attention_hidden_size == again.num_attention_heads * again.attention_head_dim == 64
    assert again.n_mamba_heads * again.mamba_headdim == again.mamba_expand * again.hidden_size
    assert again.hybrid_layer_ids == [i for i, kind in enumerate(again.layers_block_type) if kind == "hybrid"] == [2, 4]
    assert bool(original_logits(build_model(again), random_ids(again, 21)).isfinite().all())


@pytest.mark.slow
def test_nearly_every_registered_type_builds() -> None:
    failed = {}
    for model_type in registered_types():
        try:
            build_skeleton(small_config(model_type))
        except Exception as error:
            failed[model_type] = str(error)
    assert len(registered_types()) - len(failed) >= 160, failed


# The command


def rows() -> list[Coverage]:
    good = Coverage("good", *[True] * len(CHECKS), split=0.998, stream=True, blocks=8)
    refused = Coverage("refused", builds=True, reasons=dict.fromkeys(PARTS[1:], "its mask needs_values | *here*"))
    return [good, refused]


def test_json_has_the_promised_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pool, "run", lambda *args, **kwargs: iter(rows()))
    monkeypatch.setattr("rewriter.check.coverage.configs.require_registered", lambda *_: ["refused", "good"])
    assert main(["coverage", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert {"type", *CHECKS, "reason"} <= set(first)
    assert (first["type"], second["type"], second["reason"]) == ("refused", "good", None)
    assert first["reason"].startswith("traces, ladder, tp2, tp4, desync, emitted: its mask")


def test_a_wrong_type_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Coverage("llama", builds=True, reasons={"traces": "WRONG: x"}, wrong=["traces"])
    monkeypatch.setattr(pool, "run", lambda *args, **kwargs: iter([wrong]))
    assert main(["coverage", "llama"]) == 3
    captured = capsys.readouterr()
    assert "WRONG" in captured.out
    assert "1 of 1 types are wrong: llama" in captured.err


def test_an_unknown_type_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "lama"]) == 2
    assert "lama: no causal-LM type of transformers. Did you mean 'llama'?" in capsys.readouterr().err


def test_the_pages_have_totals_reasons_and_variants() -> None:
    kind = coverage_pages.VariedCoverage
    held, stopped = kind("held", variants={"a=True": ""}), kind("stopped", variants={"b=True": "tp2: no"})
    page, reasons = coverage_pages.pages([*rows(), held, stopped]).values()
    assert "| ladder | 1 |" in page
    assert "| good | ✓ | ✓ | 99 % | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | 8 |" in page
    assert "--tp 2` works on 1 of 4 types**" in page
    assert "1 of the 1\ntypes split 90 % or more, 0 less than half" in page
    assert "- **refused**: traces, ladder, tp2, tp4, desync, emitted: its mask needs\\_values \\| \\*here\\*" in reasons
    assert "Wrong: none." in page
    assert "2 switches of 2 types" in page
    assert "- **stopped**, b=True: tp2: no" in reasons
    assert list(coverage_pages.SAYS) == list(CHECKS)


def test_the_page_of_image_types_has_totals_and_reasons() -> None:
    checks = dict.fromkeys(images.CHECKS, True)
    good = images.ImageCoverage("good", **checks)
    other = images.ImageCoverage("other", **{**checks, "pixels": False}, reasons={"pixels": "no picture"})
    (page,) = coverage_pages.image_pages([good, other]).values()
    assert "**1 of 2 types pass every check.** Wrong: none." in page
    assert "| **2** | 2 | 2 | 2 | 2 | 2 | 1 |" in page
    assert "| other | ✓ | ✓ | ✓ | ✓ | ✓ | ✗ |" in page
    assert "- **other**: pixels: no picture" in page


# Image-text types


@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"])
@pytest.mark.fast("llava")
def test_an_image_text_type_with_a_picture(model_type: str) -> None:
    row = check_images(model_type)
    assert all(getattr(row, name) for name in images.CHECKS), row.reason
    assert not row.wrong
    assert row.to_dict()["pixels"] is True


def test_features_that_are_lost_are_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emitted model is compared where a picture stands: one that leaves it out is wrong, and only there."""
    from transformers.models.llava.modeling_llava import LlavaForConditionalGeneration

    def blind(self: Any, *args: Any, pixel_values: Any = None, **kwargs: Any) -> Any:
        seen = None if type(self).__name__.startswith("Rewriter") else pixel_values
        return forward(self, *args, pixel_values=seen, **kwargs)

    forward = LlavaForConditionalGeneration.forward
    blind.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", blind)
    row = check_images("llava")
    assert row.wrong == ["pixels"], row.reason
    assert row.emitted


def test_a_type_that_needs_an_image_says_so() -> None:
    row = check_images("blip")
    assert (row.builds, row.traces) == (True, False)
    assert "needs an image in every call" in (row.reason or "")
