"""A checkpoint that is bound to its ranks computes all of them on one device: the logits and gradients of
`simulate` and of the independent reference, with every cache, padding, training, saving and loading."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emitted
import oracles
import pytest
import torch
import zoo
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import fx
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModel, PreTrainedModel

from rewriter import api
from rewriter.check.per_rank_reference import LayerMode, PerRankReference
from rewriter.common.cache_names import cache_of
from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface import emit_as_wired, emit_huggingface
from rewriter.ir import Program, ops
from rewriter.ir.marks import marks
from rewriter.ir.simulate import load_weights, simulate
from rewriter.output.manifest import read_manifest
from rewriter.passes.desync import Desync
from rewriter.passes.ladder import Ladder
from rewriter.passes.merge_reductions import MergeReductions
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.runtime import load as load_rank
from rewriter.tracing import trace

UNVERIFIED = api.SaveOptions(verify="none")
TOLERANCE = 1e-5
# llama has 8 query heads on 2 key/value heads: at P = 4, ranks hold copies of them. gpt2 and gpt_neox fuse q, k and v.
FAMILIES = [
    "llama",
    "llama_mha_bias",
    "llama_tied",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "mixtral",
]
MIXES: dict[str, tuple[Any, ...]] = {
    "2x": (Desync(n=2),),
    "4x-sum": (Desync(n=4, resync="sum"),),
    "3x": (Desync(n=3),),
    "own-partial": (Ladder(variant="own_partial"),),
    "ladder-then-desync": (Ladder([0, 1]), Desync([2, 3], n=2, resync="sum")),
}


@functools.cache
def program(family: str, mix: str, ranks: int) -> Program:
    result = TensorParallel().apply(emitted.program(family).with_(mesh={"tp": ranks}))
    for rewrite in (MergeReductions(), *MIXES[mix]):
        result = rewrite.apply(result)
    return result


@functools.cache
def directory(family: str, mix: str, ranks: int) -> Path:
    path = emitted.source(family).parent / f"{family}-{mix}-tp{ranks}"
    emitted.write(emit_huggingface(program(family, mix, ranks)), emitted.source(family), path)
    return path


@functools.cache
def shared(family: str, mix: str, ranks: int, attention: str = "eager") -> PreTrainedModel:
    return emitted.load(directory(family, mix, ranks), attn_implementation=attention)


def batch(family: str, length: int = 21) -> torch.Tensor:
    return zoo.batch(2, length, min(zoo.shared(family).config.vocab_size, 256))


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# What it computes


FAST = [*(("llama", mix, 4) for mix in MIXES), *((f, m, 4) for f, m in zip(FAMILIES[1:], [*MIXES] * 2, strict=False))]
OTHERS = [case for case in itertools.product(FAMILIES, MIXES, (2, 4)) if case not in FAST]


@pytest.mark.parametrize(
    ("family", "mix", "ranks"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_logits_and_gradients_equal_the_simulation(family: str, mix: str, ranks: int) -> None:
    rewritten, ids = program(family, mix, ranks), batch(family)
    weights = {name: tensor.requires_grad_() for name, tensor in load_weights(rewritten).items()}
    expected = simulate(rewritten, ids, weights=weights)
    with torch.no_grad():
        assert oracles.relative_error(zoo.shared(family)(input_ids=ids).logits, expected) >= 1e-2
    model = emitted.load(directory(family, mix, ranks))
    logits = model(input_ids=ids).logits
    assert oracles.relative_error(logits, expected) <= TOLERANCE
    loss_of(expected, ids).backward()
    loss_of(logits, ids).backward()
    for name, parameter in model.named_parameters():
        gradient = weights[rewritten.ties.get(name, name)].grad
        assert oracles.relative_error(parameter.grad, gradient) <= 10 * TOLERANCE, name


KEEP_LAST = LayerMode("desync", (False, True))
REFERENCES = {
    "2x": dict.fromkeys(range(4), KEEP_LAST),
    "own-partial": dict.fromkeys(range(4), LayerMode("own_partial")),
    "ladder-then-desync": {
        0: LayerMode("ladder"),
        1: LayerMode("ladder"),
        2: LayerMode("desync", (False, True), "sum"),
        3: LayerMode("desync", (False, True), "sum"),
    },
}


@pytest.mark.parametrize("mix", REFERENCES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_equal_the_reference(family: str, mix: str) -> None:
    ids = batch(family)
    with torch.no_grad():
        expected = PerRankReference(zoo.shared(family), REFERENCES[mix], 2)(ids)
        for attention in ("eager", "sdpa"):
            logits = shared(family, mix, 2, attention)(input_ids=ids).logits
            assert oracles.relative_error(logits, expected) <= TOLERANCE, attention


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_of_every_implementation(implementation: str) -> None:
    """Each rank's router sees that rank's input, and each rank passes its part of the experts it chose."""
    rewritten, ids = program("mixtral", "4x-sum", 4), batch("mixtral")
    model = emitted.load(directory("mixtral", "4x-sum", 4), experts_implementation=implementation)
    with torch.no_grad():
        expected = simulate(rewritten, ids, weights=load_weights(rewritten))
        assert oracles.relative_error(model(input_ids=ids).logits, expected) <= TOLERANCE


# Running it


@pytest.mark.parametrize(
    ("family", "mix", "cache"),
    [
        ("llama", "4x-sum", "dynamic"),
        ("llama", "4x-sum", "static"),
        ("gpt2", "2x", "dynamic"),
        ("gpt_neox", "3x", "static"),
    ],
)
def test_generate_with_cache_and_left_padding(family: str, mix: str, cache: str) -> None:
    """Greedy text of a left-padded batch is what recomputing every prompt alone gives."""
    rewritten, weights = program(family, mix, 4), load_weights(program(family, mix, 4))
    prompts = zoo.prompts(3)
    with torch.no_grad():
        expected = oracles.greedy_oracle(lambda ids: simulate(rewritten, ids, weights=weights), prompts, 32)
    inputs = emitted.left_padded(prompts)
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    text = shared(family, mix, 4).generate(**inputs, max_new_tokens=32, do_sample=False, **options)
    assert text[:, inputs["input_ids"].shape[1] :].tolist() == expected


def test_beams_are_reordered_in_the_cache() -> None:
    model, inputs = shared("llama", "4x-sum", 4), emitted.left_padded(zoo.prompts(2))
    text = [model.generate(**inputs, max_new_tokens=8, num_beams=3, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*text)


def test_the_cache_is_as_big_as_the_source_s_unless_heads_are_copied() -> None:
    """Ranks share one cache: at P = 2 each holds one of the two key/value heads; at 4, each head is held twice."""
    sizes = {}
    for ranks in (2, 4):
        with torch.no_grad():
            cache = cache_of(shared("llama", "4x-sum", ranks)(input_ids=batch("llama")))
        sizes[ranks] = [layer.keys.shape[1] for layer in cache.layers]
    assert sizes == {2: [2, 2, 2, 2], 4: [2, 4, 2, 4]}


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    ids, model = batch("llama"), emitted.load(directory("llama", "4x-sum", 4))
    model.train()

    def step() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = step()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = step()
    assert len(plain) == len(again) == len(list(model.parameters()))
    assert all(oracles.relative_error(b, a) <= TOLERANCE for a, b in zip(plain, again, strict=True))


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    ids, model = batch("llama"), shared("llama", "4x-sum", 4)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        logits = torch.compile(model, fullgraph=True, backend="eager")(input_ids=ids, use_cache=False).logits
    assert oracles.relative_error(logits, expected) <= TOLERANCE


@pytest.mark.parametrize("mix", ["2x", "4x-sum", "own-partial"])
def test_recorded_hidden_states_have_the_model_s_width(mix: str) -> None:
    ids, model = batch("llama"), shared("llama", mix, 4)
    with torch.no_grad():
        recorded = model(input_ids=ids, output_hidden_states=True).hidden_states
        whole = shared("llama", mix, 4).base_model(input_ids=ids)[0]
    assert [tuple(state.shape) for state in recorded] == [(2, 21, zoo.HIDDEN)] * 5
    assert torch.equal(recorded[-1], whole)


# Its files


def test_parameters_are_those_of_the_source_and_survive_a_round_trip(tmp_path: Path) -> None:
    model, info = emitted.AutoModelForCausalLM.from_pretrained(
        directory("llama", "4x-sum", 4), trust_remote_code=True, output_loading_info=True
    )
    assert not any(info.values()), info
    expected = dict(zoo.shared("llama").named_parameters())
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in expected.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(tmp_path / "trained")
    again = emitted.load(tmp_path / "trained", attn_implementation=None)
    assert again.config.rewriter_ranks == 4
    with torch.no_grad():
        assert torch.equal(again(input_ids=batch("llama")).logits, model.eval()(input_ids=batch("llama")).logits)
        base = emitted.load(tmp_path / "trained", AutoModel, attn_implementation=None)
        assert torch.equal(base(input_ids=batch("llama"))[0], again.base_model(input_ids=batch("llama"))[0])


def test_the_config_says_what_became_of_every_reduction() -> None:
    config = emit_huggingface(program("llama", "4x-sum", 4)).config
    dropped, kept = {"self_attn": "drop", "mlp": "drop"}, {"self_attn": "drop", "mlp": "keep_sum"}
    assert config["rewriter_ranks"] == 4
    assert config["rewriter_pattern"] == [dropped, kept, dropped, kept]
    assert config["rewriter_layers"] == ["drop", "drop_keep", "drop", "drop_keep"]


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    path = directory("llama", "2x", 4)
    for file in path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text()) | {"rewriter_ranks": 2}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"bound to tp=4: its layers compute 4 ranks, config\.rewriter_ranks is 2"):
        emitted.load(tmp_path)


@functools.cache
def converted(ranks: int = 2) -> Path:
    """The output directory of desync-2x with norms of each rank's own."""
    path = emitted.source("llama").parent / f"converted-{ranks}"
    options = {"desync.untie_norms": True, "permute.ranks": {}}  # the order on disk
    api.convert(emitted.source("llama"), "desync-2x", out=path, tp=ranks, set=options, options=UNVERIFIED)
    return path


def test_norms_of_each_rank_s_own() -> None:
    """On disk they hold all ranks' weights; each rank uses its own, and gradients reach them."""
    model = emitted.load(converted())
    names = [f"model.layers.{layer}.post_attention_layernorm.weight" for layer in range(4)]
    own = {name: model.get_parameter(name) for name in names}
    original = dict(zoo.shared("llama").named_parameters())
    ids, untied = batch("llama"), {}
    for seed, (name, parameter) in enumerate(own.items()):
        assert torch.equal(parameter, original[name].repeat(2))
        with torch.no_grad():
            parameter += 0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        untied[name] = parameter.detach().clone().requires_grad_()
    reference = PerRankReference(zoo.shared("llama"), REFERENCES["2x"], 2)
    alike = reference(ids)
    expected = PerRankReference(zoo.shared("llama"), REFERENCES["2x"], 2, untied=untied)(ids)
    assert oracles.relative_error(alike, expected) >= 1e-2
    logits = model(input_ids=ids).logits
    assert oracles.relative_error(logits, expected) <= TOLERANCE
    loss_of(logits, ids).backward()
    loss_of(expected, ids).backward()
    for name, parameter in own.items():
        assert oracles.relative_error(parameter.grad, untied[name].grad) <= 10 * TOLERANCE


def test_norms_of_each_rank_s_own_survive_a_round_trip(tmp_path: Path) -> None:
    model = emitted.load(converted())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.linspace(0, 0.01, parameter.numel()).reshape(parameter.shape))
        model.save_pretrained(tmp_path)
        again = emitted.load(tmp_path)
        assert torch.equal(again(input_ids=batch("llama")).logits, model(input_ids=batch("llama")).logits)


@pytest.mark.slow
def test_norms_of_each_rank_s_own_in_a_checkpoint_of_many_files(tmp_path: Path) -> None:
    zoo.shared("llama").save_pretrained(tmp_path / "source", max_shard_size="150KB")
    options = {"desync.untie_norms": True, "permute.ranks": {}}  # the order on disk
    api.convert(tmp_path / "source", "desync-2x", out=tmp_path / "out", tp=2, set=options, options=UNVERIFIED)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    before = json.loads((tmp_path / "source" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == before["weight_map"]
    assert index["metadata"]["total_size"] == before["metadata"]["total_size"] + 4 * zoo.HIDDEN * 4
    with torch.no_grad():
        logits = emitted.load(tmp_path / "out")(input_ids=batch("llama")).logits
        assert torch.equal(logits, emitted.load(converted())(input_ids=batch("llama")).logits)


def test_the_manifest_and_the_card_say_what_it_is_bound_to() -> None:
    manifest = read_manifest(converted())
    assert manifest.per_rank is not None
    assert (manifest.per_rank.ranks, manifest.per_rank.pattern[3]) == (2, {"self_attn": "drop", "mlp": "keep_mean"})
    assert len(manifest.per_rank.untied) == 4
    card = (converted() / "README.md").read_text()
    assert "depends on the number of ranks: **tp=2**" in card
    assert "| 0–3 | self_attn | not reduced: every rank goes on with its own residual |" in card


def test_the_sharded_module_refuses_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for world in ("1", "4"):
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(RewriterError, match="this checkpoint is bound to tp=2"):
            load_rank(converted())


def test_rewriting_it_again_is_refused() -> None:
    for trust in (True, False):
        with pytest.raises(RewriterError, match="is an output of `rewrite`: a recipe has wired its layers already"):
            api.convert(
                converted(),
                "desync-2x",
                tp=4,
                options=api.SaveOptions(dry_run=True),
                context=api.RunContext(trust_remote_code=trust),
            )


@pytest.mark.slow
def test_the_files_are_formatted_and_clean(tmp_path: Path) -> None:
    programs = {f"{family}_{mix}": program(family, mix, 4) for family in FAMILIES for mix in MIXES}
    emitted.assert_clean_modeling(programs, tmp_path)


# What a reader of the generated Llama file sees of a layer of desync-2x.
DROP_KEEP = """
        input_layernorm = self.input_layernorm(hidden_states)
        self_attn = self.self_attn(hidden_states=input_layernorm, **kwargs)[0]
        after_self_attn = hidden_states.unsqueeze(-2) + self_attn
        post_attention_layernorm = self.post_attention_layernorm(after_self_attn)
        mlp = self.mlp(post_attention_layernorm.flatten(-2))
        return mlp + after_self_attn.mean(-2)
"""


def test_a_layer_reads_like_the_source() -> None:
    text = emitted.modeling(program("llama", "2x", 4))
    assert DROP_KEEP in text
    assert "whose function is bound to 4 ranks (tp=4)" in text


# Adapters


@pytest.mark.parametrize(
    ("family", "mix"),
    [
        ("llama", "own-partial"),
        ("llama_mha_bias", "2x"),
        ("gpt2", "2x"),
        ("gpt_neox", "own-partial"),
        ("mixtral", "2x"),
    ],
)
def test_lora_on_per_rank_projections_equals_its_merged_weights(family: str, mix: str) -> None:
    """Its factors compute every rank as the weight does to which their product is added."""
    base, ids = emitted.load(directory(family, mix, 4)), batch(family)
    with torch.no_grad():
        before = base(input_ids=ids).logits
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2")
    model = get_peft_model(base, config)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)  # it starts as nothing
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    assert sum("PerRank" in type(m).__name__ for n, m in model.named_modules() if "lora_" in n) >= len(
        emitted.layers_of(base)
    )
    logits = model(input_ids=ids).logits
    loss_of(logits, ids).backward()
    logits = logits.detach()
    assert oracles.relative_error(logits, before) >= 1e-2
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        merged = model.merge_and_unload()(input_ids=ids).logits
    assert oracles.relative_error(logits, merged) <= TOLERANCE


def test_an_adapter_that_was_saved_is_loaded_again(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(emitted.load(directory("llama", "2x", 4)), config).eval()
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(emitted.load(directory("llama", "2x", 4)), tmp_path)
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch("llama")).logits, again(input_ids=batch("llama")).logits)


# What cannot be


UNFIT_ADAPTERS = [
    LoraConfig(r=4, target_modules=["o_proj"], task_type="CAUSAL_LM", use_dora=True),
    LoraConfig(r=4, target_modules=["o_proj"], task_type="CAUSAL_LM", lora_bias=True),
    IA3Config(target_modules=["o_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
]


@pytest.mark.parametrize("config", UNFIT_ADAPTERS, ids=["dora", "bias", "ia3"])
def test_an_adapter_that_cannot_compute_per_rank_is_refused(config: PeftConfig) -> None:
    model = emitted.load(directory("llama", "2x", 4))
    with pytest.raises(TypeError, match=r"self_attn\.o_proj of a DropKeep\w+ became a Linear, which cannot compute"):
        get_peft_model(model, config)(input_ids=batch("llama"))


def test_an_adapter_elsewhere_works() -> None:
    """q, k and v of a layer that reads the same on all ranks are the source's own."""
    base = emitted.load(directory("llama", "2x", 4))
    with torch.no_grad():
        before = base(input_ids=batch("llama")).logits
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    logits = model(input_ids=batch("llama")).logits
    assert torch.equal(logits, before)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_key_value_heads_that_are_fused_with_queries_and_copied_are_refused_by_name() -> None:
    config = AutoConfig.for_model(
        "gpt_bigcode", n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=64, multi_query=True
    )
    sharded = TensorParallel().apply(trace(config).with_(mesh={"tp": 2}))
    expected = r"transformer\.h\.1\.attn: its 2 ranks cannot run on one device .* c_attn makes outputs of each"
    with pytest.raises(RewriterError, match=expected):
        emit_huggingface(Desync(n=4).apply(sharded))


def test_dropout_that_is_not_computed_per_rank_is_refused_in_training() -> None:
    config = AutoConfig.for_model(
        "gpt_neox", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=64,
        hidden_dropout=0.1,
    )  # fmt: skip
    sharded = TensorParallel().apply(trace(config).with_(mesh={"tp": 2}))
    for text, drops in (
        (emitted.modeling(Desync(n=4).apply(sharded)), True),
        (emitted.modeling(program("gpt_neox", "2x", 4)), False),
    ):
        assert ("register_forward_pre_hook(refuse_dropout)" in text) == drops
        assert ("if model.training:" in text) == drops


# Seeded faults: what a wrong rewrite would emit must fail the comparison above


def lost_part(graph: fx.Graph) -> None:
    """What the ranks added at attention is not in the sum of the kept reduction."""
    total = next(n for n in graph.nodes if n.target is ops.all_reduce and marks(n).layer == 1)
    add = total.args[0]
    add.replace_all_uses_with(add.args[1])


def synchronised_too_early(graph: fx.Graph) -> None:
    """The MLP reads the stream as it was before attention, equal on all ranks."""
    norm = next(n for n in graph.nodes if n.target == "model.layers.1.post_attention_layernorm")
    norm.args = (next(n for n in graph.nodes if marks(n).stream == 2),)


@pytest.mark.parametrize("fault", [lost_part, synchronised_too_early])
def test_seeded_faults_show(fault: Callable[[fx.Graph], None], tmp_path: Path) -> None:
    faulty, ids = emitted.edited(program("llama", "4x-sum", 4), fault), batch("llama")
    emitted.write(emit_as_wired(faulty), emitted.source("llama"), tmp_path / "out")
    with torch.no_grad():
        expected = simulate(program("llama", "4x-sum", 4), ids)
        assert oracles.relative_error(emitted.load(tmp_path / "out")(input_ids=ids).logits, expected) >= 1e-2
