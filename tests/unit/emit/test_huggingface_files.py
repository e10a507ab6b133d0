"""The emitted files themselves: readable, formatted, independent of rewriter, and loud where they do not fit."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import emitted
import oracles
import pytest
import torch
import transformers
import zoo
from general_streams import few_layers
from transformers import AutoConfig, AutoModelForCausalLM

from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import build_model
from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.huggingface.layers import PrintedLayer
from rewriter.passes.desync import Desync
from rewriter.passes.ladder import Ladder
from rewriter.passes.merge_reductions import MergeReductions
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.tracing import trace

# What a reader of the generated Llama file sees of a ladder layer.
LADDER_FORWARD = '''
class LadderLlamaDecoderLayer(LlamaDecoderLayer):
    """`self_attn` and `mlp` read the residual stream as it was one block before.

    It hands on the residual stream, and what it was one block before.
    """

    takes = 2  # hidden-size vectors per token from the layer before
    gives = 2  # hidden-size vectors per token to the next layer

    def forward(self, hidden_states, **kwargs):
        hidden_states, earlier_states = hidden_states.chunk(2, dim=-1)
        input_layernorm = self.input_layernorm(earlier_states)
        self_attn = self.self_attn(hidden_states=input_layernorm, **kwargs)[0]
        after_self_attn = hidden_states + self_attn
        post_attention_layernorm = self.post_attention_layernorm(hidden_states)
        mlp = self.mlp(post_attention_layernorm)
        after_mlp = after_self_attn + mlp
        return torch.cat((after_mlp, after_self_attn), dim=-1)
'''


def test_a_ladder_layer_reads_like_the_source() -> None:
    assert LADDER_FORWARD in emitted.modeling(emitted.ladder("llama", "all"))


# The same of a layer that carries four streams.
STREAMS_FORWARD = '''
class LadderHYV4DecoderLayer(HYV4DecoderLayer):
    """`self_attn` and `mlp` read the residual stream as it was one block before.

    It hands on the residual stream, and what it was one block before.
    """

    takes = 2  # hidden-size vectors per token from the layer before
    gives = 2  # hidden-size vectors per token to the next layer

    def forward(self, hidden_states, **kwargs):
        hidden_states, earlier_states = (streams.contiguous() for streams in hidden_states.chunk(2, dim=-1))
        attn_hc = self.attn_hc(hidden_states)
        attn_hc_2 = self.attn_hc(earlier_states)
        input_layernorm = self.input_layernorm(attn_hc_2[1])
        self_attn = self.self_attn(hidden_states=input_layernorm, **kwargs)[0]
        mul_2 = attn_hc[0].float().unsqueeze(-1) * self_attn.float().unsqueeze(-2)
        after_self_attn = mul_2.to(torch.float32) + hidden_states
        after_self_attn = after_self_attn.to(hidden_states.dtype)
        ffn_hc = self.ffn_hc(after_self_attn)
        ffn_hc_2 = self.ffn_hc(hidden_states)
        post_attention_layernorm = self.post_attention_layernorm(ffn_hc_2[1])
        mlp = self.mlp(post_attention_layernorm)
        mul_3 = ffn_hc[0].float().unsqueeze(-1) * mlp.float().unsqueeze(-2)
        after_mlp = mul_3.to(torch.float32) + after_self_attn
        after_mlp = after_mlp.to(hidden_states.dtype)
        return (torch.cat((after_mlp, after_self_attn), dim=-1), None)
'''


def test_a_ladder_layer_of_several_streams_reads_like_the_source() -> None:
    program = Ladder("all").apply(trace(few_layers("hy_v4")))
    assert STREAMS_FORWARD in emitted.modeling(program)


def test_the_header_says_what_made_the_file_from_what() -> None:
    program = emitted.ladder("llama", "upper-half").with_(recipe={"name": "ladder-upper-half"})
    text = emitted.modeling(program)
    assert "(recipe ladder-upper-half) from a llama checkpoint" in text
    assert (
        "ladder(layers=[2, 3], variant='paper', coefficients='fresh'): 4 of 8 blocks read the stream one block earlier"
        in text
    )


@pytest.mark.parametrize(
    ("families", "selections"),
    [(zoo.KINDS, ["scattered"]), pytest.param(zoo.FAMILIES, emitted.SELECTIONS, marks=pytest.mark.slow)],
    ids=["kinds", "all"],
)
def test_the_files_are_formatted_and_clean(
    families: tuple[str, ...], selections: tuple[str, ...], tmp_path: Path
) -> None:
    programs = {f"{family}_{name}": emitted.ladder(family, name) for family in families for name in selections}
    emitted.assert_clean_modeling(programs, tmp_path)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_config_keeps_everything_of_the_source(family: str) -> None:
    source = json.loads((emitted.source(family) / "config.json").read_text())
    config = emit_huggingface(emitted.ladder(family, "upper-half")).config
    ours = {"architectures", "auto_map", "model_type", "rewriter_layers"}
    assert {k: v for k, v in config.items() if k in source and k not in ours} == {
        k: v for k, v in source.items() if k not in ours
    }
    assert config["tie_word_embeddings"] == zoo.config(family).tie_word_embeddings
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert config["model_type"] == "rewriter_" + source["model_type"]
    assert len(config["rewriter_layers"]) == emitted.program(family).source.num_layers


def test_kinds_of_layers() -> None:
    def kinds(family: str, selection: str) -> list[str]:
        return list(emit_huggingface(emitted.ladder(family, selection)).config["rewriter_layers"])

    assert kinds("llama", "all") == ["ladder_first", "ladder", "ladder", "ladder_last"]
    assert kinds("llama", "upper-half") == ["standard", "standard_to_ladder", "ladder", "ladder_last"]
    assert kinds("qwen3", "scattered") == ["standard_to_ladder", "ladder_last"] * 2 + ["standard"]
    assert kinds("gemma3_text", "all") == ["ladder_first", *["ladder"] * 4, "ladder_last"]
    # A parallel layer is one block: the first has nothing to skip and is the source's.
    assert kinds("gpt_neox", "all") == ["standard_to_ladder", "ladder", "ladder", "ladder_last"]


def test_a_program_that_was_not_rewired_keeps_config_and_code() -> None:
    files = emit_huggingface(emitted.program("mixtral"))
    assert files.modeling is None
    assert files.modeling_name is None
    assert files.model_type == "mixtral"
    assert files.config == json.loads((emitted.source("mixtral") / "config.json").read_text())


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_do_not_show_in_the_checkpoint(ranks: int) -> None:
    """Splitting over ranks changes nothing of what one device computes; the name of the recipe is kept."""
    sharded = TensorParallel().apply(emitted.program("gpt_neox").with_(mesh={"tp": ranks}))
    assert emit_huggingface(sharded) == emit_huggingface(emitted.program("gpt_neox"))
    ladder = Ladder([1, 3]).apply(sharded).with_(recipe={"name": "mine"})
    expected = emit_huggingface(emitted.ladder("gpt_neox", "scattered").with_(recipe={"name": "mine"}))
    assert emit_huggingface(ladder) == expected
    assert "recipe mine" in str(expected.modeling)
    assert "self.post_attention_dropout(attention)" in str(expected.modeling)


def test_layers_that_return_tuples_keep_doing_so() -> None:
    """BLOOM's model reads element 0 of what its layer returns, Llama's reads the tensor itself."""
    llama, bloom = (trace(small_config(name)).source.returns for name in ("llama", "bloom"))
    assert (set(llama), set(bloom)) == ({None}, {2})
    layer = PrintedLayer(("hidden_states",), ("total",), (("total", "        total = hidden_states + attn"),))
    assert layer.text(None) == "        return hidden_states + attn"
    assert layer.text(2) == "        total = hidden_states + attn\n        return (total, None)"
    assert layer.text(1).endswith("return (total,)")
    assert (
        dataclasses.replace(layer, gives=("total", "hidden_states"))
        .text(2)
        .endswith("return (torch.cat((total, hidden_states), dim=-1), None)")
    )


def test_foreign_code_is_refused() -> None:
    program = emitted.ladder("llama", "all")
    source = dataclasses.replace(program.source, module="transformers_modules.mine.modeling_mine")
    with pytest.raises(RewriterError, match="cannot import"):
        emit_huggingface(program.with_(source=source))


# Loading


def test_without_trust_remote_code_it_fails_instead_of_loading_the_original() -> None:
    path = emitted.emitted("llama", "all")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoConfig.from_pretrained(path, trust_remote_code=False)


def test_without_its_code_the_model_type_is_unknown(tmp_path: Path) -> None:
    """Someone who strips auto_map does not get the original wiring either."""
    config = json.loads((emitted.emitted("llama", "all") / "config.json").read_text())
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, KeyError), match="rewriter_llama"):
        AutoConfig.from_pretrained(tmp_path)


UNKNOWN = "5.99.0"


def other_transformers(monkeypatch: pytest.MonkeyPatch, version: str = UNKNOWN, **forwards: Any) -> None:
    """A release that no file names, with other `forwards` of its classes."""
    from transformers.models.qwen2 import modeling_qwen2

    monkeypatch.setattr(transformers, "__version__", version)
    for name, forward in forwards.items():
        monkeypatch.setattr(getattr(modeling_qwen2, name), "forward", forward)


def other_names(self: Any, x: torch.Tensor, mask: Any = None, rotary: Any = None, **rest: Any) -> torch.Tensor:
    """Qwen2's decoder layer, written by somebody else."""
    names = {
        "attention_mask": rest.pop("attention_mask", mask),
        "position_embeddings": rest.pop("position_embeddings", rotary),
    }
    y = x + self.self_attn(self.input_layernorm(x), **names, **rest)[0]
    return self.mlp(self.post_attention_layernorm(y)) + y


def without_a_residual(self: Any, hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
    y = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **rest)[0]
    return self.mlp(self.post_attention_layernorm(y)) + hidden_states


def without_cache(self: Any, hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
    rest = {name: value for name, value in rest.items() if name not in ("cache", "past_key_values")}
    return other_names(self, hidden_states, **rest)


def padding_counts(self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **rest: Any) -> torch.Tensor:
    """Qwen2's decoder layer, which does something else where a prompt is padded."""
    factor = 1.0 if attention_mask is None else 1.5
    return other_names(self, factor * hidden_states, attention_mask=attention_mask, **rest)


@pytest.mark.parametrize("version", [UNKNOWN, "5.16.0", f"{transformers.__version__}.dev0"])
def test_an_unknown_source_that_computes_the_same_is_used_with_a_warning(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"source-{version}"
    shutil.copytree(emitted.emitted("qwen2", "all"), path)
    expected = emitted.shared("qwen2", "all")(zoo.batch()).logits
    other_transformers(monkeypatch, version, Qwen2DecoderLayer=other_names)
    torch.manual_seed(5)
    drawn, _ = torch.rand(1), torch.manual_seed(5)
    with pytest.warns(
        UserWarning, match=rf"Qwen2DecoderLayer of transformers .*, not of {re.escape(version)}\. .* the same"
    ):
        model = emitted.load(path)
    assert torch.equal(torch.rand(1), drawn)
    torch.testing.assert_close(model(zoo.batch()).logits, expected)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (without_a_residual, "On random weights it computes other logits"),
        (without_cache, "On random weights it computes other logits"),
        (padding_counts, "On random weights it computes other logits"),
        (lambda self, hidden_states: hidden_states, "cannot be tried .TypeError"),
    ],
)
def test_an_unknown_source_that_computes_something_else_is_refused(
    forward: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"newer-{forward.__name__.strip('<>')}"
    shutil.copytree(emitted.emitted("qwen2", "all"), path)
    other_transformers(monkeypatch, Qwen2DecoderLayer=forward)
    with pytest.raises(ImportError, match=rf"Qwen2DecoderLayer of .* {UNKNOWN}\. .*{message}.*rewrite refresh DIR"):
        emitted.load(path)


def test_where_there_is_no_small_model_other_versions_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no such size")

    monkeypatch.setattr("rewriter.emit.huggingface.source_check.shrink", refuse)
    files = emit_huggingface(emitted.ladder("qwen2", "all"))
    assert "# No small model of it: ValueError: no such size" in str(files.modeling)
    emitted.write(files, emitted.source("qwen2"), tmp_path / "untried")
    other_transformers(monkeypatch)
    with pytest.warns(UserWarning, match=rf"Qwen2DecoderLayer of .*, not of {UNKNOWN}.*rewrite verify DIR"):
        emitted.load(tmp_path / "untried")


# Small models of other types: a dense layer before those with experts, children that add the residual, a layer that
# adds to its child's output in place, projections that are the layer's own.
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 1},
    "bloom": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "opt": {},
}


def bound(family: str, directory: Path) -> Any:
    if family in OTHERS:
        build_model(small_config(family, OTHERS[family])).save_pretrained(directory)
    program = trace(directory) if family in OTHERS else emitted.program(family)
    return Desync(n=2).apply(MergeReductions().apply(TensorParallel().apply(program.with_(mesh={"tp": 2}))))


def tried(files: Any) -> tuple[str | None, list[str]]:
    """What the file's own trial finds in the installed version, and its warnings."""
    module = types.ModuleType("generated")
    text = files.modeling.rstrip()
    assert text.endswith("\ncheck_source()")
    with mock.patch.dict(sys.modules, {"generated": module}), warnings.catch_warnings(record=True) as said:
        exec(compile(text.removesuffix("check_source()"), "generated", "exec"), vars(module))
        warnings.simplefilter("always")
        found = module.difference()
    return found, [str(w.message) for w in said if "rank by rank" in str(w.message)]


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_installed_version_passes_the_trial_of_others(family: str) -> None:
    assert tried(emit_huggingface(emitted.ladder(family, "upper-half"))) == (None, [])


TRIED = ["gpt2", "gemma2", "mixtral", "bloom", pytest.param("deepseek_v3", marks=pytest.mark.slow), "falcon", "opt"]


@pytest.mark.parametrize("family", TRIED)
@pytest.mark.fast("gpt2", "gemma2", "mixtral", "opt")
def test_the_installed_version_passes_the_trial_of_bound_models(family: str, tmp_path: Path) -> None:
    found, said = tried(emit_huggingface(bound(family, tmp_path)))
    assert found is None
    assert bool(said) == (family == "bloom")  # whose children add the residual themselves


def as_before(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = self.up_proj(x) * self.act_fn(self.gate_proj(x))
    return self.down_proj(hidden)


def across_ranks(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).flip(-1))


@pytest.mark.parametrize(("forward", "refused"), [(as_before, False), (across_ranks, True)])
def test_children_of_a_bound_model_are_tried_rank_by_rank(
    forward: Any, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that takes one rank's channels to another's computes the same on one device, but not on ranks."""
    ranks = TensorParallel().apply(emitted.program("qwen2").with_(mesh={"tp": 2}))
    path = tmp_path / f"bound-{forward.__name__}"
    emitted.write(emit_huggingface(Desync(n=4).apply(MergeReductions().apply(ranks))), emitted.source("qwen2"), path)
    other_transformers(monkeypatch, Qwen2MLP=forward)
    if refused:
        with pytest.raises(ImportError, match=r"Its mlp is not the sum of what 2 ranks compute\. Install "):
            emitted.load(path)
    else:
        with pytest.warns(UserWarning, match="On random weights it computes the same"):
            emitted.load(path)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (None, "names 0 layers, the model has 4"),
        (["ladder_first", "ladder", "ladder_last"], "names 3 layers, the model has 4"),
        (["ladder_first", "ladder", "ladder", "laddder"], "'laddder'; there are standard, ladder_first"),
        (["ladder", "ladder", "ladder", "ladder_last"], r"rewriter_layers\[0\]: 'ladder' cannot stand"),
        (["ladder_first", "standard", "standard", "standard"], r"rewriter_layers\[1\]: 'standard' cannot stand"),
        (["ladder_first", "ladder", "ladder", "ladder"], "ends with 'ladder'"),
    ],
)
def test_a_config_that_was_edited_wrongly_is_refused(kinds: list[str] | None, message: str) -> None:
    config = AutoConfig.from_pretrained(emitted.emitted("llama", "all"), trust_remote_code=True)
    config.rewriter_layers = kinds
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True)


def test_layers_can_be_chosen_in_the_config(tmp_path: Path) -> None:
    """The same file serves other selections of its kinds: here all but the first two layers become standard again."""
    shutil.copytree(emitted.emitted("llama", "all"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["rewriter_layers"] = ["ladder_first", "ladder_last", "standard", "standard"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    ids = zoo.batch()
    with torch.no_grad():
        logits = emitted.load(tmp_path / "out")(input_ids=ids).logits
    assert oracles.relative_error(logits, oracles.ladder_logits(zoo.shared("llama"), {0, 1}, ids)) <= 1e-5


def test_cross_attention_that_was_not_traced_is_refused() -> None:
    layer = emitted.layers_of(emitted.shared("gpt2", "all"))[1]
    hidden = torch.zeros(1, 3, 2 * zoo.HIDDEN)
    with pytest.raises(ValueError, match="encoder_hidden_states: LadderGPT2Block was generated without it"):
        layer(hidden, encoder_hidden_states=hidden)


def test_layers_are_kept_whole_when_a_model_is_spread_over_devices() -> None:
    model = emitted.shared("llama", "all")
    used = {type(layer).__name__ for layer in emitted.layers_of(model)}
    assert used == {"LadderFirstLlamaDecoderLayer", "LadderLlamaDecoderLayer", "LadderLastLlamaDecoderLayer"}
    assert used <= set(model._no_split_modules)


def test_initialisation_draws_what_the_source_draws() -> None:
    config = AutoConfig.from_pretrained(emitted.emitted("llama", "all"), trust_remote_code=True)
    torch.manual_seed(3)
    ours = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(zoo.config("llama"))
    expected = dict(theirs.named_parameters())
    assert [n for n, _ in ours.named_parameters()] == list(expected)
    assert all(torch.equal(p, expected[n]) for n, p in ours.named_parameters())


ISOLATED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rewriter":
            raise ModuleNotFoundError("rewriter is not installed here")
sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, attn_implementation="eager")
with torch.no_grad():
    torch.save(model.eval()(input_ids=torch.load(sys.argv[2])).logits, sys.argv[3])
assert "rewriter" not in sys.modules
"""


# Mixtral's experts are converted on loading; a llama needs no more than that.
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "mixtral"])
def test_it_loads_where_rewriter_is_not_installed(family: str, tmp_path: Path) -> None:
    ids = zoo.batch()
    torch.save(ids, tmp_path / "ids")
    command = [sys.executable, "-I", "-c", ISOLATED, emitted.emitted(family, "scattered"), tmp_path / "ids"]
    result = subprocess.run(
        [*map(str, command), str(tmp_path / "logits")],
        cwd=tmp_path,
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    expected = oracles.ladder_logits(zoo.shared(family), emitted.layers(family, "scattered"), ids)
    assert oracles.relative_error(torch.load(tmp_path / "logits"), expected) <= 1e-5


def test_two_checkpoints_of_one_type_live_in_one_process() -> None:
    """Registering the conversions twice is harmless, and each model keeps its own wiring."""
    ids = zoo.batch()
    for selection in ("all", "scattered", "all"):
        with torch.no_grad():
            logits = emitted.load(emitted.emitted("mixtral", selection))(input_ids=ids).logits
        expected = oracles.ladder_logits(zoo.shared("mixtral"), emitted.layers("mixtral", selection), ids)
        assert oracles.relative_error(logits, expected) <= 1e-5


def test_ladder_of_a_selection_by_name() -> None:
    named = emit_huggingface(Ladder("upper-half").apply(emitted.program("llama")))
    listed = emit_huggingface(emitted.ladder("llama", "upper-half"))
    assert named.config == listed.config
