"""Bad input gets one clear message and a non-zero exit, and nothing half-written.

Everything here goes through the command line as a user would, in this process. After each refusal the working
directory is what it was before.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from refusals import Capture, refused, written
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rewriter as rw
from rewriter.check.coverage.configs import small_config
from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.emit.files.output_directory import OutputDirectory
from rewriter.weights import space


def convert(capsys: Capture, model: Path | str = "m", *more: str) -> str:
    return refused(capsys, str(model), "--recipe", "ladder-upper-half", "--out", "out", *more)


# The model


def test_no_such_model(model: Path, capsys: Capture) -> None:
    assert "no such model: ./absent" in convert(capsys, "./absent")
    assert "no such model: org/absent" in convert(capsys, "org/absent")


def test_a_directory_that_is_no_model(model: Path, capsys: Capture) -> None:
    (model / "config.json").unlink()
    assert "holds no config.json" in convert(capsys)


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "{}", '{"model_type": "lllama"}', "\x00\xff"])
def test_a_config_that_is_none(model: Path, capsys: Capture, text: str) -> None:
    (model / "config.json").write_text(text)
    assert "m" in convert(capsys)


def test_pickled_weights_are_refused_by_name_and_not_opened(model: Path, capsys: Capture) -> None:
    (model / "model.safetensors").unlink()

    class Trap:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return (os.mkdir, (str(model / "trapped"),))

    (model / "pytorch_model-00001-of-00002.bin").write_bytes(pickle.dumps(Trap()))
    message = convert(capsys)
    assert "pytorch_model-00001-of-00002.bin" in message
    assert "pickled" in message
    assert not (model / "trapped").exists()


def test_no_weights_at_all(model: Path, capsys: Capture) -> None:
    (model / "model.safetensors").unlink()
    assert "no weights: neither model.safetensors nor model.safetensors.index.json" in convert(capsys)
    for name, step in {"c.safetensors": "rename it", "model.fp16.safetensors": "fp16')", "a.gguf": "a.gguf')"}.items():
        (model / name).touch()
        assert step in convert(capsys)
        (model / name).unlink()


# Tensors, known from headers before anything is written


def test_a_missing_tensor(model: Path, capsys: Capture) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    message = convert(capsys)
    assert "lacks model.layers.1.mlp.up_proj.weight" in message
    assert "Download it again" in message


def test_a_missing_head(model: Path, capsys: Capture) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors | {"score.weight": torch.zeros(1, 64)}, model / "model.safetensors")
    assert '"tie_word_embeddings": true' in convert(capsys)


def test_a_surplus_tensor_that_transformers_ignores_is_none(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert main(["m", "--recipe", "ladder-upper-half", "--out", "out", "--verify", "none"]) == 0


def test_a_tensor_of_another_shape(model: Path, capsys: Capture) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(63)
    save_file(tensors, model / "model.safetensors")
    assert "model.norm.weight: the checkpoint holds 63, its config says 64" in convert(capsys)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    save_file(tensors, model / "model.safetensors")
    rows = len(tensors["lm_head.weight"])
    assert f"vocab_size in config.json has to be {rows}" in convert(capsys)


# Headers and indices that lie


def rewrite_header(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_a_truncated_file(model: Path, capsys: Capture) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors: not a valid safetensors file" in convert(capsys)
    path.write_bytes(b"")
    assert "model.safetensors: not a valid safetensors file" in convert(capsys)
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "header too large" in convert(capsys)


@pytest.mark.parametrize(
    "lie",
    [
        {"shape": [-1]},
        {"data_offsets": [8, 0]},
        {"dtype": "BF16"},
        {"shape": [1 << 62, 0], "data_offsets": [0, 0]},
    ],
    ids=str,
)
def test_a_header_that_lies(model: Path, capsys: Capture, lie: dict[str, object]) -> None:
    rewrite_header(model / "model.safetensors", lambda header: header["model.norm.weight"].update(lie))
    assert "model.safetensors: not a valid safetensors file" in convert(capsys)


def split(model: Path) -> dict[str, str]:
    """Split the weights into two files with an index, as large checkpoints are; returns the weight map."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, model / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index(model, weight_map)
    return weight_map


def index(model: Path, weight_map: dict[str, str]) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_an_index_that_points_outside(model: Path, capsys: Capture) -> None:
    weight_map, name = split(model), "a/../../secret.safetensors"
    shutil.copy(model / "model-00001-of-00002.safetensors", model.parent / "secret.safetensors")
    index(model, {n: name if f.startswith("model-00001") else f for n, f in weight_map.items()})
    message = convert(capsys)
    assert repr(name) in message
    assert "is not followed" in message


def test_symlinks_as_in_the_hub_cache_are_fine(model: Path) -> None:
    split(model)
    blobs = model.parent / "blobs"
    blobs.mkdir()
    for path in list(model.glob("*.safetensors")):
        path.rename(blobs / path.name)
        path.symlink_to(f"../blobs/{path.name}")
    assert main(["m", "--recipe", "ladder-upper-half", "--out", "out", "--verify", "none", "--tp", "2"]) == 0
    copied = model.parent / "out/model-00001-of-00002.safetensors"
    assert not copied.is_symlink()
    assert copied.read_bytes() == (blobs / copied.name).read_bytes()


def test_an_index_and_files_that_disagree(model: Path, capsys: Capture) -> None:
    weight_map = split(model)
    (model / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: missing" in convert(capsys)
    index(model, weight_map | {"extra": "model-00001-of-00002.safetensors"})
    assert "extra" in convert(capsys) or "missing" in convert(capsys)
    (model / "model.safetensors.index.json").write_text("[1]")
    assert "it has no weight_map" in convert(capsys)


# The recipe and the options


def test_an_unknown_recipe_pass_or_option_names_the_nearest(model: Path, capsys: Capture) -> None:
    assert "Did you mean 'ladder'?" in refused(capsys, "m", "--recipe", "lader", "--out", "out")
    assert "no pass 'lader'. Did you mean 'ladder'?" in convert(capsys, "m", "--set", "lader.layers=all")
    assert "Did you mean 'layers'?" in convert(capsys, "m", "--set", "ladder.layer=all")
    assert "ladder.layers=upper-hlf" in convert(capsys, "m", "--set", "ladder.layers=upper-hlf")
    assert "the model has 4" in convert(capsys, "m", "--set", "ladder.layers=last:20")


def test_a_hostile_recipe_constructs_nothing(model: Path, capsys: Capture) -> None:
    recipe = Path("evil.yaml")
    recipe.write_text(f"name: x\nsummary: !!python/object/apply:os.mkdir ['{Path.cwd()}/trap']\npaper: p\npasses: []\n")
    message = refused_lines(capsys, "m", "--recipe", "evil.yaml", "--out", "out")
    assert "tag !!python/object/apply:os.mkdir" in message
    assert not Path("trap").exists()


def refused_lines(capsys: Capture, *words: str) -> str:
    """As `refused`, for a recipe file: all its faults are told, one per line."""
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_a_degree_that_does_not_divide(model: Path, capsys: Capture) -> None:
    assert (
        convert(capsys, "m", "--tp", "3")
        == "--tp 3: 8 query heads do not divide by 3. Nearest: 2, 4. --recipe fit-tp pads them"
    )


def test_options_that_contradict(model: Path, capsys: Capture) -> None:
    assert "--link with --dtype" in convert(capsys, "m", "--link", "--dtype", "bf16")


def test_what_is_for_timing_is_not_written(model: Path, capsys: Capture) -> None:
    assert "timing only" in refused(capsys, "m", "--recipe", "upper-bound", "--tp", "2", "--out", "out")


# The architecture


def test_a_model_without_a_residual_stream(model: Path, capsys: Capture) -> None:
    shutil.rmtree(model)
    config = small_config("inkling2_text")  # what a layer adds joins a list of states, of which later ones read a mean
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    message = convert(capsys)
    assert "no residual stream" in message
    assert "nothing to rewire" in message


def test_a_model_that_is_no_causal_lm(model: Path, capsys: Capture) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    assert "'vit' cannot be built as a causal LM" in convert(capsys)
    assert config["model_type"] == "llama"


def test_remote_code_never_runs_without_permission(model: Path, capsys: Capture) -> None:
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "trap.C", "AutoModelForCausalLM": "trap.M"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "trap.py").write_text(f"open({str(model.parent / 'ran')!r}, 'w')\n")
    for command in (["--verify", "none"], ["--dry-run"]):
        assert "--trust-remote-code" in convert(capsys, "m", *command)
    assert "--trust-remote-code" in refused(capsys, "inspect", "m")
    assert not (model.parent / "ran").exists()


# The place


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_an_output_that_is_not_ours(model: Path, capsys: Capture, resume: list[str]) -> None:
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("mine")
    assert "not an output of rewriter" in convert(capsys, "m", "--verify", "none", *resume)
    shutil.rmtree("out")
    Path("out").write_text("mine")
    assert "out" in convert(capsys, "m", "--verify", "none", *resume)


def test_an_output_that_is_ours_is_not_overwritten_either_and_reads_no_text(model: Path, capsys: Capture) -> None:
    written(capsys)
    assert "out: it has no tokenizer" in refused(capsys, "generate", "out", "--prompt", "x")
    assert "already holds an output of rewriter" in convert(capsys, "m", "--verify", "none")
    assert "Choose another --out" in convert(capsys, "m", "--verify", "none", "--dry-run")


def test_the_source_itself_is_no_place(model: Path, capsys: Capture) -> None:
    assert "not an output of rewriter" in refused(capsys, "m", "--recipe", "ladder", "--out", "m", "--verify", "none")


def test_a_disk_that_is_too_small_is_known_before_writing(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "available", lambda path: 100_000)
    message = convert(capsys, "m", "--tp", "2")
    assert "are needed there and 100000 bytes are free" in message


def test_a_disk_that_runs_full_leaves_nothing(model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: OutputDirectory, name: str, data: str | bytes) -> str:
        if name == "README.md":  # after the weights
            raise OSError(28, "No space left on device", name)
        return kept(self, name, data)

    kept = OutputDirectory.write
    monkeypatch.setattr(OutputDirectory, "write", write)
    assert "the disk is full" in convert(capsys, "m", "--verify", "none")


def test_a_place_that_cannot_be_written(model: Path, capsys: Capture) -> None:
    Path("file").write_text("")
    assert "file" in refused(capsys, "m", "--recipe", "ladder", "--out", "file/out", "--verify", "none")


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("/dev/full/x", "/dev/full/x: /dev/full is not a directory"),
        ("m/config.json/x", "m/config.json is not a directory"),
        ("loop/x", "loop is not a directory"),
        ("m/sub", "m/sub: it lies within the model that is read, m, which stays as it is"),
        ("m/a/b", "m/a/b: it lies within the model that is read"),
        ("link/sub", "link/sub: it lies within the model that is read"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_place_in_which_nothing_can_be_made(
    model: Path, capsys: Capture, out: str, said: str, dry: list[str]
) -> None:
    Path("loop").symlink_to("loop")
    Path("link").symlink_to("m")
    assert said in refused(capsys, "m", "--recipe", "ladder", "--out", out, "--verify", "none", *dry)


def test_a_program_is_not_saved_within_its_model_either(model: Path) -> None:
    program = rw.rewrite(rw.trace(model), "ladder")
    with pytest.raises(RewriterError, match="lies within the model that is read"):
        rw.save(program, model / "sub", options=rw.SaveOptions(verify="none"))


# Words that name nothing


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        [LONG, "--recipe", "ladder"],
        ["./" + LONG, "--recipe", "ladder"],
        ["m", "--recipe", LONG + ".yaml"],
        ["m", "--recipe", "ladder", "--out", LONG],
        ["m", "--recipe", "ladder", "--out", LONG, "--dry-run"],
        ["m", "--recipe", "ladder", "--out", "o", "--calibration", LONG],
        ["generate", LONG, "--prompt", "x"],
        ["generate", "m", "--prompts", LONG],
        ["verify", LONG],
        ["reshard", LONG, "--tp", "2"],
        ["inspect", LONG],
        ["predict", "m", "--recipe", "ladder", "--fabric", LONG + ".yaml"],
        ["predict", "m", "--recipe", "ladder", "--html", LONG],
    ],
    ids=lambda words: " ".join(words).replace(LONG, "LONG"),
)
def test_a_name_that_is_too_long(model: Path, capsys: Capture, words: list[str]) -> None:
    message = refused(capsys, *words)
    assert "File name too long" in message
    assert "fault of rewriter" not in message


@pytest.mark.parametrize(
    "words",
    [
        ["m", "--recipe", "ladder", "--set", "ladder.layers=\udcff"],
        ["m", "--recipe", "ladder", "--out", "\udcff"],
        ["\udcff", "--recipe", "ladder"],
        ["inspect", "\udcff"],
    ],
)
def test_bytes_that_are_no_text(model: Path, capsys: Capture, words: list[str]) -> None:
    assert "\\udcff: it is not UTF-8 text" in refused(capsys, *words)


@pytest.mark.parametrize("option", ["--batch", "--prompt", "--generate", "--tp", "--nodes"])
def test_a_number_of_24_digits(model: Path, capsys: Capture, option: str) -> None:
    message = refused(capsys, "predict", "m", "--recipe", "tensor-parallel", option, "9" * 24)
    assert "fault of rewriter" not in message
    assert "fault of rewriter" not in refused(capsys, "m", "--recipe", "ladder", "--tp", "9" * 5000)


def test_a_number_that_a_command_cannot_hold(model: Path, capsys: Capture) -> None:
    written(capsys)
    for option, digits, expected in (
        ("--seed", 19, "from 0 to 2^63 - 1"),
        ("--seed", 24, "from 0 to 2^63 - 1"),
        ("--max-new-tokens", 13, "how many positions the model has"),
        ("--max-new-tokens", 24, "how many positions the model has"),
    ):
        assert expected in refused(capsys, "generate", "out", "--prompt", "x", option, "9" * digits)
    for given in (["--tokens", "9" * 24], ["--data", f"self:{'9' * 24}"], ["--data", "self:" + "9" * 5000]):
        message = refused(capsys, "adapt", "out", "--out", "adapted", *given)
        assert "at most 1,000,000,000,000,000" in message
        assert len(message) < 400
        assert not Path("adapted").exists()


@pytest.mark.parametrize("layers", [str(list(range(3000))), str([1.5] * 3000), "x" * 20_000])
def test_a_long_list_is_not_repeated_in_its_error(model: Path, capsys: Capture, layers: str) -> None:
    message = refused(capsys, "m", "--recipe", "ladder", "--set", f"ladder.layers={layers}", "--out", "out")
    assert "layers" in message
    assert len(message) < 600


def test_a_symlink_loop_or_a_directory_in_place_of_a_file(model: Path, capsys: Capture) -> None:
    Path("loop").symlink_to("loop")
    assert "no such model: loop" in refused(capsys, "inspect", "loop")
    assert "no such model: loop" in convert(capsys, "loop")
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").symlink_to("generation_config.json")
    assert "generation_config.json: cannot be read: Too many levels" in convert(capsys)
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").mkdir()
    assert "generation_config.json: not a regular file" in convert(capsys)


# Outputs as input


def test_a_manifest_that_is_none(model: Path, capsys: Capture) -> None:
    written(capsys)
    for text in ("[[[[", "[]", "[" * 100_000, '{"schema": 1}', "\x00\xff"):
        Path("out/rewrite.json").write_text(text)
        for words in (["verify", "out"], ["generate", "out", "--prompt", "x"], ["reshard", "out", "--tp", "2"]):
            assert "out/rewrite.json: " in refused(capsys, *words)


@pytest.mark.parametrize("words", [["verify", "m"], ["generate", "m", "--prompt", "x"], ["verify", "absent"]])
def test_a_directory_that_rewrite_did_not_write(model: Path, capsys: Capture, words: list[str]) -> None:
    message = refused(capsys, *words)
    assert "rewrite" in message
    assert "no " in message


def test_a_config_cannot_be_saved(model: Path) -> None:
    program = rw.rewrite(rw.trace(model / "config.json"), "ladder")
    with pytest.raises(RewriterError, match="has no weights"):
        rw.save(program, "out")
    assert not Path("out").exists()
