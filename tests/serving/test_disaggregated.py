"""Prompts by a server of a model that rewires them, answers by a server of the original: the weights are the same, and
keys and values are of the same shape."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request

import pytest

pytest.importorskip("vllm")

import tiny_models
import torch
from test_http import TEMPLATE, TINY, models
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewriter.api import convert
from rewriter.convert.save_options import SaveOptions

BLOCK, TAIL, TOKENS = 32, 3, 32
LENGTH = 2 * BLOCK + TAIL  # the connector hands on whole blocks, and what is left of the prompt is exact


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The original and one that rewires prompts, with a tokenizer."""
    root = tmp_path_factory.mktemp("disaggregated")
    source = tiny_models.write("llama", root / "source", vocab_size=len(AutoTokenizer.from_pretrained(TINY)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, source / name)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    ends = {"ladder.exact_tail": TAIL}
    convert(source, "prefill-ladder-upper-half", out=root / "out", set=ends, options=SaveOptions(verify="none"))
    return source, root / "out"


def started(directory, cache, log):
    """A server of `directory` that keeps keys and values of prompts in the folder `cache`, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(cache)},
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), "--port", str(port),
        "--enforce-eager", "--dtype", "float32", "--max-model-len", "128", "--block-size", str(BLOCK),
        "--kv-transfer-config", json.dumps(connector), "--no-enable-prefix-caching",
    ]  # fmt: skip
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | settings)
    return server, f"http://127.0.0.1:{port}"


def asked(address, server, log, prompt, tokens):
    """The tokens of an answer."""
    body = {
        "model": next(iter(models(address, server, log))), "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


@torch.no_grad()
def of_transformers(directory, prompt):
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    made = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return made[0, len(prompt) :].tolist()


def test_the_original_goes_on_from_what_a_rewired_prompt_left(directories, tmp_path):
    source, out = directories
    prompt = torch.randint(3, 100, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
    logs, servers, found = [tmp_path / "prompts.txt", tmp_path / "answers.txt"], [], []
    try:
        for directory, log, tokens in ((out, logs[0], 1), (source, logs[1], TOKENS)):
            server, address = started(directory, tmp_path / "cache", log)
            servers.append(server)
            found.append(asked(address, server, log, prompt, tokens))
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(60)
    wanted = of_transformers(out, prompt)
    assert found == [wanted[:1], wanted]
    assert wanted != of_transformers(source, prompt)
    assert "External Cache Hit" in logs[1].read_text()
