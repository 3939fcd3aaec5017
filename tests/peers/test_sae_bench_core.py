"""The core evaluation beside SAEBench's own functions, and our files under its tools. Runs in its environment."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from sae_bench.evals.core.main import get_sparsity_and_variance_metrics
from sae_bench.sae_bench_utils.graphing_utils import find_eval_results_files, get_core_results, get_eval_results
from sae_lens import SAE as SAELensSAE

import sampled_sae as ss
from sampled_sae.evals.core.evaluate import evaluate_core_many
from sampled_sae.evals.core.schema import CoreConfig, to_saebench
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.reporting.write import write_tables
from sampled_sae.utils.files import write_json

WIDTH, LAYER, LENGTH, CONTEXTS, BATCH = 32, 1, 24, 12, 4


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=60, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(shape)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return LanguageModel(model, None, "tiny")


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 60, (CONTEXTS, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(lm, tmp_path_factory):
    more = torch.randint(0, 60, (200, LENGTH), generator=torch.Generator().manual_seed(1))
    x = lm.activations(more, [LAYER])[LAYER].flatten(0, 1)
    sae = ss.train(x, ss.batchtopk(256, 12), steps=150, batch_size=512, device="cpu", progress=False)
    sae.cfg.metadata.update({"model_name": "tiny", "hook_name": f"blocks.{LAYER}.hook_resid_post", "layer": LAYER})
    return sae.save(tmp_path_factory.mktemp("run") / "saes" / "batchtopk-s0")


@pytest.fixture(scope="module")
def ours(lm, tokens, folder):
    settings = CoreConfig(legacy_batch=BATCH, norm_factor=float("inf"))
    return evaluate_core_many([ss.SAE.load(folder)], lm, LAYER, tokens, settings)[0]


def test_explained_variance_density_and_the_rest(lm, tokens, folder, ours):
    lens, batches = SAELensSAE.load_from_disk(str(folder)), iter(tokens.split(BATCH))
    for name, value in (("hook_name", "here"), ("hook_layer", LAYER), ("hook_head_index", None)):
        object.__setattr__(lens.cfg, name, value)
    model = SimpleNamespace(
        run_with_cache=lambda part, **_: (None, {"here": lm.activations(part, [LAYER])[LAYER].clone()})
    )
    store = SimpleNamespace(get_batch_tokens=lambda size: next(batches))
    theirs, each = get_sparsity_and_variance_metrics(
        lens, model, store, CONTEXTS // BATCH, True, True, True, True, BATCH, {}
    )
    assert ours.measured.explained_variance_legacy.value == pytest.approx(theirs["explained_variance_legacy"], abs=1e-4)
    assert ours.measured.l0.value == pytest.approx(theirs["l0"], abs=1e-4)
    assert ours.measured.cosine.value == pytest.approx(theirs["cossim"], abs=1e-4)
    assert ours.measured.relative_norm.value == pytest.approx(theirs["l2_ratio"], abs=1e-4)
    density = torch.tensor(each["feature_density"])
    assert ours.density.over_10_percent.value == pytest.approx(float((density > 0.1).float().mean()))
    assert ours.density.alive == pytest.approx(float((density > 0).float().mean()))
    assert torch.allclose(ours.fired / ours.measured.tokens, density, atol=1e-6)


def test_its_tools_read_our_files(folder, ours, tmp_path):
    path = Path(folder) / "evals" / "core.json"
    path.parent.mkdir()
    content = {"result": ours.to_dict(), "sae": None, "saebench": to_saebench(ours, ours.settings)}
    write_json(path, content)
    write_tables([Path(folder)], tmp_path)
    files = find_eval_results_files([str(tmp_path / "saebench")])
    [found] = get_eval_results(files).values()
    assert found["explained_variance_legacy"] == ours.measured.explained_variance_legacy.value
    assert found["sae_class"] == "jumprelu" and found["d_sae"] == "0k" and found["train_tokens"] == 150 * 512
    [core] = get_core_results(files).values()
    assert core == {"l0": ours.measured.l0.value, "ce_loss_score": ours.loss.ce_recovered.value}
