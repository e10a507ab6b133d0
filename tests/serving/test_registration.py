"""Which architectures the plugin registers, and which part of a model that takes images it rewires."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from torch import nn
from transformers import AutoConfig
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from rewriter.output.sum_schedule import Unsupported
from rewriter.runtime.serving.vllm.model import decoder_layers, language_model, on_backend
from rewriter.runtime.serving.vllm.registration import register_all

TEXT = ("RewriterLlamaForCausalLM", "RewriterQwen3NextForCausalLM", "RewriterNemotronHForCausalLM")
IMAGES = ("RewriterQwen3_5ForConditionalGeneration", "RewriterQwen3VLForConditionalGeneration")


@pytest.fixture(autouse=True, scope="module")
def registered():
    register_all()
    register_all()  # vLLM loads plugins in each of its processes, and may load them again


@pytest.mark.parametrize("name", TEXT + IMAGES)
def test_every_architecture_that_vllm_has_layers_for(name):
    assert name in ModelRegistry.get_supported_archs()
    assert f"Rewriter{name}" not in ModelRegistry.get_supported_archs()


def test_configs_are_of_the_sources_class_and_type(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "rewriter_qwen3_vl", "rewriter_delays": [[0, 0]]}')
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, type(config).__name__) == ("qwen3_vl", "Qwen3VLConfig")
    assert config.rewriter_delays == [[0, 0]]


def test_vllm_settings_of_an_architecture_hold_for_its_rewritten_models():
    for name in (*TEXT, *IMAGES):
        assert MODELS_CONFIG_MAP.get(name) is MODELS_CONFIG_MAP.get(name.removeprefix("Rewriter"))
    assert "RewriterNemotronHForCausalLM" in MODELS_CONFIG_MAP


def row_parallel():
    """What `decoder_layers` looks for, without ranks and weights."""
    module = RowParallelLinear.__new__(RowParallelLinear)
    nn.Module.__init__(module)
    module.reduce_results = True
    return module


def layers(count):
    made = nn.ModuleList(nn.Module() for _ in range(count))
    for layer in made:
        layer.attention = nn.Sequential(row_parallel())
    return made


class WithImages(nn.Module):
    """A tower of as many layers as the text model."""

    def __init__(self):
        super().__init__()
        self.visual, self.language = nn.Module(), nn.Module()
        self.visual.blocks, self.language.layers = layers(3), layers(3)

    def get_language_model(self):
        return self.language


def test_layers_of_the_text_model_are_rewired_and_no_towers():
    model = WithImages()
    assert list(decoder_layers(language_model(model), 3).values()) == list(model.language.layers)
    with pytest.raises(Unsupported, match="2 lists of 3 decoder layers"):
        decoder_layers(model, 3)
    assert language_model(model.language) is model.language


def test_recurrent_models_are_refused_by_the_backend_without_their_states():
    model = SimpleNamespace(hf_config=SimpleNamespace(), is_hybrid=True, is_attention_free=False)
    with pytest.raises(ValueError, match="because of this"):
        on_backend(SimpleNamespace(model_config=model), "", "of this")
