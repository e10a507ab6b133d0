"""`rewrite generate`: what it asks of the API, what it prints while text comes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_api import assert_refused, flat, installed

from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.runtime.generation.text_stream import Generation

SAID = [{"role": "user", "content": "hi"}]
GENERATE = {
    "tp": None, "max_new_tokens": 64, "temperature": 0.0, "top_p": None, "top_k": None, "seed": 0, "stop": [],
    "compile": None, "check": False, "trust_remote_code": False,
}  # fmt: skip


class Api(ModuleType):
    """Stands in for `rewriter.api`: records how the CLI calls it, and gives every prompt the same text, in pieces."""

    def __init__(self) -> None:
        super().__init__("rewriter.api")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def generate(self, *args: Any, on_text: Any, **kwargs: Any) -> Any:
        for index, _ in enumerate(args[1]):
            for piece in (" upon", " a ", ""):
                on_text(index, piece, None)
            on_text(index, "time", Generation(" upon a time", [5, 7, 9], 0.25, 0.125, 60.5))
        self.calls.append(("generate", *flat(args, kwargs)))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    return installed(Api(), monkeypatch)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("generate d --prompt hi", ("generate", (Path("d"), ["hi"]), GENERATE)),
        ("generate d --message hi", ("generate", (Path("d"), [SAID]), GENERATE)),
        ("generate d --prompt hi --chat", ("generate", (Path("d"), [SAID]), GENERATE)),
        ("generate d --prompt hi --no-compile", ("generate", (Path("d"), ["hi"]), GENERATE | {"compile": False})),
        (
            "generate d --prompt hi --max-new-tokens 3 --temperature .5 --top-p .9 --top-k 40 --seed 7 "
            "--stop x --stop yy --tp 4 --compile --check --trust-remote-code --json",
            (
                "generate",
                (Path("d"), ["hi"]),
                {
                    "tp": 4,
                    "max_new_tokens": 3,
                    "temperature": 0.5,
                    "top_p": 0.9,
                    "top_k": 40,
                    "seed": 7,
                    "stop": ["x", "yy"],
                    "compile": True,
                    "check": True,
                    "trust_remote_code": True,
                },
            ),
        ),
    ],
)
def test_what_is_asked_reaches_the_api(api: Api, words: str, call: tuple[Any, ...]) -> None:
    assert main(words.split()) == 0
    assert api.calls == [call]


def test_generate_prints_the_text(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "d", "--prompt", "Once"]) == 0
    assert capsys.readouterr().out == "Once upon a time\n"
    assert main(["generate", "d", "--message", "Once"]) == 0
    assert capsys.readouterr().out == " upon a time\n"


def test_generate_takes_prompts_from_a_file(api: Api, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("Once\n\nThere, too, é\n", encoding="utf-8")
    objects.write_text('{"text": "Two\\nlines"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert main(["generate", "d", "--prompts", str(lines)]) == 0
    assert capsys.readouterr().out == "Once upon a time\n\nThere, too, é upon a time\n"
    assert main(["generate", "d", "--prompts", str(lines), "--chat"]) == 0
    assert capsys.readouterr().out == "> Once\n upon a time\n\n> There, too, é\n upon a time\n"
    assert main(["generate", "d", "--prompts", str(objects), "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == 2 * [
        {
            "text": " upon a time",
            "tokens": [5, 7, 9],
            "seconds_to_first_token": 0.25,
            "seconds_per_token": 0.125,
            "seconds_compiling": 60.5,
        }
    ]
    said = [{"role": "user", "content": text} for text in ("Once", "There, too, é")]
    assert [call[1][1] for call in api.calls] == [
        ["Once", "There, too, é"], [[said[0]], [said[1]]], ["Two\nlines", SAID],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"\n \n", "it is empty"),
        ("p.txt", b"\xff", "not UTF-8 text"),
        ("p.txt", None, "No such file"),
        ("p.jsonl", b"", "it is empty"),
        ("p.jsonl", b"text", "p.jsonl:1: not JSON"),
        (
            "p.jsonl",
            b'{"text": "a", "messages": []}',
            "p.jsonl:1: neither a text nor messages that end with the user's",
        ),
        ("p.jsonl", b'{"messages": [{"role": "assistant", "content": "a"}]}', "p.jsonl:1: neither a text"),
    ],
)
def test_a_faulty_file_of_prompts_is_refused(
    api: Api, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["generate", "d", "--prompts", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert api.calls == []


def test_a_line_that_was_begun_is_ended_before_a_failure(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any, on_text: Any, **__: Any) -> None:
        on_text(0, " upon", None)
        raise RewriterError("rank 1 was killed by SIGKILL")

    api.generate = fail  # type: ignore[method-assign]
    assert main(["generate", "d", "--prompt", "Once"]) == 2
    assert capsys.readouterr() == ("Once upon\n", "error: rank 1 was killed by SIGKILL\n")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("generate d", ["generate: no prompts", "--prompt TEXT, --message TEXT and --prompts FILE"]),
        ("generate d --prompt a --message b", ["generate: 2 prompts"]),
        ("generate d --prompt a --top-p 0.9", ["--top-p 0.9: without --temperature nothing is sampled"]),
        ("generate d --prompt a --top-k 3 --temperature 0", ["--top-k 3: without --temperature"]),
        ("generate d --prompt a --temperature -1", ["--temperature", "greater than or equal to 0"]),
        ("generate d --prompt a --top-p 2 --temperature 1", ["--top-p", "less than or equal to 1"]),
        ("generate d --prompt a --stop=", ["--stop: it is empty"]),
    ],
)
def test_a_wrong_command_line_is_one_message(
    api: Api, capsys: pytest.CaptureFixture[str], words: str, parts: list[str]
) -> None:
    assert_refused(api, capsys, words, parts)
