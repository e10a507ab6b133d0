"""Sources that bring more than weights: adapters, and tokenizers with code of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import save_file
from transformers import AutoTokenizer

from rewriter import AdaptOptions, api
from rewriter.check.drift import calibration_tokens
from rewriter.cli.serve_command import serve_command
from rewriter.common import packages
from rewriter.common.errors import RewriterError
from rewriter.runtime import load
from rewriter.tracing import trace

# --- adapters


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model `m`, and `out`, which was made of it."""
    place = tmp_path_factory.mktemp("adapters")
    zoo.save("llama_tied", place / "m")
    api.convert(place / "m", "ladder", out=place / "out", options=api.SaveOptions(verify="none"))
    return place


def put_adapter(place: Path) -> Path:
    """An adapter as peft saves it."""
    place.mkdir(exist_ok=True)
    said = {"peft_type": "LORA", "base_model_name_or_path": "else/where", "r": 2, "target_modules": ["q_proj"]}
    (place / "adapter_config.json").write_text(json.dumps(said))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file({name.format("A"): torch.ones(2, zoo.HIDDEN)}, place / "adapter_model.safetensors")
    return place


# every way in that takes a model
COMMANDS: dict[str, Callable[[Path, Path], Any]] = {
    "convert": lambda m, new: api.convert(m, "ladder", out=new),
    "inspect": lambda m, new: api.inspect(m),
    "predict": lambda m, new: api.predict(m, workload=api.Workload(tp=2)),
    "search": lambda m, new: api.search(m, api.Workload(tp=2)),
    "bisect": lambda m, new: api.bisect(m, recipe="ladder"),
    "diff": lambda m, new: api.diff(m, recipe="ladder"),
    "serve": lambda m, new: serve_command(m, engine="transformers"),
}
OF_OUTPUTS: dict[str, Callable[[Path, Path], Any]] = {
    "generate": lambda out, new: api.generate(out, ["a"]),
    "load": lambda out, new: api.load(out),
    "runtime.load": lambda out, new: load(out),
    "adapt": lambda out, new: api.adapt(out, out=new, options=AdaptOptions(tokens=100)),
    "verify": lambda out, new: api.verify(out),
    "reshard": lambda out, new: api.reshard(out, 2),
    "diff of an output": lambda out, new: api.diff(out),
    "serve": lambda out, new: serve_command(out, engine="transformers"),
}


@pytest.mark.parametrize("way", COMMANDS)
@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter_is_refused_wherever_a_model_is_taken(
    way: str, alone: bool, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "m"
    if not alone:
        shutil.copytree(made / "m", model)
    put_adapter(model)
    with pytest.raises(RewriterError, match=r"adapter_config\.json: .*peft merge_and_unload"):
        COMMANDS[way](model, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("way", OF_OUTPUTS)
def test_an_adapter_beside_an_output_is_refused(way: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out", tmp_path / "out")
    put_adapter(tmp_path / "out")
    with pytest.raises(RewriterError, match=r"adapter_config\.json: .*peft merge_and_unload"):
        OF_OUTPUTS[way](tmp_path / "out", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.slow
def test_adapters_in_folders_inside_are_no_part_of_a_model(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "m", tmp_path / "m")
    put_adapter(tmp_path / "m" / "adapter")
    api.convert(tmp_path / "m", "ladder", out=tmp_path / "out", options=api.SaveOptions(verify="none"))
    assert not (tmp_path / "out" / "adapter").exists()
    config = shutil.copy(put_adapter(tmp_path / "only") / "adapter_config.json", tmp_path / "adapter_config.json")
    assert Path(config).is_file()
    api.inspect(tmp_path / "m" / "config.json")


# --- tokenizers with code of their own

CODE = """
import pathlib
from transformers import PreTrainedTokenizer
from .letters_of import letters

pathlib.Path({ran!r}).touch()

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "letters.vocabulary"}}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        self.letters = letters(vocab_file)
        super().__init__(**kwargs)

    vocab_size = property(lambda self: len(self.letters))

    def get_vocab(self):
        return {{letter: i for i, letter in enumerate(self.letters)}}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token) if token in self.letters else 0

    def _convert_id_to_token(self, index):
        return self.letters[index % len(self.letters)]

    def save_vocabulary(self, directory, filename_prefix=None):
        return ()
"""
LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,\n"
FILES = ["letters.vocabulary", "letters_of.py", "own_tokenization.py", "tokenizer_config.json"]


@pytest.fixture
def coded(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(a model whose tokenizer brings its code, a file that is there once that code ran)."""
    model, ran = tmp_path / "m", tmp_path / "ran"
    shutil.copytree(made / "m", model)
    (model / "own_tokenization.py").write_text(CODE.format(ran=str(ran)))
    (model / "letters_of.py").write_text("def letters(file):\n    return open(file).read()\n")
    (model / "unrelated.py").write_text("raise SystemError")
    (model / "letters.vocabulary").write_text(LETTERS)
    said = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own_tokenization.OwnTokenizer", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(said))
    return model, ran


def test_without_trust_nothing_runs_and_nothing_is_written(coded: tuple[Path, Path], tmp_path: Path) -> None:
    model, ran = coded
    for verify in ("none", "shrunken"):
        with pytest.raises(RewriterError, match=r"own_tokenization\.OwnTokenizer.*--trust-remote-code"):
            api.convert(model, "ladder", out=tmp_path / "out", options=api.SaveOptions(verify=verify))
    api.inspect(model)  # needs no tokenizer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    assert not ran.exists()


def test_the_code_and_its_vocabulary_are_copied_and_used_with_trust(
    coded: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packages.EXTRAS, "serve", ())
    model, ran = coded
    out = tmp_path / "out"
    api.convert(
        model, "ladder", out=out, options=api.SaveOptions(verify="none"), context=api.RunContext(trust_remote_code=True)
    )
    assert calibration_tokens(trace(model, trust_remote_code=True))[1] == "the packaged calibration text"
    ran.unlink()
    assert not (out / "unrelated.py").exists()
    assert all((out / name).read_bytes() == (model / name).read_bytes() for name in FILES)
    assert set(FILES) <= set(json.loads((out / "rewrite.json").read_text())["files"])
    for refused in (
        lambda: api.generate(out, ["ab"], max_new_tokens=2),
        lambda: api.adapt(out, out=tmp_path / "new", options=AdaptOptions(tokens=100)),
        lambda: serve_command(out, engine="transformers"),
    ):
        with pytest.raises(RewriterError, match="--trust-remote-code"):
            refused()
    assert api.load(out) is not None  # its own code, and none of the tokenizer's
    assert not ran.exists()
    (generation,) = api.generate(out, ["ab"], max_new_tokens=5, context=api.RunContext(trust_remote_code=True))
    assert generation.text
    assert "--trust-remote-code" in serve_command(out, engine="transformers", trust_remote_code=True).arguments
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    assert tokenizer("cab").input_ids == [2, 0, 1]
    assert ran.exists()


@pytest.mark.slow
def test_what_was_adapted_has_the_code_too(coded: tuple[Path, Path], tmp_path: Path) -> None:
    model, _ = coded
    out, data = tmp_path / "out", tmp_path / "data.jsonl"
    api.convert(
        model, "ladder", out=out, options=api.SaveOptions(verify="none"), context=api.RunContext(trust_remote_code=True)
    )
    data.write_text(json.dumps({"text": "the letters of a text " * 8}))
    chosen = AdaptOptions(length=32, method="sft", settings={"max_steps": 1, "use_cpu": True})
    api.adapt(
        out,
        out=tmp_path / "new",
        data=data,
        eval=data,
        verify="none",
        context=api.RunContext(trust_remote_code=True),
        options=chosen,
    )
    assert all((tmp_path / "new" / name).is_file() for name in FILES)
    assert AutoTokenizer.from_pretrained(tmp_path / "new", trust_remote_code=True)("cab").input_ids == [2, 0, 1]


def test_code_that_fails_says_so(coded: tuple[Path, Path], tmp_path: Path) -> None:
    model, _ = coded
    (model / "letters_of.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(RewriterError, match=r"own code \(own_tokenization\.OwnTokenizer\) fails: .*no_such_package"):
        api.convert(model, "ladder", out=tmp_path / "out", context=api.RunContext(trust_remote_code=True))


def test_code_is_not_needed_where_transformers_has_the_class(coded: tuple[Path, Path], tmp_path: Path) -> None:
    model, ran = coded
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(model / "tokenizer.json"))
    said = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(said | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    api.convert(model, "ladder", out=tmp_path / "out", options=api.SaveOptions(verify="none"))
    assert not ran.exists()
    assert (tmp_path / "out" / "own_tokenization.py").is_file()  # for those who load it with trust
