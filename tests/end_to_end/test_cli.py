"""The command `rewrite`: what it passes on, what it prints where, its exit codes, and that it answers at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_api import assert_refused, flat, installed
from subprocesses import run_code

import rewriter
from rewriter.cli import main
from rewriter.cli.convert import default_output
from rewriter.common.errors import RewriterError, VerificationError

REPORT = {
    "model": "tiny",
    "recipe": "ladder",
    "out": "tiny-ladder-tp2",
    "mesh": "tp2",
    "passes": [{"name": "ladder", "kind": "approximating", "summary": "rewired layers 2-3 [of 4]"}],
    "verification": {"oracle": {"largest_relative_error": 3.1e-7}, "ranks": 2, "passed": True},
    "communication": {
        "before": {"collectives": 8, "bytes per token": 12288, "exposed": 8},
        "after": {"collectives": 8, "bytes per token": 12288, "hidden": 7},
    },
    "files": ["config.json", "rewrite.json"],
}


class Api(ModuleType):
    """Stands in for `rewriter.api`: records how the CLI calls it, and answers or fails as a test says."""

    def __init__(self) -> None:
        super().__init__("rewriter.api")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.failure: BaseException | None = None

    def answer(self, name: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((name, *flat(args, kwargs)))
        if self.failure is not None:
            raise self.failure
        return result

    def convert(self, *args: Any, **kwargs: Any) -> Any:
        report = REPORT | ({"dry_run": True} if kwargs["options"].dry_run else {})
        return self.answer("convert", SimpleNamespace(to_json=lambda: json.dumps(report)), args, kwargs)

    def inspect(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer("inspect", SimpleNamespace(to_json=lambda: '{"layers": 4}'), args, kwargs)

    def verify(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer("verify", REPORT["verification"], args, kwargs)

    def export_onnx(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer("export_onnx", None, args, kwargs)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    return installed(Api(), monkeypatch)


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rewriter.cli", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


# What reaches the API

DEFAULTS = {
    "tp": 1,
    "sp": 1,
    "dtype": None,
    "verify": "shrunken",
    "dry_run": False,
    "resume": False,
    "link": False,
    "materialize": False,
    "drop_unused": False,
    "dequantize": False,
    "trust_remote_code": False,
    "set": {},
    "text": None,
}
INSPECT = {"set": {}, "recipe": None, "tp": 1, "sp": 1, "tokens": None, "trust_remote_code": False}


def test_a_first_word_that_is_no_command_is_the_model(api: Api) -> None:
    assert main(["org/model", "--recipe", "ladder"]) == 0
    assert api.calls == [("convert", ("org/model", "ladder"), {**DEFAULTS, "out": Path("model-ladder")})]


def test_options_may_stand_before_the_model(api: Api) -> None:
    assert main(["--recipe", "ladder", "org/model"]) == 0
    assert api.calls[0][1] == ("org/model", "ladder")


def test_a_directory_named_like_a_command_is_reached_by_its_path(api: Api) -> None:
    assert main(["./inspect", "--recipe", "ladder"]) == 0
    assert api.calls[0][:2] == ("convert", ("./inspect", "ladder"))


def test_what_a_pass_notes_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from rewriter.cli.rendering import print_report

    entry = {"name": "drop_sync", "kind": "approximating", "summary": "dropped", "notes": ["costs [nats]: 0: 0.1"]}
    print_report(json.dumps({**REPORT, "passes": [entry]}))
    assert "costs [nats]: 0: 0.1" in capsys.readouterr().out


def test_a_calibration_file_arrives_as_its_text(api: Api, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("naïve text", encoding="utf-8")
    assert main(["m", "--recipe", "drop-sync", "--calibration", str(tmp_path / "text.txt")]) == 0
    assert api.calls[0][2]["text"] == "naïve text"


@pytest.mark.parametrize(("content", "part"), [(None, "No such file"), (b"\xff\xfe", "not UTF-8"), (b" \n", "empty")])
def test_a_calibration_file_that_is_no_text_is_refused(
    api: Api, tmp_path: Path, content: bytes | None, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    assert main(["m", "--recipe", "drop-sync", "--calibration", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --calibration {file}: ")
    assert part in error
    assert not api.calls


def test_every_option_of_a_conversion_arrives(api: Api) -> None:
    words = (
        "m --recipe r.yaml --out o --tp 8 --sp 4 --set ladder.layers=last:20 --set a.b=[1,2] --dtype bf16 --verify full"
    )
    flags = "--dry-run --resume --materialize --dequantize --drop-unused --trust-remote-code --json"
    assert main([*words.split(), *flags.split()]) == 0
    [(_, args, options)] = api.calls
    assert args == ("m", "r.yaml")
    assert options == {
        "out": Path("o"),
        "tp": 8,
        "sp": 4,
        "set": {"ladder.layers": "last:20", "a.b": "[1,2]"},
        "text": None,
        "dtype": "bf16",
        "verify": "full",
        "dry_run": True,
        "resume": True,
        "link": False,
        "materialize": True,
        "dequantize": True,
        "drop_unused": True,
        "trust_remote_code": True,
    }
    assert main(["m", "--recipe", "r.yaml", "--link"]) == 0
    assert api.calls[1][2]["link"]


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("inspect m", ("inspect", ("m",), INSPECT)),
        (
            "inspect m --recipe ladder --tp 4 --trust-remote-code",
            ("inspect", ("m",), INSPECT | {"recipe": "ladder", "tp": 4, "trust_remote_code": True}),
        ),
        (
            "inspect m --recipe long-context --sp 16 --tokens 131072",
            ("inspect", ("m",), INSPECT | {"recipe": "long-context", "sp": 16, "tokens": 131072}),
        ),
        (
            "inspect m --recipe fit-tp --tp 3 --tp-also 6 --set fit_ranks.waste=0.5",
            (
                "inspect",
                ("m",),
                INSPECT | {"recipe": "fit-tp", "tp": 3, "set": {"fit_ranks.waste": "0.5", "fit_ranks.also": "[6]"}},
            ),
        ),
        ("verify d", ("verify", (Path("d"),), {"trust_remote_code": False, "images": False})),
        ("export d --onnx f.onnx", ("export_onnx", (Path("d"), Path("f.onnx")), {"trust_remote_code": False})),
    ],
)
def test_the_other_commands_arrive(api: Api, words: str, call: tuple[Any, ...]) -> None:
    assert main([*words.split(), "--json"]) == 0
    assert api.calls == [call]


def test_without_out_the_result_is_named_after_what_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path / "llama")
    assert default_output("org/model", "ladder", 1) == Path("model-ladder")
    assert default_output("../llama/", "my/own.yaml", 8) == Path("llama-own-tp8")
    assert default_output(".", "ladder", 2) == Path("llama-ladder-tp2")
    assert default_output("org/model", "ring-attention", 2, sp=4) == Path("model-ring-attention-sp4-tp2")


# What is printed where


def test_a_report_shows_passes_verification_and_communication(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--recipe", "ladder", "--tp", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    for row in (
        ["ladder", "approximating", "rewired layers 2-3 [of 4]"],
        ["oracle.largest relative error", "3.1e-07"],
        ["passed", "yes"],
        ["communication", "before", "after"],
        ["bytes per token", "12,288", "12,288"],
        ["exposed", "8", "–"],
        ["hidden", "–", "7"],
        ["wrote tiny-ladder-tp2, 2 files"],
    ):
        assert row in rows


def test_a_dry_run_does_not_claim_to_have_written(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--recipe", "ladder", "--dry-run"]) == 0
    assert "would write tiny-ladder-tp2" in capsys.readouterr().out


def test_json_is_all_that_is_on_stdout(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--recipe", "ladder", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == REPORT
    assert err == ""
    for words, printed in (
        ("inspect tiny", {"layers": 4}),
        ("verify out", REPORT["verification"]),
        ("export out --onnx x.onnx", {"file": "x.onnx"}),
    ):
        assert main([*words.split(), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == printed


def test_recipes_lists_every_recipe_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    from rewriter.recipes.catalogue import entries

    assert main(["recipes"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert all(f"{entry.name} {entry.short}" in words for entry in entries())


def test_a_shown_recipe_is_a_file_to_edit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "ladder-upper-half"]) == 0
    text = capsys.readouterr().out
    assert text == (Path(rewriter.__file__).parent / "recipes/library/ladder-upper-half.yaml").read_text()
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    assert main(["recipes", "validate", str(mine)]) == 0
    assert (
        "valid recipe: tensor_parallel → merge_reductions → ladder → fuse_projections → overlap"
        in capsys.readouterr().out
    )


def test_a_faulty_recipe_file_is_refused_with_all_its_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nsumary: x\npaper: y\npasses:\n  - pass: lader\n  - pass: ladder\n    layer: all\n")
    assert main(["recipes", "validate", str(mine)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "has 4 faults" in err
    for part in ("line 2: unknown key sumary", "line 5: unknown pass 'lader'", "line 7: ladder.layer: unknown option"):
        assert part in err


# Failures


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (RewriterError("--tp 6: 32 query heads do not divide by 6."), 2, "error: --tp 6: 32 query heads do not"),
        (VerificationError("logits differ by 0.3"), 3, "error: logits differ by 0.3"),
        (OSError(28, "No space left on device", "out/x"), 1, "error: out/x: No space left on device. REWRITER_DEBUG=1"),
        (KeyError("layers"), 1, "error: KeyError: 'layers'. This is a fault of rewriter. REWRITER_DEBUG=1"),
    ],
)
def test_a_failure_is_one_message_and_an_exit_code(
    api: Api, capsys: pytest.CaptureFixture[str], failure: Exception, code: int, message: str
) -> None:
    api.failure = failure
    assert main(["tiny", "--recipe", "ladder", "--json"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(
    api: Api, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWRITER_DEBUG", "1")
    api.failure = KeyError("layers")
    assert main(["tiny", "--recipe", "ladder"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "line" in err


def test_an_interrupt_exits_with_130(api: Api) -> None:
    api.failure = KeyboardInterrupt()
    assert main(["tiny", "--recipe", "ladder"]) == 130


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("inspct m", ["inspct: neither a command nor a model directory", "`rewrite inspect`"]),
        ("recipe", ["`rewrite recipes`"]),
        ("tiny", ["Missing option '--recipe'", "`rewrite MODEL --help`"]),
        ("tiny --recipe ladder --tp 0", ["--tp", "expected a number of ranks"]),
        ("tiny --recipe ladder --verify some", ["--verify", "shrunken"]),
        ("tiny --recipe ladder --dtype int3", ["--dtype", "bf16"]),
        ("tiny --recipe ladder --st a.b=1", ["--st"]),
        ("tiny --recipe ladder --set layers=all", ["--set layers=all", "PASS.OPTION=VALUE"]),
        ("tiny --recipe ladder --set a.b=1 --set a.b=2", ["a.b is set twice"]),
        ("tiny other --recipe ladder", ["other"]),
        ("recipes show lader", ["recipe 'lader'", "Did you mean 'ladder'?"]),
        ("recipes lst", ["lst"]),
        ("recipes --verbose show ladder", ["--verbose comes after show"]),
        ("serve d --json", ["--json", "Add --dry-run"]),
        ("recipes validate absent.yaml", ["absent.yaml: no such file"]),
    ],
)
def test_a_wrong_command_line_is_one_message(
    api: Api, capsys: pytest.CaptureFixture[str], words: str, parts: list[str]
) -> None:
    assert_refused(api, capsys, words, parts)


# The program itself


def test_help_explains_the_model_and_the_commands() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "rewrite MODEL --recipe NAME" in done.stdout
    for name in ("convert", "inspect", "recipes", "fabrics", "verify", "generate", "export"):
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE)
    assert command().stdout == done.stdout


def test_help_of_a_conversion_names_every_option() -> None:
    text = command("some-model", "--help").stdout
    flags = {
        "--recipe",
        "--out",
        "--tp",
        "--sp",
        "--set",
        "--dtype",
        "--verify",
        "--dry-run",
        "--resume",
        "--link",
        "--json",
    }
    assert flags | {"--trust-remote-code"} <= set(text.split())


@pytest.mark.parametrize(("words", "limit"), [(["--help"], 400), (["recipes"], 600)])
def test_it_answers_at_once(words: list[str], limit: int) -> None:
    """By the number of modules that it imports: how long that takes depends on what else the machine does."""
    code = (
        "import atexit, sys; atexit.register(lambda: sys.stderr.write(str(len(sys.modules))));"
        f"from rewriter.cli import main; sys.exit(main({words}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 100 < int(done.stderr) < limit


NO_TORCH = {  # and what of the heavy packages it needs
    "['--help']": [],
    "['recipes']": [],
    "['recipes', 'show', 'ladder']": [],
    "['m', '--help']": [],
    "['fabrics', 'show', 'pcie-gen5']": ["numpy"],  # held-out errors of its measured kernels
}


@pytest.mark.parametrize("words", NO_TORCH)
def test_what_needs_no_torch_imports_none(words: str) -> None:
    program = (
        f"import sys; from rewriter.cli import main; main({words});"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    assert run_code(program).stderr.strip() == str(NO_TORCH[words])


def test_the_exit_code_reaches_the_shell() -> None:
    done = command("inspct")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: inspct")


def test_a_reader_that_leaves_is_no_fault() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m rewriter.cli recipes | true"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


# The public API


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys; import rewriter as rw; dir(rw); print(sorted({'torch', 'pydantic'} & set(sys.modules)))"
    assert run_code(program).stdout.strip() == "[]"


def test_bars_of_transformers_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        monkeypatch.delenv(name)
    program = (
        "from rewriter.cli.app import main; main(['recipes']); from transformers.utils import logging; "
        "list(logging.tqdm([1], desc='bar'))"
    )
    assert not run_code(program).stderr


@pytest.mark.slow
def test_the_public_functions_are_functions() -> None:
    # `rewriter.tracing` is also a room of the package, and importing it must not hide the function.
    program = "import rewriter.tracing, rewriter as rw; print(rw.trace, rw.rewrite, rw.simulate, rw.load)"
    done = run_code(program)
    assert re.fullmatch(r"(<function \w+ at 0x\w+>\s){4}", done.stdout)


def test_a_name_that_the_package_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tracce'"):
        _ = rewriter.tracce
