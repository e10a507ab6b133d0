"""What serving engines cannot run of an emitted checkpoint is refused by name, and what they can is not."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import emitted
import pytest
import torch
import zoo
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rewriter.emit.huggingface import emit_huggingface
from rewriter.passes.desync import Desync
from rewriter.passes.ladder import Ladder
from rewriter.passes.merge_reductions import MergeReductions
from rewriter.passes.tensor_parallel import TensorParallel


class PPMissingLayer(torch.nn.Identity):
    """What vLLM puts in the place of a layer that another stage of a pipeline has."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


# Checkpoints that are bound to their ranks


@functools.cache
def bound() -> Path:
    path = emitted.source("llama").parent / "bound-in-engines"
    ranks = MergeReductions().apply(TensorParallel().apply(emitted.program("llama").with_(mesh={"tp": 2})))
    emitted.write(emit_huggingface(Desync(n=2).apply(ranks)), emitted.source("llama"), path)
    return path


@pytest.mark.parametrize("engine", ["vllm", "vllm_mla", "sglang"])
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_an_engine_is_refused_when_it_builds_a_bound_model(
    engine: str, auto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does: the attention is named in the config, the model built on the meta device."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, engine, ALL_ATTENTION_FUNCTIONS["sdpa"])

    def built(path: Path) -> Any:
        config = AutoConfig.from_pretrained(path, trust_remote_code=True)
        config._attn_implementation = engine
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=True)

    with pytest.raises(ValueError, match=rf"bound to tp=2: .*{engine} would share .*`rewrite serve DIR --tp 2`"):
        built(bound())
    assert built(emitted.emitted("llama", "all")).config._attn_implementation == engine


@functools.cache
def phased() -> Path:
    path = emitted.source("llama").parent / "phased-in-engines"
    rewired = Ladder(phase="prompt").apply(emitted.program("llama"))
    emitted.write(emit_huggingface(rewired), emitted.source("llama"), path)
    return path


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_is_refused_that_does_not_say_which_tokens_are_of_prompts(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, engine, ALL_ATTENTION_FUNCTIONS["sdpa"])
    config = AutoConfig.from_pretrained(phased(), trust_remote_code=True)
    config._attn_implementation = engine
    with torch.device("meta"), pytest.raises(ValueError, match=rf"rewires tokens of the prompt alone, and {engine}"):
        AutoModel.from_config(config, trust_remote_code=True)


# Pipelines


def stage(selection: str, missing: range) -> Any:
    """The model below the head of a ladder, whose layers `missing` went when it was built, as in vLLM."""
    model = emitted.load(emitted.emitted("llama", selection), AutoModel)
    for index in missing:
        model.layers[index] = PPMissingLayer()
    return model


def run(selection: str, cut: int) -> torch.Tensor:
    """Two stages of a pipeline, cut before a layer; between them the residual stream alone."""
    first, second = stage(selection, range(cut, 4)), stage(selection, range(cut))
    first.norm = PPMissingLayer()
    with torch.no_grad():
        states = first(input_ids=zoo.batch(), use_cache=False).last_hidden_state
        states = states[..., : first.config.hidden_size]
        result: torch.Tensor = second(inputs_embeds=states, use_cache=False).last_hidden_state
    return result


def test_a_pipeline_is_cut_where_layers_hand_on_the_stream_alone() -> None:
    with torch.no_grad():
        whole = stage("upper-half", range(0))(input_ids=zoo.batch(), use_cache=False).last_hidden_state
    torch.testing.assert_close(run("upper-half", 1), whole)
    for cut in (2, 3):  # the first ladder layer too takes what its stream was before the layer before
        with pytest.raises(ValueError, match=r"LlamaDecoderLayer takes 128 values per token .* was given 64: .* cut"):
            run("upper-half", cut)
    with pytest.raises(ValueError, match=r"LadderLlamaDecoderLayer takes 128 values .* Use tensor parallelism"):
        run("all", 2)


def test_layers_that_are_missing_when_a_model_is_built_are_refused_by_name() -> None:
    def rewired(selection: str, missing: range) -> Any:
        model = emitted.load(emitted.emitted("llama", selection), AutoModel)
        source = type(model).__mro__[1](model.config)
        for index in missing:
            source.layers[index] = PPMissingLayer()
        sys.modules[type(model).__module__].rewire(source, source.layers)
        return source

    for missing in (range(1), range(1, 4)):
        assert isinstance(rewired("upper-half", missing).layers[missing[0]], PPMissingLayer)
    for missing in (range(2), range(2, 4)):
        with pytest.raises(ValueError, match=r"cut before 2 \('ladder'\), .* or cut before one of the layers 1\."):
            rewired("upper-half", missing)
    with pytest.raises(ValueError, match=r"cut before 3 \('ladder_last'\), .* of the layers \(there is none\)"):
        rewired("all", range(3))


def test_the_width_of_what_a_layer_is_given_costs_nothing_when_it_is_compiled() -> None:
    """One graph, without a break: the check is done while it is traced."""
    model = stage("all", range(0))
    ids = zoo.batch()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).last_hidden_state
        graphs: list[torch.fx.GraphModule] = []

        def kept(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        layer = model.layers[1]
        layer.compile(backend=kept, fullgraph=True)
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).last_hidden_state, expected)
        torch.compiler.reset()
    assert len(graphs) == 1
    assert "packed_width" not in graphs[0].code
