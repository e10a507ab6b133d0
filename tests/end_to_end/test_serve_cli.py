"""`rewrite serve`: which engine it becomes, with which arguments, what it says of overlap, and what it refuses."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import emitted
import pytest
import zoo
from safetensors.torch import load_file, save_file

from rewriter import api
from rewriter.cli import main
from rewriter.cli import serve_command as command
from rewriter.common import packages
from rewriter.output.names import MANIFEST

FAKE = '#!/bin/sh\nprintf "%s\\n" "$@"\n'
PLUGIN = "[vllm.general_plugins]\nrewriter = rewriter.runtime.serving.vllm:register\n"
PYTHON = sys.executable  # `install` names another one
Install = Callable[..., None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 query heads on 2 key/value heads."""
    path = tmp_path_factory.mktemp("models") / "small"
    zoo.save("llama", path)
    return path


def converted(source: Path, place: Path, recipe: str, tp: int) -> Path:
    api.convert(source, recipe, out=place / recipe, tp=tp, options=api.SaveOptions(verify="none"))
    return place / recipe


@pytest.fixture(scope="module")
def ladder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(source, tmp_path_factory.mktemp("out"), "ladder-upper-half", 2)


@pytest.fixture(scope="module")
def bound(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(source, tmp_path_factory.mktemp("out"), "desync-2x", 2)


def test_the_cpu_build_of_vllm_is_started_as_a_module(install, monkeypatch):
    monkeypatch.setattr(command, "CPU_BUILD", "vllm-of-this-test")
    install("vllm", "0.32.0")
    assert command._vllm() == ([sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"], "0.32.0")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts engines that write their arguments into an environment without any."""
    programs, packages = tmp_path / "bin", tmp_path / "site-packages"
    programs.mkdir()
    packages.mkdir()
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("REWRITER_DEBUG", raising=False)
    monkeypatch.setattr(command, "DISTRIBUTIONS", ("vllm-of-this-test",))
    monkeypatch.syspath_prepend(packages)

    def installed(name: str, version: str | None = None, plugin: bool = False) -> None:
        (programs / name).write_text(FAKE)
        (programs / name).chmod(0o755)
        if version is not None:
            info = packages / f"vllm_of_this_test-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-of-this-test\nVersion: {version}\n")
            if plugin:
                (info / "entry_points.txt").write_text(PLUGIN)

    return installed


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[list[str], str]:
    """The command that would run, without the place of its program, and what is said of it."""
    assert main(["serve", "--dry-run", *map(str, words)]) == 0
    printed, said = capsys.readouterr()
    program, *arguments = shlex.split(printed)
    return [Path(program).name, *arguments], said


def refused(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    assert main(["serve", "--dry-run", *map(str, words)]) == code
    printed, said = capsys.readouterr()
    assert printed == ""
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def test_it_becomes_vllm(ladder: Path, install: Install, tmp_path: Path) -> None:
    install("vllm", "0.32.0", plugin=True)
    program = (
        f"import sys; sys.executable = {str(tmp_path / 'bin' / 'python')!r}; from rewriter.cli import main;"
        f"main(['serve', {str(ladder)!r}, '--tp', '2', '--', '--port', '8001', '--max-model-len=64'])"
    )
    ran = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        "serve", str(ladder), "--trust-remote-code", "--tensor-parallel-size", "2", "--port", "8001",
        "--max-model-len=64",
    ]  # fmt: skip


def test_an_output_is_served_on_the_ranks_that_it_was_made_for(
    ladder: Path, bound: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("vllm", "0.32.1", plugin=True)
    for out in (ladder, bound):
        arguments, said = asked(capsys, out)
        assert arguments == ["vllm", "serve", str(out), "--trust-remote-code", "--tensor-parallel-size", "2"]
        assert said.startswith("vLLM 0.32.1 on 2 ranks.\n")
        assert "warning" not in said
    arguments, said = asked(capsys, ladder, "--tp", 4)
    assert arguments[-1] == "4"


def test_what_overlaps_is_said(
    ladder: Path, source: Path, install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install("vllm", "0.32.0", plugin=True)
    assert "\n4 of 8 all-reduces overlap with the next block.\n" in asked(capsys, ladder)[1]
    assert "\nOn one rank nothing is communicated" in asked(capsys, ladder, "--tp", 1)[1]
    exact = converted(source, tmp_path, "tensor-parallel", 2)
    arguments, said = asked(capsys, exact)
    assert arguments == ["vllm", "serve", str(exact), "--tensor-parallel-size", "2"]  # no code of its own
    assert "None of its all-reduces overlaps with computation: the recipe keeps" in said
    arguments, said = asked(capsys, source)
    assert arguments == ["vllm", "serve", str(source), "--tensor-parallel-size", "1"]
    assert "It is not rewritten: none" in said
    alone = converted(source, tmp_path, "ladder", 1)  # counted for the ranks that it is served on
    assert "7 of 8 all-reduces overlap with the next block" in asked(capsys, alone, "--tp", 2)[1]
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert "No all-reduce overlaps with computation: rewriter's plugin is not" in asked(capsys, ladder)[1]


def test_a_checkpoint_whose_sums_are_quantized_goes_to_the_plugin(
    source: Path, install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("vllm", "0.32.0", plugin=True)
    out = converted(source, tmp_path, "prefill-int8", 2)
    arguments, said = asked(capsys, out)
    named = ["--hf-overrides", '{"architectures": ["RewriterLlamaForCausalLM"]}']
    assert arguments == ["vllm", "serve", str(out), "--tensor-parallel-size", "2", *named]
    assert "\nSums of rewired tokens of 1,048,576 bytes or more travel as int8.\n" in said
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    arguments, said = asked(capsys, out)
    assert "--hf-overrides" not in arguments
    assert "Messages of ranks are not quantized (int8) there: vLLM sums exactly." in said


def test_a_bound_output_needs_the_plugin(
    bound: Path, install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("vllm", "0.32.0", plugin=True)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert "is bound to tp=2, which vLLM computes by rewriter's plugin alone" in refused(capsys, bound)
    monkeypatch.setenv("VLLM_PLUGINS", "one,rewriter")
    assert asked(capsys, bound)[0][-1] == "2"


@pytest.mark.parametrize(
    ("version", "part"),
    [("0.34.0", "warning: vLLM 0.34.0 was never tried"), (None, "warning: this vllm is of another Python")],
)
def test_an_engine_that_was_not_tried_is_a_warning(
    version: str | None, part: str, ladder: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("vllm", version)
    assert part in asked(capsys, ladder)[1]


def test_without_vllm_transformers_serves_it(
    source: Path, ladder: Path, bound: Path, install: Install, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install("transformers")
    monkeypatch.setitem(packages.EXTRAS, "serve", ("json",))
    assert asked(capsys, source)[0] == ["transformers", "serve", str(source)]
    arguments, said = asked(capsys, ladder, "--", "--port", "8001")
    assert arguments == [
        "python", "-m", "rewriter.runtime.serving.transformers_server", str(ladder), "--trust-remote-code",
        "--port", "8001",
    ]  # fmt: skip
    assert "in one process: nothing is communicated, so nothing overlaps" in said
    assert "computes all 2 ranks that it is bound to on one device" in asked(capsys, bound)[1]
    assert "--tp 2: the server of transformers is one process. Install vLLM" in refused(capsys, ladder, "--tp", 2)
    monkeypatch.setitem(packages.EXTRAS, "serve", ("json", "no_such_package", "nor_this"))
    assert "not installed: no_such_package, nor_this. Install what its server needs" in refused(capsys, ladder)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--engine", "vllm"], "--engine vllm: vLLM is not installed. Install it (pip install vllm)"),
        (["--engine", "sglang"], "'sglang' is not one of 'vllm', 'transformers'"),
        (["--", "-tp", "2"], "-- -tp: the number of ranks is an option of `rewrite serve`. Use --tp N"),
        (["--", "--tensor-parallel-size=2"], "-- --tensor-parallel-size=2: the number of ranks"),
        (["--tp", "0"], "Invalid value for '--tp'"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    words: list[str], part: str, ladder: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in refused(capsys, ladder, *words)


def test_a_number_of_ranks_that_the_model_cannot_have_is_refused(
    ladder: Path, bound: Path, source: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("vllm", "0.32.0", plugin=True)
    error = refused(capsys, bound, "--tp", 4)
    assert f"--tp 4: {bound} is bound to tp=2, and computes something else on any other number of ranks" in error
    for out in (ladder, source):
        error = refused(capsys, out, "--tp", 3)
        assert "--tp 3: 8 query heads on 2 key/value heads do not divide by 3. Nearest: 2, 4" in error


# Seeded faults


def test_an_output_that_is_not_whole_is_refused(
    ladder: Path, install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("vllm", "0.32.0", plugin=True)
    out = tmp_path / "out"
    shutil.copytree(ladder, out)
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(weights[:-1])
    assert "model.safetensors: not a valid safetensors file" in refused(capsys, out)
    tensors = load_file(ladder / "model.safetensors")
    save_file({f"_{name}": tensor for name, tensor in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    assert "model.safetensors: changed since `rewrite` wrote the weights" in refused(capsys, out)
    (out / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    asked(capsys, out)
    assert "model.safetensors: changed since it was written" in refused(capsys, out, "--check", code=3)
    (out / "model.safetensors").write_bytes(weights)
    (out / "generation_config.json").rename(tmp_path / "moved")
    assert f"generation_config.json: missing, but {MANIFEST} names it" in refused(capsys, out)
    (tmp_path / "moved").rename(out / "generation_config.json")
    code = next(out.glob("modeling_*.py"))
    text = code.read_text()
    code.write_text(f"{text}\nprint('hello')\n")
    assert f"{code.name}: changed since it was written" in refused(capsys, out, code=3)
    code.write_text(text)
    asked(capsys, out)
    (out / MANIFEST).write_text("{")
    assert f"{MANIFEST}: not valid JSON" in refused(capsys, out)
    (out / MANIFEST).unlink()
    (out / "config.json").write_text(json.dumps([]))
    assert "config.json: cannot be read as JSON" in refused(capsys, out)
    (out / "config.json").unlink()
    assert "neither rewrite.json nor config.json is in it" in refused(capsys, out)
    assert "no such directory" in refused(capsys, tmp_path / "nowhere")


def test_the_server_of_transformers_finds_the_class_of_an_output(ladder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loader, without the packages that answer requests."""
    import torch
    import transformers
    from transformers.cli.serving.model_manager import ModelManager

    from rewriter.runtime.serving.transformers_server import offer_class

    monkeypatch.setattr(ModelManager, "_load_processor", lambda *_, **__: None)

    def served() -> transformers.PreTrainedModel:
        manager = ModelManager(device="cpu", trust_remote_code=True, force_model=str(ladder))
        [loaded] = manager.loaded_models.values()
        return loaded.model

    with pytest.raises(AttributeError, match="has no attribute RewriterLlamaForCausalLM"):
        served()
    name = offer_class(ladder)
    try:
        expected = emitted.load(ladder, dtype="auto")
        with torch.no_grad():
            ids = zoo.batch()
            torch.testing.assert_close(served()(input_ids=ids).logits, expected(input_ids=ids).logits)
    finally:
        delattr(transformers, name)


def test_no_engine_and_no_torch_is_imported(ladder: Path) -> None:
    program = (
        "import sys; from rewriter.cli import main;"
        "from rewriter.common import packages; packages.EXTRAS['serve'] = ();"
        f"main(['serve', {str(ladder)!r}, '--engine', 'transformers', '--dry-run']);"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
