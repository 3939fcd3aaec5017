"""The table of docs/sizing.md: as the script prints it, and as `--dry-run` estimates."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import transformers

from sampled_sae import cli
from sampled_sae.training import estimate as estimates
from sampled_sae.utils.cost import SPEEDS

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("sizing", ROOT / "benchmarks" / "sizing.py")
assert spec is not None and spec.loader is not None
sizing = importlib.util.module_from_spec(spec)
sys.modules["sizing"] = sizing
spec.loader.exec_module(sizing)

CONFIGS = {
    "SmolLM2-135M": transformers.LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49_152,
        tie_word_embeddings=True,
    ),
    "Pythia-160M": transformers.GPTNeoXConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, vocab_size=50_304
    ),
    "Gemma-2-2B": transformers.Gemma2Config(
        hidden_size=2304,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
        vocab_size=256_000,
    ),
}


def test_the_page_has_the_scripts_table():
    assert sizing.table() in (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_dry_run_agrees_with_the_table(name, tmp_path, monkeypatch, capsys):
    """On a machine without that GPU: its rates and its path take the place of the CPU's."""
    model = next(model for model in sizing.MODELS if model.name == name)
    CONFIGS[name].architectures = None
    CONFIGS[name].save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("some text")
    monkeypatch.setattr(estimates, "product_speed", lambda device: sizing.RATE)
    monkeypatch.setattr(estimates.kernels, "usable", lambda *_: True)
    monkeypatch.setitem(SPEEDS, "cpu", SPEEDS["cuda"])
    d_sae, need = model.d_sae[-1], sizing.of(model, model.d_sae[-1])
    words = ["train", "--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--layer", model.layer]
    words += ["--tokens", sizing.TOKENS, "--d-sae", d_sae, "--k", 64, "--model-dtype", "bfloat16"]
    cli.main([str(word) for word in [*words, "--device", "cpu", "--out", tmp_path / "run", "--dry-run"]])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())

    def gib(text: str) -> float:
        number, unit = re.match(r"(?:about )?([\d.]+) (\w+)", text).groups()
        return float(number) * {"MiB": 2**-10, "GiB": 1}[unit]

    assert gib(lines["memory"]) == pytest.approx(need.memory / 2**30, rel=0.02)
    assert gib(lines["disk"]) == pytest.approx(need.disk / 2**30, rel=0.01)
    times = re.findall(r"(\d+):(\d+) for the", lines["time"])  # SAEs, language model
    seconds = [60 * int(minutes) + int(rest) for minutes, rest in times]
    assert seconds == pytest.approx([need.training, need.reading], rel=0.01, abs=1)
