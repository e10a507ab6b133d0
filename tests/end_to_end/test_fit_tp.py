"""`rewrite MODEL --recipe fit-tp`: an ordinary checkpoint of other sizes, its plan, and recipes on top of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fitted_models
import pytest
import quantized_checkpoints
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rewriter import api
from rewriter.check.comparison import relative_error
from rewriter.check.padded_model import real_tokens
from rewriter.cli import main
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.convert.conversion import convert
from rewriter.convert.padding import padded_places
from rewriter.convert.save_options import SaveOptions
from rewriter.output.manifest import read_manifest

WASTE = fitted_models.WASTE


def nbytes(directory: Path) -> int:
    """Bytes of all tensors, by the files."""
    total = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    return total


def loaded(directory: Path, **given: Any) -> Any:
    """As users load it, without code of its own."""
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(directory, **options, **given).eval()


@pytest.mark.parametrize("tp", [3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen3_moe", *(
    pytest.param(family, marks=pytest.mark.slow) for family in fitted_models.FAMILIES if family != "qwen3_moe"
)])  # fmt: skip
def test_a_plain_checkpoint_that_ranks_and_transformers_compute_as_the_source(
    family: str, tp: int, tmp_path: Path
) -> None:
    fitted_models.save(family, tmp_path / "model")
    report = convert(tmp_path / "model", "fit-tp", out=tmp_path / "out", tp=tp, set=WASTE)
    assert any("padded sizes = original model" in name for name in report.verification)
    assert f"real weights: sharded module on {tp} ranks = original model" in report.verification
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "auto_map" not in config
    assert not list((tmp_path / "out").glob("*.py"))
    logits, tokens = fitted_models.of_source(family)
    model = loaded(tmp_path / "out", **config.get("rewriter_on_load", {}))
    with torch.no_grad():
        padded = model(input_ids=fitted_models.ids(), use_cache=False).logits
    assert relative_error(real_tokens(padded, logits), logits) < (1e-4 if family == "qwen3_next" else 1e-5)
    assert torch.equal(fitted_models.tokens(model), tokens)
    plan = api.inspect(tmp_path / "model", recipe="fit-tp", tp=tp).data["padding"]
    grown = nbytes(tmp_path / "out") / nbytes(tmp_path / "model") - 1
    padding = read_manifest(tmp_path / "out").padding
    assert padding is not None
    assert plan["weights"] == pytest.approx(grown, abs=1e-9) == padding.growth


def test_what_cannot_stand_in_config_json_is_said_on_loading(tmp_path: Path) -> None:
    fitted_models.save("gemma3_text", tmp_path / "model")
    convert(tmp_path / "model", "fit-tp", out=tmp_path / "out", tp=5, set=WASTE, options=SaveOptions(verify="none"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'from_pretrained("THIS DIRECTORY", num_attention_heads=5)' in card
    assert """--hf-overrides '{"num_attention_heads": 5}'""" in card
    with pytest.raises(RuntimeError, match=r"mismatch|size"):
        loaded(tmp_path / "out")
    logits = fitted_models.of_source("gemma3_text")[0]
    with torch.no_grad():
        again = api.load(tmp_path / "out")(fitted_models.ids()).logits
    assert relative_error(real_tokens(again, logits), logits) < 1e-5
    assert "real weights: sharded module on 1 rank = original model" in api.reshard(tmp_path / "out", tp=1)
    api.refresh(tmp_path / "out")


def test_padding_is_known_of_an_output_that_is_converted_again(tmp_path: Path) -> None:
    """By another recipe as it was, by fit-tp with what is new and where the old went."""
    options = SaveOptions(verify="none")
    fitted_models.save("qwen3", tmp_path / "model", tie_word_embeddings=False)
    convert(tmp_path / "model", "fit-tp", out=tmp_path / "one", tp=3, set=WASTE, options=options)
    convert(tmp_path / "one", "ladder", out=tmp_path / "two", tp=3, options=options)
    first, second = (read_manifest(tmp_path / name).padding for name in ("one", "two"))
    assert first is not None
    assert first == second
    convert(tmp_path / "one", "fit-tp", out=tmp_path / "three", tp=5, set=WASTE, options=options)
    third, tensors = read_manifest(tmp_path / "three").padding, load_file(tmp_path / "three" / "model.safetensors")
    assert third is not None
    assert third.vocabulary == first.vocabulary == 250
    assert third.growth == pytest.approx(nbytes(tmp_path / "three") / nbytes(tmp_path / "model") - 1, abs=1e-9)
    places = padded_places(third, list(tensors))
    for name, tensor in tensors.items():
        known = {dim: 0 for dim, _, zero in places.get(name, ()) if zero}
        for dim, ranges, zero in places.get(name, ()):
            for start, stop in ranges if zero else ():
                assert not tensor.narrow(dim, start, stop - start).any()
                known[dim] += stop - start
        for dim in known:  # and nothing else is all zeros
            others = [d for d in range(tensor.dim()) if d != dim]
            zeros = ~tensor.ne(0).any(others[0]) if others else tensor.eq(0)
            assert int(zeros.sum()) == known[dim], (name, dim)


def test_what_looks_at_an_output_knows_its_sizes(tmp_path: Path) -> None:
    """bisect compares with the padded model; refresh and reshard shrink a config whose heads are given on load."""
    fitted_models.save("qwen3", tmp_path / "model")
    convert(tmp_path / "model", "fit-tp", out=tmp_path / "out", tp=3, set=WASTE, options=SaveOptions(verify="none"))
    assert api.bisect(tmp_path / "out").fault is None
    assert api.bisect(tmp_path / "model", recipe="fit-tp", tp=3, set=WASTE).fault is None


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"hidden_size": 64, "intermediate_size": 224}, {"intermediate_size": 128}])
def test_experts_of_widths_that_kernels_take(sizes: dict[str, int], tmp_path: Path) -> None:
    """The shrunken copy has experts whose widths three ranks do not divide, and kernels of grouped products take."""
    fitted_models.save("qwen3_moe", tmp_path / "model", moe_intermediate_size=sizes["intermediate_size"])
    report = convert(tmp_path / "model", "fit-tp", out=tmp_path / "out", tp=3, set=WASTE)
    assert "padded sizes = original model" in report.verification


COMPOSED = [
    ("qwen3", "fit-tp+ladder-upper-half", 3),
    pytest.param("gemma3_text", "fit-tp+prefill-ladder", 5, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", "fit-tp+prefill-desync-2x-sum", 3, marks=pytest.mark.slow),
    pytest.param("llama", "fit-tp+desync-2x", 5, marks=pytest.mark.slow),
    pytest.param("qwen3_next", "fit-tp+ladder", 3, marks=pytest.mark.slow),
    pytest.param("qwen3", "fit-tp+prefill-int8", 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "recipe", "tp"), COMPOSED)
def test_other_recipes_on_padded_sizes(family: str, recipe: str, tp: int, tmp_path: Path) -> None:
    fitted_models.save(family, tmp_path / "model")
    report = convert(tmp_path / "model", recipe, out=tmp_path / "out", tp=tp, set=WASTE)
    assert {"padded sizes = original model"} <= set(report.verification)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.passes[0].name == "fit_ranks"
    if "int8" not in recipe:
        assert manifest.adapted.modeling
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
        assert model.config.vocab_size > 250


def test_a_seeded_fault_in_the_weights_fails_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the first scale in place of zeros: padding that contributes."""
    from rewriter.weights import padding

    fitted_models.save("qwen3", tmp_path / "model")
    right = padding.taken
    monkeypatch.setattr(
        padding, "taken", lambda e, dims, fill=0: right(e, {d: tuple(max(i, 0) for i in p) for d, p in dims.items()})
    )
    with pytest.raises(VerificationError, match="padded sizes = original model"):
        convert(tmp_path / "model", "fit-tp", out=tmp_path / "out", tp=3, set=WASTE)
    assert not (tmp_path / "out").exists()


KINDS = ["fp8-blocks", "awq", "mxfp4", "gptq", "fp8-experts", "fp8-deepseek", "gptq-act-order"]


@pytest.mark.parametrize("kind", [
    KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])
])  # fmt: skip
def test_quantized_weights_keep_their_form(kind: str, tmp_path: Path) -> None:
    quantized_checkpoints.make(kind, tmp_path / "model")
    report = convert(tmp_path / "model", "fit-tp", out=tmp_path / "out", tp=3, set=WASTE)
    assert report.verification["real weights: sharded module on 3 ranks = original model"] < 1e-5
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert {name: t.dtype for name, t in before.items()} == {name: t.dtype for name, t in after.items()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]
    padding = read_manifest(tmp_path / "out").padding
    assert padding is not None
    grown = nbytes(tmp_path / "out") / nbytes(tmp_path / "model") - 1
    assert padding.growth == pytest.approx(grown, abs=1e-9)
    assert api.inspect(tmp_path / "model", recipe="fit-tp", tp=3).data["padding"]["weights"] == padding.growth


def test_groups_that_padding_would_cut_are_written_as_what_they_stand_for(tmp_path: Path) -> None:
    quantized_checkpoints.make("fp8-exponents", tmp_path / "model")
    with pytest.raises(RewriterError, match=r"cut through groups of fp8 in blocks of 24×32\. Add --dequantize"):
        convert(tmp_path / "model", "fit-tp", out=tmp_path / "out", tp=3, set=WASTE)
    options = SaveOptions(dequantize=True)
    report = convert(tmp_path / "model", "fit-tp", out=tmp_path / "out", tp=3, set=WASTE, options=options)
    assert report.verification["real weights: sharded module on 3 ranks = original model"] < 1e-5


def test_files_without_padding_are_linked_and_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fitted_models.build("qwen3", tie_word_embeddings=False, vocab_size=384)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    options = SaveOptions(verify="none", link=True)
    report = convert(tmp_path / "model", "fit-tp", out=tmp_path / "whole", tp=3, set=WASTE, options=options)
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 4
    linked = [n for n in files if os.path.samefile(tmp_path / "model" / n, tmp_path / "whole" / n)]
    assert 0 < len(linked) < len(files)
    assert report

    from rewriter.emit.files.output_directory import OutputDirectory

    record, count = OutputDirectory.record, 0

    def stops(self: Any, path: Path, sha256: str) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        record(self, path, sha256)

    with monkeypatch.context() as patched:
        patched.setattr(OutputDirectory, "record", stops)
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "model", "fit-tp", out=tmp_path / "out", tp=3, set=WASTE, options=options)
    resumed = SaveOptions(verify="none", link=True, resume=True)
    convert(tmp_path / "model", "fit-tp", out=tmp_path / "out", tp=3, set=WASTE, options=resumed)
    whole, other = (read_manifest(tmp_path / name).files for name in ("whole", "out"))
    assert {n: whole[n] for n in files} == {n: other[n] for n in files}


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fitted_models.save("qwen3", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "model", "--recipe", "fit-tp", "--tp", "7", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [layout["ranks"] for layout in data["padding"]["layouts"]] == [7, 5, 1]
    assert any("a conversion asks for --set fit_ranks.waste=" in rule["reason"] for rule in data["rules"])
    assert main(["model", "--recipe", "fit-tp", "--tp", "7", "--verify", "none"])
    words = ["model", "--recipe", "fit-tp", "--tp", "3", "--tp-also", "6", "--set", "fit_ranks.waste=500%"]
    assert main([*words, "--verify", "none"]) == 0
    config = json.loads(Path("model-fit-tp-tp3", "config.json").read_text())
    assert config["num_attention_heads"] % 6 == 0
    assert main(["reshard", "model-fit-tp-tp3", "--tp", "6", "--verify", "none"]) == 0
    assert main(["diff", "model-fit-tp-tp3"]) in (0, 1)
    assert "o_proj" in capsys.readouterr().out


def test_layouts_of_a_plan(tmp_path: Path) -> None:
    """Waste by hand, of a model with 10 query heads of 8 on 2 groups, 104 channels and a width of 48, on 3 ranks."""
    fitted_models.save("qwen3", tmp_path, attention_bias=False)
    plan = api.inspect(tmp_path, recipe="fit-tp", tp=3).data["padding"]
    assert {s["setting"]: (s["before"], s["after"]) for s in plan["sizes"]} == {
        "num_attention_heads": (10, 15), "num_key_value_heads": (2, 3), "intermediate_size": (104, 120),
        "vocab_size": (250, 384),
    }  # fmt: skip

    def products(heads: int, groups: int, width: int, tokens: int) -> int:
        return 3 * 48 * (2 * 8 * heads + 2 * 8 * groups + 3 * width) + 48 * tokens

    first = plan["layouts"][0]
    assert first["products_per_token"] == products(15, 3, 120, 384) // 3
    assert first["waste"]["products"] == pytest.approx(products(15, 3, 120, 384) / products(10, 2, 104, 250) - 1)
    assert first["waste"]["cache"] == pytest.approx(0.5)
