"""Absorption by SAEBench's own functions and ours, on the same activations and SAE. Runs in that peer's environment."""

import random
import statistics
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import TypeAdapter
from sae_bench.evals.absorption import feature_absorption as theirs
from sae_bench.evals.absorption import k_sparse_probing, probing
from sae_bench.evals.absorption.eval_output import AbsorptionEvalOutput
from sae_bench.evals.absorption.feature_absorption_calculator import FeatureAbsorptionCalculator
from sae_bench.evals.absorption.main import _aggregate_results_df
from sae_bench.evals.absorption.prompting import first_letter_formatter
from sae_lens import SAE as SAELensSAE
from sklearn.linear_model import LogisticRegression

import sampled_sae as ss
from sampled_sae.evals.absorption.evaluate import (
    absorption,
    encode_words,
    measure_sae,
    over_letters,
    without_silent_words,
)
from sampled_sae.evals.absorption.probes import fit_exactly, learn_to_spell
from sampled_sae.evals.absorption.schema import AbsorptionConfig, AbsorptionResult, to_saebench
from sampled_sae.evals.absorption.words import LETTERS, LayerReadings, Readings, Word, prompt_text

WIDTH, GROUPS, EACH = 96, 10, 8
SETTINGS = AbsorptionConfig()


def make_words() -> list[str]:
    """A letter, a group and a number in letters: every letter has GROUPS groups of EACH words."""
    return [f"{a}{LETTERS[g]}{LETTERS[i]}" for a in LETTERS for g in range(GROUPS) for i in range(EACH)]


def make_activations(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A direction for each letter, one for each group of words within it, one for each word, and noise.

    Groups come with their letter always, and so have latents that may absorb it.
    """
    n = 26 * GROUPS * EACH
    number = torch.arange(n)

    def directions(count: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(count, WIDTH, generator=generator), dim=1)

    letters, groups, own = directions(26), directions(26 * GROUPS), directions(n)
    x = 6 * letters[number // (GROUPS * EACH)] + 4 * groups[number // EACH] + 2 * own
    return x + 0.3 * torch.randn(n, WIDTH, generator=generator), number // (GROUPS * EACH)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Readings, an SAE that was trained on such activations, and the same SAE as SAELens loads it."""
    generator = torch.Generator().manual_seed(0)
    x, letters = make_activations(generator)
    words = make_words()
    # Words of a text are not equally common, and those that are common get latents of their own.
    common = torch.multinomial(1 / torch.arange(1.0, len(x) + 1), 40_000, replacement=True, generator=generator)
    order = torch.randperm(len(x), generator=generator)
    stream = x[order[common]] + 0.3 * torch.randn(len(common), WIDTH, generator=generator)
    out = tmp_path_factory.mktemp("absorption")
    options = {"steps": 600, "batch_size": 512, "device": "cpu", "progress": False}
    [sae] = ss.train(stream, [ss.batchtopk(512, 3)], out=out / "run", **options)
    order = torch.randperm(len(x), generator=generator)
    cut = int(0.8 * len(x))
    parts = [Readings(x[rows], letters[rows], [words[row] for row in rows]) for rows in (order[:cut], order[cut:])]
    readings = LayerReadings(parts[0], parts[1], parts[1], torch.arange(len(parts[1].x)))
    sae.cfg.metadata.update({"model_name": "made-up", "hook_name": "blocks.0.hook_resid_post"})
    return readings, sae, SAELensSAE.load_from_disk(str(sae.save(out / "saved")))


class FromZero(probing.LinearProbe):
    """SAEBench's probe, but for where it starts."""

    def __init__(self, *sizes: int, **options: int):
        super().__init__(*sizes, **options)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)


def by_saebench(readings: LayerReadings, sae: SAELensSAE, folder) -> SimpleNamespace:
    """Everything after the model's passes, by SAEBench's functions with its defaults."""
    train, test = readings.train, readings.test
    torch.manual_seed(SETTINGS.seed)
    frames = [pd.DataFrame({"answer_class": part.letters.numpy()}) for part in (train, test)]
    probe, _ = probing.train_linear_probe_for_task(
        *frames,
        torch.device("cpu"),
        train.x.numpy(),
        test.x.numpy(),
        batch_size=64,
        num_epochs=50,
        lr=1e-2,
    )
    labels = [list(zip(part.words, part.letters.tolist(), strict=True)) for part in (train, test)]
    ks = range(1, 11)
    # All words are one batch, so the start is all that is random in the L1 probe.
    torch.manual_seed(SETTINGS.seed)
    sparse = k_sparse_probing.train_k_sparse_probes(sae, labels[0], train.x, ks=ks, precalc_sae_acts=True)
    raw = k_sparse_probing.eval_probe_and_sae_k_sparse_raw_scores(sae, probe, sparse, labels[1], test.x)
    metadata = k_sparse_probing.sae_k_sparse_metadata(sae, probe, sparse, "sae", 0)
    metrics = k_sparse_probing.build_metrics_df(raw, metadata, max_k_value=10)
    k_sparse_probing.add_feature_splits_to_metrics_df(metrics, max_k_value=10)
    raw.to_parquet(folder / k_sparse_probing.get_sparse_probing_raw_results_filename("sae", 0))
    negatives = theirs.get_stats_and_likely_false_negative_tokens(metrics, "sae", 0, folder)
    calculator = FeatureAbsorptionCalculator(Lookup(readings.measured), test.words, 10, word_token_pos=-1)
    table = theirs.calculate_projection_and_cos_sims(calculator, sae, probe, 0, negatives)
    letters = _aggregate_results_df(table).set_index("letter")
    f1 = metrics.set_index("letter")["f1_probe"]
    usable = [letter for letter in letters.index if f1[letter] > 0.6]
    return SimpleNamespace(probe=probe, f1=f1, letters=letters, usable=usable)


class Lookup:
    """Stands where SAEBench has a model, and gives the activations that were read already."""

    tokenizer = "not none"

    def __init__(self, readings: Readings):
        self.x = dict(zip(readings.words, readings.x, strict=True))

    def to_tokens(self, prompt: str) -> torch.Tensor:
        return torch.zeros(1, 1)

    def run_with_cache(self, prompts: list[str], names_filter: list[str]) -> tuple[None, dict[str, torch.Tensor]]:
        words = [prompt.split("\n")[-1].removesuffix(":") for prompt in prompts]
        return None, {names_filter[0]: torch.stack([self.x[word] for word in words])[:, None]}


@pytest.fixture(scope="module", params=["random", "zero"])
def peer(request, task, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "zero":
            patch.setattr(probing, "LinearProbe", FromZero)
        found = by_saebench(task[0], task[2], tmp_path_factory.mktemp("saebench"))
    found.settings = AbsorptionConfig(start=request.param)
    return found


def test_same_probe_and_main_latents_give_the_same_absorption_of_every_letter(task, peer):
    readings, sae, _ = task
    main = [peer.letters.loc[letter, "split_feats"] for letter in LETTERS]
    weight, test = peer.probe.weights.detach(), readings.test
    right = ((test.x @ weight.T + peer.probe.biases.detach()) > 0).gather(1, test.letters[:, None]).squeeze(1)
    x, letters = test.x[right], test.letters[right]
    found = absorption(x, encode_words(sae, x, 512), letters, weight, sae.W_dec.detach(), main, SETTINGS)
    for number, letter in enumerate(LETTERS):
        own, row = letters == number, peer.letters.loc[letter]
        assert own.sum() == row["num_probe_true_positives"]
        assert float(found.fraction[own].mean()) == pytest.approx(row["mean_absorption_fraction"], abs=1e-5)
        assert int(found.full[own].sum()) == row["num_full_absorption"]
    assert 0.02 < found.fraction.mean() < 0.98  # there is something to compare


def test_all_of_it_agrees_with_saebench(task, peer):
    readings, sae, _ = task
    spelling = learn_to_spell(readings, peer.settings)
    ours = measure_sae(sae, readings, spelling, peer.settings)
    # Words come in another order: single letters of 15 test words differ by some words, their mean does not.
    assert np.mean(spelling.f1) == pytest.approx(peer.f1.mean(), abs=0.02)
    assert [item.letter for item in ours if item.usable] == peer.usable
    _, (fraction, full, splits, _) = over_letters(ours, peer.settings)
    letters = peer.letters.loc[peer.usable]
    assert fraction.mean == pytest.approx(letters["mean_absorption_fraction"].mean(), abs=0.01)
    assert full.mean == pytest.approx(letters["full_absorption_rate"].mean(), abs=0.01)
    assert splits.mean == pytest.approx(letters["num_split_feats"].mean(), abs=0.1)
    assert fraction.std == pytest.approx(statistics.stdev(letters["mean_absorption_fraction"]), abs=0.02)
    print(
        f"{peer.settings.start}: fraction {fraction.mean:.4f}, {letters['mean_absorption_fraction'].mean():.4f};",
        end=" ",
    )
    print(f"full {full.mean:.4f}, {letters['full_absorption_rate'].mean():.4f};", end=" ")
    print(f"main latents {splits.mean:.3f}, {letters['num_split_feats'].mean():.3f} (ours, SAEBench's)")


def test_exact_fits_are_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.rand(400, 4, generator=generator) * (torch.rand(400, 4, generator=generator) < 0.3)
    truth = torch.rand(400, 1, generator=generator) + x[:, :1] > 1.2
    found = fit_exactly(*without_silent_words(x, torch.arange(4)[None], truth))
    theirs = LogisticRegression(max_iter=500, class_weight="balanced", tol=1e-8).fit(x.numpy(), truth[:, 0].numpy())
    assert found.weight[0].tolist() == pytest.approx(theirs.coef_[0].tolist(), abs=1e-3)
    assert float(found.bias[0]) == pytest.approx(float(theirs.intercept_[0]), abs=1e-3)


def test_same_seed_same_words_and_prompts():
    words = [Word(word, number) for number, word in enumerate(make_words()[::20])]
    random.seed(SETTINGS.seed)
    vocabulary = [word.text for word in words]
    both = probing.create_dataset_probe_training(vocabulary, first_letter_formatter(), 1, SETTINGS.template)
    rng = random.Random(SETTINGS.seed)
    shuffled = rng.sample(words, len(words))
    cut = int(0.8 * len(words))
    for part, prompts in zip((shuffled[:cut], shuffled[cut:]), both, strict=True):
        assert [word.text for word in part] == [prompt.word for prompt, _ in prompts]
        assert [word.letter for word in part] == [letter for _, letter in prompts]
        assert [prompt_text(word, part, SETTINGS, rng) for word in part] == [prompt.base for prompt, _ in prompts]


def test_saebench_reads_what_we_write(task):
    readings, sae, _ = task
    letters = measure_sae(sae, readings, learn_to_spell(readings, SETTINGS), SETTINGS)
    why_not, means = over_letters(letters, SETTINGS)
    result = AbsorptionResult("made-up", "float32", 0, 3120, 0, 5, 26, why_not, *means, letters, SETTINGS)
    written = to_saebench(result) | {"eval_id": "a", "datetime_epoch_millis": 0, "sae_bench_commit_hash": "none"}
    read = TypeAdapter(AbsorptionEvalOutput).validate_python(written)
    assert read.eval_result_metrics.mean.mean_absorption_fraction_score == result.fraction.mean
    assert read.eval_result_metrics.mean.std_dev_num_split_features == result.splits.std
    assert len(read.eval_result_details) == len([item for item in letters if item.usable])
    assert read.eval_config.prompt_token_pos == -6
    assert vars(read.eval_config).keys() == written["eval_config"].keys()
