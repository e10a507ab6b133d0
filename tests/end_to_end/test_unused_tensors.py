"""Checkpoints with more than the model uses, and with an index that is not of them: as transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rewriter import AdaptOptions, api
from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.tracing import trace

Tensors = dict[str, torch.Tensor]
MTP = "model.layers.4.eh_proj.weight"
UNUSED = ["model.layers.0.self_attn.rotary_emb.inv_freq", MTP, "model.layers.4.input_layernorm.weight"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama of one file."""
    monkeypatch.chdir(tmp_path)
    zoo.save("llama", tmp_path / "m")
    return tmp_path / "m"


def with_more(tensors: Tensors) -> Tensors:
    """With a buffer of old checkpoints, and with a layer for predicting several tokens, of another size."""
    return tensors | {UNUSED[0]: torch.zeros(4), MTP: torch.ones(8, 24), UNUSED[2]: torch.ones(24)}


def shard(source: Path, other: Callable[[dict[str, Any]], Any] = lambda index: None, **changes: torch.Tensor) -> None:
    """Two shards, of which the second repeats the final norm, and what `other` makes of the index."""
    tensors = with_more(load_file(source / "model.safetensors"))
    (source / "model.safetensors").unlink()
    first = {n: t for n, t in tensors.items() if "layers.0" in n or "norm" in n}
    second = {n: t for n, t in tensors.items() if n not in first} | {"model.norm.weight": tensors["model.norm.weight"]}
    for place, inside in (("a", first), ("b", second | changes)):
        save_file(inside, source / f"{place}.safetensors", {"format": "pt"})
    weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    other(index)
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=True).eval()
    with torch.no_grad():
        return model(torch.arange(1, 30)[None], use_cache=False).logits


@pytest.mark.parametrize("verify", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_what_transformers_ignores_is_kept_and_listed(source: Path, verify: str) -> None:
    def wrong(index: dict[str, Any]) -> None:
        del index["metadata"]  # transformers itself cannot load it so
        del index["weight_map"]["lm_head.weight"]
        index["weight_map"] |= {"model.gone.weight": "a.safetensors", "model.embed_tokens.weight": "a.safetensors"}

    expected = logits(source)
    shard(source, wrong)
    for name in ("pytorch_model.bin", "c.safetensors", "consolidated.safetensors", "original/params.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("not read")
    report = api.convert(source, "tensor-parallel", out="out", tp=2, options=api.SaveOptions(verify=verify))
    assert any(MTP in note and "--drop-unused" in note for note in report.notes)
    assert json.loads(Path("out/rewrite.json").read_text())["unused"] == UNUSED
    stored = load_file("out/a.safetensors") | load_file("out/b.safetensors")
    assert set(stored) >= set(UNUSED)
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stored)
    assert index["metadata"]
    torch.testing.assert_close(logits(Path("out")), expected)
    assert main(["reshard", str(Path("out").resolve()), "--tp", "4", "--verify", "none"]) == 0
    assert verify == "none" or main(["verify", "out"]) == 0


@pytest.mark.slow
def test_training_and_ranks_leave_what_is_not_used_alone(tmp_path: Path) -> None:
    source = adapted.write_source(tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    save_file(with_more(tensors), source / "model.safetensors", {"format": "pt"})
    api.convert(source, "ladder", out=tmp_path / "out", options=api.SaveOptions(verify="none"))
    (generated,) = api.generate(tmp_path / "out", ["def"], max_new_tokens=3)
    assert len(generated.tokens) == 3
    assert api.verify(tmp_path / "out")
    settings = {"max_steps": 1, "use_cpu": True, "learning_rate": 0.1}
    chosen = AdaptOptions(length=32, method="sft", settings=settings)
    data = adapted.text_file()
    api.adapt(tmp_path / "out", out=tmp_path / "new", data=data, eval=data, verify="full", options=chosen)
    trained = load_file(tmp_path / "new/model.safetensors")
    assert all(torch.equal(trained[name], tensor) for name, tensor in with_more({}).items())
    assert not torch.equal(trained["model.norm.weight"], tensors["model.norm.weight"])
    assert json.loads((tmp_path / "new/rewrite.json").read_text())["unused"] == UNUSED


def test_without_what_is_not_used(source: Path) -> None:
    shard(source)
    expected = logits(source)
    api.convert(source, "tensor-parallel", out="out", options=api.SaveOptions(drop_unused=True, verify="none"))
    stored = load_file("out/a.safetensors") | load_file("out/b.safetensors")
    assert not set(stored) & set(UNUSED)
    assert json.loads(Path("out/rewrite.json").read_text())["unused"] == []
    torch.testing.assert_close(logits(Path("out")), expected)
    with pytest.raises(RewriterError, match=r"--drop-unused: the model uses every tensor in .*Leave it out"):
        api.convert("out", "tensor-parallel", out="again", options=api.SaveOptions(drop_unused=True, verify="none"))


def test_layers_beyond_those_of_the_config_are_not_used(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert all(name.startswith("model.layers.3.") for name in trace(source).source.unused)
    assert len(trace(source).source.unused) == 9


def test_a_tensor_with_two_values_is_refused(source: Path) -> None:
    shard(source, **{"model.norm.weight": torch.zeros(zoo.HIDDEN)})
    with pytest.raises(
        RewriterError, match=r"a\.safetensors and b\.safetensors hold 'model\.norm\.weight' with diff"
    ) as e:
        trace(source)
    assert "save_pretrained('NEW')" in str(e.value)
    assert "fault of rewriter" not in str(e.value)


@pytest.mark.parametrize(
    ("renamed", "told"),
    [
        ("_orig_mod.{}", "torch.compile puts there"),
        ("module.{}", "DistributedDataParallel puts there"),
        ("module._orig_mod.{}", "puts there"),
        ("base_model.model.{}", "merge_and_unload"),
        ("student.{}", "name.removeprefix('student.')"),
    ],
)
def test_names_of_wrappers_are_told(source: Path, renamed: str, told: str) -> None:
    tensors = load_file(source / "model.safetensors")
    save_file({renamed.format(n): t for n, t in tensors.items()}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewriterError, match="lacks") as caught:
        trace(source)
    assert told in str(caught.value)


def test_a_wrapper_inside_the_model_is_told(source: Path) -> None:
    tensors = {
        n.replace("layers.0.", "layers.0._orig_mod."): t for n, t in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewriterError, match=r"torch\.compile puts there"):
        trace(source)


def test_the_prefix_of_the_base_model_may_lack_or_be_double(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    bare = {n.removeprefix("model."): t for n, t in tensors.items()}
    save_file(bare, source / "model.safetensors", {"format": "pt"})
    expected = logits(source)
    api.convert(source, "tensor-parallel", out="out", options=api.SaveOptions(verify="none"))
    torch.testing.assert_close(logits(Path("out")), expected)
    save_file({f"model.{n}": t for n, t in tensors.items()}, source / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits(source), expected)
    api.convert(source, "tensor-parallel", out="double", options=api.SaveOptions(verify="none"))
    torch.testing.assert_close(logits(Path("double")), expected)


def test_an_adapter_among_the_weights_is_refused(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    more = {"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2, zoo.HIDDEN)}
    save_file(tensors | more, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewriterError, match="merge_and_unload"):
        trace(source)


def test_scales_that_no_config_explains_are_refused(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewriterError, match=r"quantization_config") as caught:
        trace(source)
    assert f"{name}_scale" in str(caught.value)
