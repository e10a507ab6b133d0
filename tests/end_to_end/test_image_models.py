"""Checkpoints that take images: their text is rewired, everything else stays, and pictures are computed as hooks on
the source say."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import adapted
import image_models
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from rewriter import api
from rewriter.check.per_rank_reference import LayerMode, PerRankReference
from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.tracing import trace

UPPER = (2, 3)  # the layers that ladder-upper-half rewires


@functools.cache
def converted(family: str) -> tuple[Path, Path]:
    """(the source, in bf16; the upper half of its layers rewired)."""
    source, out = (adapted.root() / f"images-{family}" / name for name in ("source", "out"))
    image_models.save(family, source, torch.bfloat16)
    assert main([str(source), "--recipe", "ladder-upper-half", "--tp", "2", "--out", str(out)]) == 0
    return source, out


def hashes(directory: Path) -> dict[str, str]:
    """The sha256 of every tensor's bytes, by name."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                raw = opened.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes()
                found[name] = hashlib.sha256(raw).hexdigest()
    return found


def of_towers(names: Any) -> set[str]:
    return {name for name in names if "language_model" not in name and not name.startswith("lm_head")}


@torch.no_grad()
def hooks_and_output(source: PreTrainedModel, out: PreTrainedModel, given: dict[str, Any]) -> tuple[Any, Any]:
    """Logits of hooks on the source, with the upper half a ladder, and of the output."""
    reference = PerRankReference(source, dict.fromkeys(UPPER, LayerMode("ladder")), 1)
    rest = {name: value for name, value in given.items() if name != "input_ids"}
    return reference(given["input_ids"], **rest), out(**given, use_cache=False).logits


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@pytest.mark.fast("qwen3_5-fp32", "gemma3-bf16")
def test_a_picture_gives_what_hooks_on_the_source_give(family: str, dtype: str) -> None:
    kind = DTYPES[dtype]
    place, target = converted(family)
    source, out = image_models.load(place, kind), image_models.load(target, kind)
    assert type(source).__name__ == json.loads((place / "config.json").read_text())["architectures"][0]
    given = image_models.inputs(family, dtype=kind)
    expected, actual = hooks_and_output(source, out, given)
    assert torch.equal(actual, expected)
    others, _ = hooks_and_output(source, out, image_models.inputs(family, seed=1, dtype=kind))
    assert float((others - expected).norm() / expected.norm()) > 0.05
    with torch.no_grad():
        plain = source(**given, use_cache=False).logits
    assert float((plain - expected).norm() / expected.norm()) > 0.05


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@pytest.mark.fast("qwen3_5")
def test_text_alone_and_embeddings_and_generated_text(family: str) -> None:
    place, target = converted(family)
    source, out = image_models.load(place), image_models.load(target)
    ids = torch.tensor([[1, 40, 41, 42, 43, 44, 45], [1, 60, 61, 62, 63, 64, 65]])
    expected, actual = hooks_and_output(source, out, {"input_ids": ids})
    assert torch.equal(actual, expected)
    with torch.no_grad():
        embedded = out(inputs_embeds=out.get_input_embeddings()(ids), use_cache=False).logits
    assert torch.allclose(embedded, expected, atol=1e-5, rtol=1e-5)
    # an image token that is generated would be one without pixels
    options = dict(max_new_tokens=6, do_sample=False, suppress_tokens=[image_models.IMAGE], eos_token_id=None)
    given = image_models.inputs(family)
    cached, anew = (out.generate(**given, **options, use_cache=use) for use in (True, False))
    assert cached.shape[1] == given["input_ids"].shape[1] + 6
    assert torch.equal(cached, anew)
    as_text = AutoModelForCausalLM.from_pretrained(target, trust_remote_code=True)
    assert type(as_text).__name__ == type(out).__name__


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@pytest.mark.fast("gemma3")
def test_towers_and_processors_are_copied_byte_for_byte(family: str) -> None:
    place, target = converted(family)
    before, after = hashes(place), hashes(target)
    assert before == after
    assert len(of_towers(before)) > 20
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (target / name).read_bytes() == (place / name).read_bytes()
    said = json.loads((target / "config.json").read_text())
    given = json.loads((place / "config.json").read_text())
    assert said["vision_config"] == given["vision_config"]
    assert {"rewriter_layers", "rewriter_delays"} <= said.keys()
    assert said["auto_map"]["AutoModelForImageTextToText"] == said["auto_map"]["AutoModelForCausalLM"]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@pytest.mark.fast("qwen3_5")
def test_adapting_by_text_leaves_the_tower_alone(family: str, tmp_path: Path) -> None:
    place, target = converted(family)
    words = ["adapt", str(target), "--out", str(tmp_path / "out"), "--verify", "none", "--length", "32", "--no-packing"]
    words += ["--data", str(adapted.text_file()), "--eval", str(adapted.text_file(20, 1)), "--method", "sft"]
    settings = (
        "max_steps=20",
        "learning_rate=1e-3",
        "weight_decay=0.1",
        "use_cpu=true",
        "gradient_accumulation_steps=1",
    )
    for setting in settings:
        words += ["--set", setting]
    assert main(words) == 0
    before, after = hashes(place), hashes(tmp_path / "out")
    assert before.keys() == after.keys()
    kept = of_towers(before)
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    assert any(before[name] != after[name] for name in before.keys() - kept)
    healed = image_models.load(tmp_path / "out")
    with torch.no_grad():
        assert bool(healed(**image_models.inputs(family)).logits.isfinite().all())


def test_a_tower_that_is_rewired_instead_of_the_text_shows(tmp_path: Path) -> None:
    """The tower is as deep as the text. The generated file refuses its layers, and hooks tell them else."""
    place, target = converted("gemma3")
    faulty = tmp_path / "faulty"
    shutil.copytree(target, faulty)
    [code] = faulty.glob("modeling_*.py")
    text = code.read_text()
    towers = text.replace("self.model.language_model.layers", "self.model.vision_tower.encoder.layers")
    assert towers != text
    code.write_text(towers)
    with pytest.raises(ValueError, match="is made for another layer than this one"):
        image_models.load(faulty)
    code.write_text(towers.replace("if not issubclass(layer_class, type(layer)):", "if False:"))
    assert not as_hooks_say(place, faulty)
    assert as_hooks_say(place, target)


def as_hooks_say(source: Path, out: Path) -> bool:
    """True if an output runs on a picture, and gives what hooks on its source do."""
    try:
        expected, actual = hooks_and_output(
            image_models.load(source), image_models.load(out), image_models.inputs("gemma3")
        )
    except (AttributeError, TypeError):  # a layer of the tower as one of the text's
        return False
    return torch.equal(actual, expected)


def test_features_of_images_between_layers(tmp_path: Path) -> None:
    """Qwen3-VL adds them behind layer 0: a ladder may begin at layer 2, in the output and by hooks."""
    source = image_models.save("qwen3_vl", tmp_path / "source")
    assert trace(source).source.joined == 1
    with pytest.raises(RewriterError, match=r"behind layer 0, .* layers from 2 on"):
        api.convert(source, "ladder", out=tmp_path / "no", options=api.SaveOptions(verify="none"))
    assert not (tmp_path / "no").exists()
    api.convert(source, "ladder-upper-half", out=tmp_path / "out", options=api.SaveOptions(verify="none"))
    model, out = image_models.load(source), image_models.load(tmp_path / "out")
    expected, actual = hooks_and_output(model, out, image_models.inputs("qwen3_vl"))
    assert torch.equal(actual, expected)
    reference = PerRankReference(model, dict.fromkeys(range(4), LayerMode("ladder")), 1)
    with pytest.raises(RewriterError, match="before the model changed it behind layer 0"):
        reference(**image_models.inputs("qwen3_vl"))


def test_a_checkpoint_is_of_the_class_that_it_names(tmp_path: Path) -> None:
    source, _ = converted("qwen3_5")
    assert trace(source).source.architecture == "Qwen3_5ForConditionalGeneration"
    text = AutoModelForCausalLM.from_pretrained(source)
    text.save_pretrained(tmp_path / "text")
    assert trace(tmp_path / "text").source.architecture == "Qwen3_5ForCausalLM"
    api.convert(source, "tensor-parallel", tp=2, out=tmp_path / "exact", options=api.SaveOptions(verify="none"))
    assert isinstance(api.load(tmp_path / "exact"), type(AutoModelForImageTextToText.from_pretrained(source)))


def test_a_model_that_needs_an_image_in_every_call_is_refused() -> None:
    tower = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    config = AutoConfig.for_model("blip", text_config=text, vision_config=dict(tower, image_size=16, patch_size=8))
    with pytest.raises(RewriterError, match="BlipForConditionalGeneration needs an image in every call"):
        trace(config)


def test_verify_takes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output whose text is right and that is no longer right where a picture stands is found by --images alone."""
    _, target = converted("gemma3")
    assert main(["verify", str(target), "--images"]) == 0
    assert "with a picture" in capsys.readouterr().out
    shutil.copytree(target, tmp_path / "out")
    [code] = (tmp_path / "out").glob("modeling_*.py")
    wrong = "class RewriterGemma3ForConditionalGeneration(Gemma3ForConditionalGeneration):"
    doubled = [
        "    def forward(self, *args, pixel_values=None, **kwargs):",
        "        pixel_values = None if pixel_values is None else 2 * pixel_values",
        "        return super().forward(*args, pixel_values=pixel_values, **kwargs)",
    ]
    place = "    @classmethod\n    def is_custom_code"
    head, _, rest = code.read_text().partition(wrong)
    assert place in rest
    code.write_text(head + wrong + rest.replace(place, "\n".join([*doubled, "", place]), 1))
    manifest = json.loads((tmp_path / "out" / "rewrite.json").read_text())
    manifest["files"][code.name] = hashlib.sha256(code.read_bytes()).hexdigest()
    (tmp_path / "out" / "rewrite.json").write_text(json.dumps(manifest))
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert main(["verify", str(tmp_path / "out"), "--images"]) == 3
    assert "with a picture, adapted checkpoint = its reference" in capsys.readouterr().err
