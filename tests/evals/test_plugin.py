"""Evaluations and scores from another package, and from a user's file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sampled_sae import cli
from sampled_sae.evals import EVALUATIONS, get_evaluation, registry
from sampled_sae.evals.session import evaluate_saes, requests
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.models.tiny_models import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin"

SCRIPT = """
import sys
from pathlib import Path

from sampled_sae import cli
from sampled_sae.evals import registry
from sampled_sae.method.scores import get_score

assert list(registry())[:4] == ["core", "probing", "absorption", "autointerp"], list(registry())
assert registry()["redundancy"].title == "Decoder redundancy"
assert "nearest_cosine" in {metric.name for metric in registry()["redundancy"].metrics}
assert get_score("range").name == "range"
run, model, out = sys.argv[1:]
cli.main(["eval", run, "--evals", "redundancy", "--model", model, "--device", "cpu", "--redundancy.rows-at-once", "5"])
cli.main(["report", run, "--out", out, "--no-figures"])
assert "Cosine with the nearest latent" in Path(out, "index.html").read_text()
cli.main(["eval", "--help-redundancy"])
"""


def saved_sae(folder: Path, width: int) -> Path:
    sae = SAE(InferenceConfig(width, 12, metadata={"model_name": "tiny", "layer": 0}))
    with torch.no_grad():
        sae.W_dec.copy_(torch.randn(12, width, generator=torch.Generator().manual_seed(0)))
    return sae.save(folder)


def test_an_installed_package_is_found_by_commands_registry_and_report(tmp_path):
    """Installed without network into a folder of its own, so that other tests do not find it."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    source = tmp_path / "source"
    source.mkdir()
    for path in EXAMPLE.rglob("*"):
        if path.suffix in (".py", ".toml"):
            (source / path.relative_to(EXAMPLE)).parent.mkdir(exist_ok=True)
            (source / path.relative_to(EXAMPLE)).write_text(path.read_text())
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(source)], check=True)
    lm = make_model("llama")
    lm.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    saved_sae(tmp_path / "run" / "sae", lm.config.hidden_size)
    words = [tmp_path / "run", tmp_path / "model", tmp_path / "report"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "site")])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, words)], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "Decoder redundancy" in done.stdout and "--redundancy.rows-at-once" in done.stdout
    result = json.loads((tmp_path / "run" / "sae" / "evals" / "redundancy.json").read_text())
    assert 0 < result["result"]["nearest_cosine"] < 1 and result["asked"]["model"] == str(tmp_path / "model")


USERS = """
from dataclasses import dataclass
from typing import NamedTuple

from sampled_sae.config import Config
from sampled_sae.evals import Evaluation, register_evaluation
from sampled_sae.utils.measures import Metric


@dataclass(frozen=True, slots=True)
class NormsConfig(Config):
    factor: float = 1.0


class Norms(NamedTuple):
    decoder: float


@register_evaluation
class MeasureNorms(Evaluation):
    name, title, config = "norms", "Norms", NormsConfig
    metrics = (Metric("decoder_norm", "Decoder norm", "Norm of the decoder.", None, ("decoder",)),)

    def run(self, job, config):
        yield from [Norms(config.factor * float(sae.W_dec.detach().norm())) for sae in job.saes]
"""


@pytest.fixture
def users_file(tmp_path):
    (tmp_path / "norms.py").write_text(USERS)
    yield tmp_path / "norms.py"
    EVALUATIONS.pop("norms", None)


def test_a_users_file(users_file, tmp_path):
    lm = LanguageModel(make_model("llama"), make_tokenizer(), "tiny")
    folder = saved_sae(tmp_path / "sae", lm.width)
    sae = SAE.load(folder)
    [found] = evaluate_saes([folder], lm, [str(users_file)])
    assert found["norms"] == {"decoder": pytest.approx(float(sae.W_dec.detach().norm()))}
    assert [metric.name for metric in registry()["norms"].metrics] == ["decoder_norm"]
    config = get_evaluation("norms").config(factor=2.0)
    assert [(request.evaluation.name, request.config) for request in requests([config])] == [("norms", config)]
    before = (folder / "evals" / "norms.json").stat().st_mtime_ns
    [again], [twice] = evaluate_saes([sae], lm, ["norms"]), evaluate_saes([folder], lm, [config])
    assert again == found and twice["norms"]["decoder"] == pytest.approx(2 * found["norms"]["decoder"])
    assert (folder / "evals" / "norms.json").stat().st_mtime_ns != before
    with torch.no_grad():
        sae.W_dec.mul_(3)  # no longer the SAE of the folder: measured, and not written there
    written = (folder / "evals" / "norms.json").read_text()
    assert evaluate_saes([sae], lm, ["norms"])[0]["norms"]["decoder"] == pytest.approx(3 * found["norms"]["decoder"])
    assert (folder / "evals" / "norms.json").read_text() == written


def test_files_that_hold_no_evaluation(tmp_path):
    (tmp_path / "empty.py").write_text("")
    for name, line in (("empty.py", "registers 0 evaluations"), ("absent.py", "no such Python file")):
        with pytest.raises(UserError, match=line):
            get_evaluation(str(tmp_path / name))
    with pytest.raises(SystemExit):
        cli.main(["eval", str(tmp_path), "--evals", "nothing"])
