"""Checkpoints whose weights are quantized: read, sharded and written as what they stand for, or kept as they are."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints
import torch
import zoo
from quantized_checkpoints import E2M1, MAKERS, fp8_codes
from quantized_shards import sharded, traced, write
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import ConversionOps
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers import AutoQuantizationConfig

from rewriter.common.errors import RewriterError
from rewriter.convert.conversion import convert
from rewriter.convert.save_options import SaveOptions
from rewriter.emit.files import output_files
from rewriter.emit.files.output_directory import OutputDirectory
from rewriter.ir.simulate import load_weights, simulate
from rewriter.kernels import stored_weights
from rewriter.passes.permute import Permute
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.tracing import trace
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import (
    Concat,
    Dequantized,
    Expression,
    Slice,
    Stack,
    Take,
    Transpose,
    is_dequantized,
)
from rewriter.weights.plain_model import PlainTensors, plain_model
from rewriter.weights.references import RankWeights

# What transformers keeps so: routers, and GPT-OSS' norms beside float16 alone.
FP32 = {"fp8-deepseek": ("e_score_correction_bias", "mlp.gate.weight")}
FP32_BESIDE_FLOAT16 = {"mxfp4": ("layernorm.weight", "model.norm.weight")}
FAST = ("fp8-blocks", "mxfp4", "awq")
KINDS = [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in MAKERS]
Made = Callable[[str], tuple[Path, dict[str, torch.Tensor]]]


# As published: what is not quantized is in one of these dtypes, and config.json names it or not.
BESIDE = [(dtype, named) for dtype in ("bfloat16", "float16", "float32") for named in (True, False)]


@pytest.fixture(
    scope="module",
    params=[BESIDE[0], *(pytest.param(beside, marks=pytest.mark.slow) for beside in BESIDE[1:])],
    ids=lambda beside: f"{beside[0]}{'' if beside[1] else ', not named'}",
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Of a kind, (directory, what its tensors stand for); each is made when it is asked for."""
    root = tmp_path_factory.mktemp("quantized")
    dtype, named = request.param
    return functools.cache(
        lambda kind: (root / kind, quantized_checkpoints.make(kind, root / kind, dtype, named=named))
    )


def transformers_model(directory: Path) -> torch.nn.Module:
    """As transformers dequantizes it, fp32."""
    said = json.loads((directory / "config.json").read_text())["quantization_config"]
    chosen = AutoQuantizationConfig.from_dict({**said, "dequantize": True})
    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=chosen, dtype=torch.float32, attn_implementation="eager"
    )
    return model.float().eval()  # before 5.24 what is not quantized keeps the dtype that it is stored in


# --- what weights stand for


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_was_packed(made: Made, kind: str) -> None:
    source, meant = made(kind)
    program = traced(source)
    weights = load_weights(program)
    shared = [name for name in meant if name in weights]
    assert len(shared) > 30
    for name in shared:
        torch.testing.assert_close(weights[name], meant[name], rtol=0, atol=0, msg=name)
    assert sum(is_dequantized(p.expression) for p in program.parameters.values() if p.expression) >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_reads_what_was_packed(made: Made, kind: str) -> None:
    """By code of its own, though verification compares with it."""
    source, meant = made(kind)
    plain = PlainTensors(source)
    assert set(plain.names()) == set(meant)
    for name in meant:
        torch.testing.assert_close(plain.read(name), meant[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", ["fp8-blocks", "fp8-experts", "mxfp4", "fp8-tensor", "fp8-channel"])
@torch.no_grad()
def test_logits_are_those_of_transformers(made: Made, kind: str) -> None:
    if kind in ("fp8-tensor", "fp8-channel"):
        pytest.importorskip("compressed_tensors", reason="transformers needs it to load such weights")
    source, _ = made(kind)
    ids = zoo.batch()
    expected = transformers_model(source)(ids, use_cache=False).logits
    found = simulate(traced(source), ids, dtype=torch.float32)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert (simulate(sharded(source), ids, dtype=torch.float32) - expected).norm() <= 1e-4 * expected.norm()
    assert (plain_model(source)[0](ids, use_cache=False).logits - expected).norm() <= 1e-5 * expected.norm()


def fp8_of_transformers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    operation: ConversionOps = Fp8Dequantize(None)
    return operation._dequantize_one(codes, scales, output_dtype=torch.float32)


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
def test_fp8_as_transformers_dequantizes_it(scales_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(3, 32, 48, generator=generator).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 134, (3, 2, 3), generator=generator)
    scales = exponents.to(torch.uint8) if scales_dtype == torch.uint8 else (exponents - 127.0).exp2().to(scales_dtype)
    found = stored_weights.fp8(codes, scales, (1, 16, 16))
    torch.testing.assert_close(found, fp8_of_transformers(codes, scales), rtol=0, atol=0)


def test_fp8_blocks_at_the_edge_may_be_smaller() -> None:
    """DeepSeek-V3's kv_a_proj has 576 rows in blocks of 128."""
    weight = torch.randn(37, 50, generator=torch.Generator().manual_seed(0))
    codes, scales, meant = fp8_codes(weight, 16, 16)
    torch.testing.assert_close(stored_weights.fp8(codes, scales, (16, 16)), meant, rtol=0, atol=0)
    padded = torch.nn.functional.pad(codes.float(), (0, 14, 0, 11)).to(codes.dtype)
    torch.testing.assert_close(meant, fp8_of_transformers(padded, scales)[:37, :50], rtol=0, atol=0)


def test_mxfp4_as_transformers_dequantizes_it() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 24, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(110, 140, (2, 24, 3), generator=generator).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    torch.testing.assert_close(stored_weights.mxfp4(blocks, scales).transpose(1, 2), expected, rtol=0, atol=0)
    assert tuple(E2M1.tolist()) == stored_weights.E2M1


@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("fp4", False)])
def test_bitsandbytes_as_transformers_dequantizes_it(tmp_path: Path, kind: str, nested: bool) -> None:
    pytest.importorskip("bitsandbytes", reason="transformers needs it to make and load such weights")
    from transformers import BitsAndBytesConfig

    chosen = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested)
    # Its CPU kernel takes the wrong scales where a row is no whole number of blocks of 64.
    config = zoo.config("llama")
    config.intermediate_size = 128
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=chosen, dtype=torch.float32)
    model.save_pretrained(tmp_path / "source")
    weights = load_weights(trace(tmp_path / "source"))
    for name, expected in model.dequantize(torch.float32).named_parameters():
        torch.testing.assert_close(weights[name], expected.detach(), rtol=1e-6, atol=1e-7, msg=name)


# --- ranges of them


@pytest.mark.parametrize("kind", MAKERS)
def test_ranges_of_quantized_weights(made: Made, kind: str) -> None:
    source, _ = made(kind)
    checkpoint = Checkpoint.open(source)
    draw = torch.Generator().manual_seed(0)
    for name, spec in traced(source).parameters.items():
        assert spec.expression is not None
        if not is_dequantized(spec.expression) or ".2." in name:
            continue
        whole = checkpoint.evaluate(spec.expression)
        for dim, size in enumerate(whole.shape):
            cuts = torch.randint(size, (2,), generator=draw).sort().values.tolist()
            ranges = ((0, size // 2), (cuts[0], cuts[1] + 1))
            found = checkpoint.evaluate(Slice(spec.expression, dim, ranges))
            expected = torch.cat([whole.narrow(dim, a, b - a) for a, b in ranges], dim)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"{name} {dim} {ranges}")


def leaves(expression: Expression) -> list[Expression]:
    """The parts of what is dequantized; a `Slice` above it is an error."""
    match expression:
        case Dequantized(_, parts):
            return list(parts)
        case Transpose(source) | Take(source):
            return leaves(source)
        case Concat(parts) | Stack(parts):
            return [leaf for part in parts for leaf in leaves(part)]
    raise AssertionError(f"{expression} is cut after it was dequantized")


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "bnb-nf4"])  # of which no part is read by itself
def test_a_rank_reads_only_the_codes_of_its_range(made: Made, kind: str) -> None:
    """Half of the codes, where the half ends between two scales."""
    source, _ = made(kind)
    checkpoint, program = Checkpoint.open(source), traced(source)
    name = next(n for n in program.parameters if n.endswith(("gate_up_proj", "o_proj.weight")) and "layers.0" in n)
    if kind == "mxfp4":
        name = "model.layers.0.mlp.experts.gate_up_proj"
    expression = program.parameters[name].expression
    assert expression is not None
    shape = expression.shape(checkpoint.shapes)
    half = Slice(expression, len(shape) - 1, ((0, 32),)).narrowed(checkpoint.shapes)
    sizes = [torch.Size(leaf.shape(checkpoint.shapes)).numel() for leaf in leaves(half)]
    whole = [torch.Size(checkpoint.info(n).shape).numel() for n in expression.tensors()]
    assert sizes[0] * shape[-1] == whole[0] * 32


# --- files


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapted_checkpoint_keeps_them_and_ranks_read_its_ranges(made: Made, tmp_path: Path, kind: str) -> None:
    source, meant = made(kind)
    out = write(source, tmp_path / "out", recipe="ladder-upper-half" if kind == "fp8-blocks" else "tensor-parallel")
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert list(after) == list(before)
    assert all(before[n].view(torch.uint8).equal(after[n].view(torch.uint8)) for n in before if before[n].dim())
    configs = [json.loads((path / "config.json").read_text()) for path in (source, out)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    program, checked = sharded(source), 0
    stored, fp32 = meant["model.norm.weight"].dtype, FP32.get(kind, ())
    if stored == torch.float16:
        fp32 += FP32_BESIDE_FLOAT16.get(kind, ())
    for rank in range(2):
        weights = RankWeights.open(out, out / "runtime/tp2/weights.json", rank)
        read = weights.read(dict.fromkeys(weights.parameters), "cpu")
        for name, spec in program.parameters.items():
            if name in read and name in meant:
                expected = meant[name]
                if spec.ranges is not None:
                    assert spec.dim is not None
                    expected = torch.cat([expected.narrow(spec.dim, a, b - a) for a, b in spec.ranges[rank]], spec.dim)
                dtype = torch.float32 if name.endswith(fp32) else stored
                torch.testing.assert_close(read[name], expected.to(dtype), rtol=0, atol=0, msg=name)
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_writes_what_they_stand_for(tmp_path: Path, kind: str) -> None:
    meant = quantized_checkpoints.make(kind, tmp_path / "source", "bfloat16")
    out = write(tmp_path / "source", tmp_path / "out", dequantize=True)
    written = load_file(out / "model.safetensors")
    assert set(written) == set(meant)
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, meant[name].to(torch.bfloat16), rtol=0, atol=0, msg=name)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    AutoModelForCausalLM.from_pretrained(out)


def test_dequantized_weights_in_pieces_of_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales in another file than their codes, and tensors of many pieces."""
    from rewriter.weights import shards

    source = tmp_path / "source"
    meant = quantized_checkpoints.make("fp8-blocks", source)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    scales = {name: t for name, t in tensors.items() if name.endswith("scale_inv")}
    rest = {name: t for name, t in tensors.items() if name not in scales}
    save_file(scales, source / "b.safetensors")
    save_file(rest, source / "a.safetensors")
    places = dict.fromkeys(rest, "a.safetensors") | dict.fromkeys(scales, "b.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    monkeypatch.setattr(shards, "MADE", 1000)
    out = write(source, tmp_path / "out", dequantize=True)
    assert not (out / "b.safetensors").exists()
    written = load_file(out / "a.safetensors")
    assert set(written) == set(meant)
    assert all(torch.equal(written[name], meant[name]) for name in meant)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(sorted(meant), "a.safetensors")
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in meant.values())


def test_a_recipe_that_reorders_weights_needs_them_dequantized(made: Made, tmp_path: Path) -> None:
    source, meant = made("fp8-blocks")
    program = traced(source)
    permuted = TensorParallel().apply(Permute(round_robin=2).apply(program.with_(mesh={"tp": 2}, origin=program)))
    with pytest.raises(RewriterError, match=r"stored quantized.*--dequantize"):
        output_files.plan(permuted)
    layout = output_files.plan(permuted, dequantize=True)
    with OutputDirectory(tmp_path / "out", job={}) as output:
        output_files.write(layout, output)
        output.manifest({})
    written = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    rounded = meant[name].to(written[name].dtype)
    assert not torch.equal(written[name], rounded)
    assert torch.equal(written[name].sort(-1).values, rounded.sort(-1).values)
    read = RankWeights.open(tmp_path / "out", tmp_path / "out/runtime/tp2/weights.json", 1).read({name: None}, "cpu")
    spec = permuted.parameters[name]
    assert spec.expression is not None
    assert torch.equal(read[name], Checkpoint.open(source).evaluate(spec.on_rank(1)).to(read[name].dtype))


# --- refusals


@pytest.mark.parametrize(
    ("kind", "said", "reason"),
    [
        ("gptq", {"bits": 3, "desc_act": True}, r"gptq, 3 bits, desc_act: True, checkpoint_format: gptq, which is not"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: marlin"),
        ("gptq", {"dynamic": {"-:.*": {}}}, "gptq, 4 bits.*dynamic.*other bits for some modules"),
        ("awq", {"bits": 8}, "awq, 8 bits, version: gemm, which is not supported: of awq only 4 bits"),
        ("awq", {"version": "gemv"}, "awq, 4 bits, version: gemv"),
        ("awq", {"zero_point": False}, "zero_point: False"),
        ("awq", {"quant_method": "hqq", "nbits": 4}, "quantized by hqq.*awq, bitsandbytes, compressed-tensors, fp8"),
        ("awq", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
        ("awq", {"quant_method": "fp8"}, "config.json says that weights are quantized .fp8 .*but none"),
        ("fp8-blocks", {"expert_dtype": "fp4"}, "fp8 with experts in fp4"),
        ("fp8-tensor", {"format": "pack-quantized"}, "compressed-tensors, pack-quantized, 8 bits float"),
        ("fp8-tensor", {"kv_cache_scheme": {"num_bits": 8}}, "compressed-tensors with a kv_cache_scheme"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, kind: str, said: dict[str, Any], reason: str) -> None:
    quantized_checkpoints.make(kind, tmp_path)
    change_config(tmp_path, lambda config: config["quantization_config"].update(said))
    with pytest.raises(RewriterError, match=reason):
        trace(tmp_path)


def change_config(directory: Path, change: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def change_tensors(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (
            "fp8-blocks",
            lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale_inv"),
            "up_proj.weight is F8_E4M3, but has no scale.*up_proj.weight_scale_inv",
        ),
        (
            "fp8-blocks",
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(5, 4)}),
            r"up_proj.weight \[112, 64\] does not divide into the blocks of .*scale_inv \[5, 4\]",
        ),
        ("awq", lambda t: t.pop("model.layers.1.mlp.up_proj.qzeros"), "up_proj.qweight needs .*up_proj.qzeros"),
        (
            "awq",
            lambda t: t.update({"model.layers.1.mlp.up_proj.qzeros": torch.ones(3, 14, dtype=torch.int32)}),
            r"up_proj.qzeros has shape \[3, 14\], where \[4, 14\] belongs to codes .*qweight \[64, 14\]",
        ),
    ],
)
def test_damaged_parts_are_named(tmp_path: Path, kind: str, change: Any, reason: str) -> None:
    quantized_checkpoints.make(kind, tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(RewriterError, match=reason):
        trace(tmp_path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "fp16"}, "fp8 in blocks of 16×16: --dtype fp16 would round their scales. Add --dequantize"),
        ({"materialize": True}, "fp8 in blocks of 16×16: --materialize writes what ranks compute with"),
        ({"dequantize": True, "link": True}, "--link with --dequantize"),
    ],
)
def test_options_that_contradict_quantized_weights(
    made: Made, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RewriterError, match=reason):
        write(made("fp8-blocks")[0], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_nothing_to_dequantize(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "source")
    with pytest.raises(RewriterError, match=r"--dequantize: the weights in .* are not quantized. Leave it out"):
        write(tmp_path / "source", tmp_path / "out", dequantize=True)


def test_quantized_weights_are_not_trained(made: Made, tmp_path: Path) -> None:
    from rewriter.convert.rewritten_source import open_output

    out = write(made("awq")[0], tmp_path / "out", "ladder-upper-half")
    with pytest.raises(RewriterError, match=r"are quantized, and cannot be trained. Rewrite with --dequantize"):
        open_output(out, trained=True)


# --- all of it


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8-blocks", "fp8-experts", "mxfp4", "awq", "autofp8"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_everything_is_verified_on_the_real_weights(made: Made, tmp_path: Path, kind: str, dequantize: bool) -> None:
    """At tp 2, FP8 blocks of 16 rows are cut: a rank has 56 channels of the MLP."""
    out, source = tmp_path / "out", made(kind)[0]
    report = convert(
        source, "ladder-upper-half", out=out, tp=2, options=SaveOptions(verify="full", dequantize=dequantize)
    )
    table = report.verification
    assert float(table["real weights: sharded module on 2 ranks = rewritten"]) <= 1e-4
    if kind != "awq" or dequantize:
        assert float(table["real weights: adapted checkpoint = rewritten"]) <= 1e-5
    if kind != "awq":
        assert float(table["real weights: rewritten = its reference"]) <= 1e-5
