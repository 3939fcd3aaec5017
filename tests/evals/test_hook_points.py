"""Evaluations at other points than the residual stream after a block: read and patched where the SAE was trained."""

import json
from dataclasses import replace

import pytest
import torch

import sampled_sae as ss
from sampled_sae.browser.collect import BrowseConfig, collect
from sampled_sae.config import plain
from sampled_sae.evals.absorption.evaluate import evaluate_absorption_many
from sampled_sae.evals.autointerp.evaluate import evaluate_autointerp
from sampled_sae.evals.autointerp.schema import AutointerpConfig
from sampled_sae.evals.core.evaluate import evaluate_core_many
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.evals.probing.evaluate import evaluate_probing_many
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.evals.reading import Streams, collect_firings
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.evals.absorption.tools import QUICK, letter_sae, speller
from tests.evals.autointerp.tools import LATENTS, need_minilm, word_contexts, word_model, word_sae
from tests.evals.core.tools import as_json, assert_near, identity_sae, random_sae, shared, some_contexts
from tests.models.tiny_models import LAYERS, WIDTH, make_model, make_tokenizer

MLP, ATTENTION, BEFORE = "model.layers.1.mlp", "model.layers.1.self_attn", "model.layers.2.input"


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel(make_model("llama"), make_tokenizer(), "tiny")


def without_layer(result) -> dict:
    return {name: value for name, value in plain(result).items() if name != "layer"}


@pytest.mark.parametrize("hook", [MLP, ATTENTION, BEFORE])
@torch.no_grad()
def test_the_loss_with_the_reconstruction_in_place(hook):
    """The core evaluation against a model that runs with the SAE attached."""
    model, contexts, sae = shared(), some_contexts(), random_sae()
    found, exact = evaluate_core_many([sae, identity_sae()], model, hook, contexts, CoreConfig(put_in="everywhere"))
    with sae.attached(model, hook, keep_error=False):
        logits = model.logits(contexts)[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), contexts[:, 1:].flatten())
    assert found.loss.ce_sae.value == pytest.approx(float(loss))
    assert found.layer == hook and found.loss.ce_model.value != pytest.approx(found.loss.ce_sae.value, rel=1e-3)
    x = model.activations(contexts, [hook])[hook]
    fvu = (x - sae(x)).square().sum() / (x - x.flatten(0, 1).mean(0)).square().sum()
    assert found.measured.fvu.value == pytest.approx(float(fvu))
    assert exact.measured.fvu.value == pytest.approx(0, abs=1e-9)
    assert exact.loss.ce_sae.value == pytest.approx(exact.loss.ce_model.value)


def test_before_a_block_is_after_the_one_before(tmp_path):
    model, contexts = shared(), some_contexts()
    before, after = (as_json(evaluate_core_many([random_sae()], model, at, contexts)[0]) for at in (BEFORE, 1))
    assert before.pop("layer") == BEFORE and after.pop("layer") == 1
    assert_near(before, after)


@torch.no_grad()
def test_probes_read_the_hook_point(lm, tmp_path):
    words = {"cold": "snow ice frost", "hot": "sun fire sand"}
    rows = [
        {"text": f"{word} {n}", "label": label, "split": "test" if n % 4 == 0 else "train"}
        for label, text in words.items()
        for n in range(24)
        for word in [text.split()[n % 3]]
    ]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = {"tokens": 20, "train_texts": 24, "test_texts": 8, "fewest_texts": 8}
    settings = ProbingConfig((str(tmp_path / "texts.jsonl"),), k=(1,), **sizes)
    sae = random_sae().float()
    found = {at: evaluate_probing_many([sae], lm, at, settings)[0] for at in (BEFORE, 1, MLP)}
    assert without_layer(found[BEFORE]) == without_layer(found[1]) != without_layer(found[MLP])
    assert found[MLP].layer == MLP


def test_absorption_reads_the_hook_point():
    quick = replace(QUICK, probe_epochs=3, min_letters=1)
    before, after = (
        next(evaluate_absorption_many([letter_sae()], speller(), at, quick)) for at in ("model.layers.1.input", 0)
    )
    assert before.layer == "model.layers.1.input" and without_layer(before) == without_layer(after)


def test_autointerp_reads_the_hook_point():
    """What the final norm reads is the residual stream after the last block."""
    need_minilm()
    settings = AutointerpConfig(embedder="minilm", buffer=5, resamples=10, latents=(0, 1))
    found, same, other = (
        evaluate_autointerp(word_sae(), word_model(), at, word_contexts(), settings)
        for at in ("model.norm.input", 0, "model.layers.0.mlp")
    )
    assert found.layer == "model.norm.input" and without_layer(found) == without_layer(same) != without_layer(other)
    assert found.latents[0].explanation.startswith(f"'{LATENTS[0]}'") and other.latents[0].explanation is None


@pytest.mark.parametrize("hook", [MLP, ATTENTION, BEFORE, "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.input"])
@torch.no_grad()
def test_firings_and_the_browser(lm, hook):
    """What autointerp and the browser read."""
    contexts, width = some_contexts(), lm.width_at(hook)
    sae = SAE(InferenceConfig(width, 12, metadata={"hook_name": hook}))
    torch.nn.init.normal_(sae.W_enc, generator=torch.Generator().manual_seed(0))
    sae.W_dec.copy_(sae.W_enc.T)
    sae.threshold.fill_(1.0)
    x = lm.activations(contexts, [hook])[hook]
    [firings] = collect_firings([sae], Streams(lm, hook, contexts, torch.ones_like(contexts).bool()))
    codes = sae.encode(x)
    assert torch.equal(firings.fired, (codes > 0).flatten(0, 1).sum(0))
    browsed = collect(sae, lm, hook, contexts, BrowseConfig())
    assert torch.equal(browsed.firings.fired, firings.fired)
    added = hook in (MLP, ATTENTION, BEFORE)
    assert (browsed.output is not None) == added
    assert added or browsed.notes == [
        f"Promoted and suppressed tokens are missing: {hook} is not the residual stream, nor added to it."
    ]


def test_from_training_to_the_report(lm, tmp_path):
    """SAEs of several hook points, measured together, each at its own."""
    lines = [json.dumps({"text": f"{n} " + " ".join(f"the{n * i % 97}" for i in range(30))}) for n in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    text = str(tmp_path / "text.jsonl")
    source = ss.activations(lm, text, layer=0, hook=[MLP, BEFORE], context=20, buffer_tokens=800, progress=False)
    small = {"steps": 3, "batch_size": 50, "heldout_tokens": 100, "progress": False}
    saes = ss.train(source, ss.batchtopk(24, 3), out=tmp_path / "run", **small)
    assert list(saes) == ["layer-0", MLP, BEFORE]
    results = ss.evaluate([tmp_path / "run"], lm, [CoreConfig(contexts=4)], text=text)
    assert {one["core"]["layer"] for one in results} == {0, MLP, BEFORE}
    written = ss.report(tmp_path / "run", out=tmp_path / "report", figures=False)
    assert sorted(sweep.title for sweep in written.sweeps) == sorted(
        ["tiny, layer 0", f"tiny, {MLP}", f"tiny, {BEFORE}"]
    )
    made = ss.browse(saes[MLP], lm, text, tmp_path / "browse", tokens=100, context=20)
    assert f"tiny, {MLP}" in made.page.read_text()


def test_errors_are_one_line(lm, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the sea " * 200)

    def line(metadata: dict, width: int = WIDTH, **settings) -> str:
        sae = SAE(InferenceConfig(width, 4, metadata={"model_name": "tiny", "context_size": 10} | metadata))
        with pytest.raises(UserError) as error:
            ss.evaluate(sae, lm, [CoreConfig(contexts=2)], text=str(text), **settings)
        return str(error.value)

    missing = line({"hook_name": "model.layers.1.mlq"})
    assert missing.startswith(
        "hook = 'model.layers.1.mlq': tiny has no such module; the nearest are model.layers.1.mlp"
    )
    assert line({"hook_point": MLP}, 8) == f"sae has width 8: must be {WIDTH}, the width of tiny at {MLP}"
    assert line({"layer": 1}, 8) == f"sae has width 8: must be {WIDTH}, the width of tiny"
    assert f"{LAYERS} layers" in line({"layer": 7})
    assert line({"layer": 1}, hook=MLP).startswith(f"layer = {MLP}: ") and "does not name its layer" in line({})
