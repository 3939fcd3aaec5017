import argparse
import inspect
import json
import random
import re
import tarfile
from pathlib import Path

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

from sampled_sae.config import plain
from sampled_sae.evals.probing.data import load
from sampled_sae.evals.probing.evaluate import evaluate_probing_many
from sampled_sae.evals.probing.features import draw
from sampled_sae.evals.probing.schema import ProbingConfig, to_saebench
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.models.load import load_model
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.evals.core.tools import LAYER, random_sae
from tests.evals.probing.test_data import write_parquet
from tests.models.tiny_models import WIDTH, make_model, make_tokenizer, save

WORDS = {"cold": "snow ice frost the sky", "hot": "sun fire sand the sky", "wet": "rain sea lake the sky"}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel(make_model("llama").double(), make_tokenizer(), "tiny")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    """Three classes that share some words, of unequal size and length."""
    chance = random.Random(0)
    rows = []
    for label, words in WORDS.items():
        for i in range(120 if label != "wet" else 70):
            other = chance.choice(list(WORDS.values()))
            some = chance.choices(words.split() + other.split(), k=chance.randint(1, 12))
            split = "test" if i % 4 == 0 else "train"
            rows.append({"text": f"{' '.join(some)} {chance.randint(0, 999)}", "label": label, "split": split})
    path = tmp_path_factory.mktemp("texts") / "weather.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(file, **given):
    return ProbingConfig(
        datasets=(file,), **({"tokens": 20, "train_texts": 140, "test_texts": 40, "k": (1, 3)} | given)
    )


def as_json(result):
    return json.loads(json.dumps(plain(result), allow_nan=False))


def numbers(result):
    plain = as_json(result)
    return {name: value for name, value in plain.items() if name != "settings"}


# ---- against a plain computation with scikit-learn ---------------------------------------------------


@torch.no_grad()
def plain_means(lm, sae, texts, settings):
    """Each text on its own: mean residual stream and mean codes, [n, d] and [n, m]."""
    streams, codes = [], []
    for text in texts:
        ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ([lm.tokenizer.bos_token_id] if settings.bos else []) + ids
        stream = lm.activations(torch.tensor([ids[: settings.tokens]]), [LAYER])[LAYER][0]
        stream = stream[1:] if settings.bos else stream
        streams.append(stream.mean(0))
        codes.append(sae.encode(stream).mean(0))
    return torch.stack(streams), torch.stack(codes)


def plain_scores(x, task, k=None):
    train, y = x[task.train.rows].numpy(), task.train.positive.numpy()
    test, truth = x[task.test.rows].numpy(), task.test.positive.numpy()
    order = abs(train[y].mean(0) - train[~y].mean(0)).argsort()[::-1]
    chosen = order[:k] if k else slice(None)
    probe = LogisticRegression(tol=1e-10, max_iter=100_000).fit(train[:, chosen], y)
    said = probe.predict(test[:, chosen])
    auc = roc_auc_score(truth, probe.decision_function(test[:, chosen]))
    return (accuracy_score(truth, said), f1_score(truth, said), auc), order[:k].tolist() if k else None


@pytest.mark.parametrize(("m", "bos"), [(40, False), (300, True)])
def test_scores_are_those_of_a_plain_computation(lm, file, m, bos):
    sae, settings = random_sae(m), config(file, bos=bos, seeds=(3, 4))
    result = evaluate_probing_many([sae], lm, LAYER, settings)[0]
    data = load([file], 10**6, 10**6)[0]
    residual, codes = plain_means(lm, sae, data.texts, settings)
    tasks = draw(data, settings).tasks
    assert len(tasks) == len(result.datasets[0].tasks) == 6
    for task, found in zip(tasks, result.datasets[0].tasks, strict=True):
        assert (task.label, task.seed) == (found.label, found.seed)
        assert (len(task.train.rows), len(task.test.rows)) == (found.train_texts, found.test_texts)
        for k in settings.k:
            expected, latents = plain_scores(codes, task, k)
            assert found.latents[:k] == latents
            assert found.scores.top[k] == pytest.approx(expected, abs=1e-6)
            assert found.scores.residual_top[k] == pytest.approx(plain_scores(residual, task, k)[0], abs=1e-6)
        assert found.scores.all_latents == pytest.approx(plain_scores(codes, task)[0], abs=1e-6)
        assert found.scores.residual == pytest.approx(plain_scores(residual, task)[0], abs=1e-6)


def test_means_are_over_classes_then_datasets_and_spread_over_seeds(lm, file, tmp_path):
    other = tmp_path / "other.jsonl"
    lines = [line for line in Path(file).read_text().splitlines() if '"wet"' not in line]
    other.write_text("\n".join(lines))
    settings = ProbingConfig(datasets=(file, str(other)), k=(2,), seeds=(0, 1, 2), tokens=20, all_latents=False)
    result = evaluate_probing_many([random_sae()], lm, LAYER, settings)[0]
    assert [dataset.name for dataset in result.datasets] == ["weather", "other"]
    by_seed = []
    for seed in settings.seeds:
        of_datasets = [
            torch.tensor([t.scores.top[2].f1 for t in d.tasks if t.seed == seed]).mean() for d in result.datasets
        ]
        by_seed.append(torch.stack(of_datasets).mean())
    found = result.summary.top[2].f1
    assert found.mean == pytest.approx(float(torch.stack(by_seed).mean()), abs=1e-6)
    assert found.std == pytest.approx(float(torch.stack(by_seed).std()), abs=1e-6)
    assert found.std > 0
    assert result.summary.all_latents is None
    assert result.datasets[0].tasks[0].scores.all_latents is None
    # Two classes: the second task is the first one with yes and no exchanged.
    first, second = result.datasets[1].tasks[:2]
    assert first.scores.residual.accuracy == second.scores.residual.accuracy
    assert first.scores.residual.auc == pytest.approx(second.scores.residual.auc)
    assert as_json(result)["summary"]["top"]["2"]["f1"]["mean"] == found.mean
    # The error of the mean of two datasets, each a source of its own.
    first, second = (dataset.summary.top[2].accuracy.mean for dataset in result.datasets)
    assert result.over_datasets == {2: (pytest.approx((first + second) / 2), pytest.approx(abs(first - second) / 2), 2)}
    assert [dataset.source for dataset in result.datasets] == ["weather", "other"]


def test_one_seed_has_no_spread(lm, file):
    result = evaluate_probing_many([random_sae()], lm, LAYER, config(file))[0]
    assert result.summary.top[1].accuracy.std is None
    assert result.summary.residual.accuracy.mean == result.datasets[0].summary.residual.accuracy.mean


# ---- what must not matter ----------------------------------------------------------------------------


def test_several_saes_get_what_each_gets_alone(lm, file):
    saes = [random_sae(40), random_sae(60, seed=1)]
    together = evaluate_probing_many(saes, lm, LAYER, config(file))
    for sae, found in zip(saes, together, strict=True):
        assert numbers(found) == numbers(evaluate_probing_many([sae], lm, LAYER, config(file))[0])
    assert together[0].summary.residual == together[1].summary.residual
    assert together[0].summary.top != together[1].summary.top


def test_sizes_of_parts_do_not_matter(lm, file):
    first = numbers(evaluate_probing_many([random_sae()], lm, LAYER, config(file))[0])
    again = numbers(
        evaluate_probing_many([random_sae()], lm, LAYER, config(file, contexts_at_once=7, tokens_at_once=30))[0]
    )
    assert first == again


def test_precision_is_put_back(lm, file):
    before = torch.get_float32_matmul_precision()
    evaluate_probing_many([random_sae()], lm, LAYER, config(file, tf32=True, all_latents=False))
    assert torch.get_float32_matmul_precision() == before


# ---- SAEs of which much is known ---------------------------------------------------------------------


def test_a_dead_sae_can_only_guess(lm, file):
    sae = SAE(InferenceConfig(WIDTH, 8), torch.float64)
    result = evaluate_probing_many([sae], lm, LAYER, config(file))[0]
    for found in result.datasets[0].tasks:
        assert found.latents == []
        for scores in (*found.scores.top.values(), found.scores.all_latents):
            assert scores.accuracy == scores.auc == 0.5
    assert result.summary.residual.accuracy.mean > 0.6


def test_an_sae_that_keeps_everything_is_as_good_as_the_residual_stream(lm, file):
    from tests.evals.core.tools import identity_sae

    found = evaluate_probing_many([identity_sae()], lm, LAYER, config(file))[0].summary
    assert found.all_latents.accuracy.mean > found.residual.accuracy.mean - 0.05


def test_saebenchs_dense_probe(lm, file):
    exact = evaluate_probing_many([random_sae()], lm, LAYER, config(file))[0]
    theirs = evaluate_probing_many([random_sae()], lm, LAYER, config(file, dense_probe="saebench"))[0]
    assert theirs.summary.top == exact.summary.top
    assert theirs.summary.all_latents != exact.summary.all_latents
    assert theirs.summary.residual.accuracy.mean > 0.6


# ---- what is told and left ---------------------------------------------------------------------------


def test_progress_ends_at_its_total(lm, file):
    told = []
    evaluate_probing_many([random_sae()] * 2, lm, LAYER, config(file), lambda *now: told.append(now))
    done, total = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert set(total) == {done[-1]}
    assert len(told) > 10


def test_counts_of_what_was_used_and_left_out(lm, file, tmp_path):
    path = tmp_path / "a.jsonl"
    extra = [{"text": " ", "label": "hot", "split": "train"}, {"text": "x", "label": "hot", "split": "dev"}]
    extra += [{"text": f"few {i}", "label": "few", "split": "train"} for i in range(3)]
    path.write_text(Path(file).read_text() + "\n".join(map(json.dumps, extra)))
    found = evaluate_probing_many([random_sae()], lm, LAYER, config(str(path), all_latents=False))[0].datasets[0]
    assert (found.blank, found.other_split, found.repeated) == (1, 1, 0)
    assert found.skipped == {"few": "3 texts to fit to and 0 to test on, fewer than 20 and 5"}
    # 140 are asked for, half of them of the class, of which there may be fewer.
    assert {task.label: (task.train_texts, task.test_texts) for task in found.tasks} == {
        "cold": (140, 40),
        "hot": (140, 40),
        "wet": (104, 36),
    }
    assert found.texts == 70 + 70 + 52 + 20 + 20 + 18


def test_the_layout_is_saebenchs(lm, file):
    settings = config(file, k=(1, 3, 10), seeds=(5, 6))
    result = evaluate_probing_many([random_sae()], lm, LAYER, settings)[0]
    found = json.loads(json.dumps(to_saebench(result, settings), allow_nan=False))
    names = {f"{kind}_{part}test_accuracy" for kind in ("llm", "sae") for part in ("", "top_1_", "top_10_")}
    metrics = found["eval_result_metrics"]
    assert set(metrics) == {"llm", "sae"}
    assert set(metrics["llm"]) | set(metrics["sae"]) == names
    assert metrics["sae"]["sae_top_1_test_accuracy"] == result.summary.top[1].accuracy.mean
    assert metrics["llm"]["llm_test_accuracy"] == result.summary.residual.accuracy.mean
    [detail] = found["eval_result_details"]
    assert detail.pop("dataset_name") == "weather_results"
    assert set(detail) == names
    by_label = found["eval_result_unstructured"]["weather_results"]["sae_top_10_test_accuracy"]
    assert sum(by_label.values()) / 3 == pytest.approx(detail["sae_top_10_test_accuracy"])
    assert found["eval_type_id"] == "sparse_probing"
    assert found["eval_config"]["k_values"] == [1, 10]


# ---- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"datasets": ()}, "datasets = (): must name at least one"),
        ({"datasets": "a.csv"}, "datasets = 'a.csv': must be a list"),
        ({"datasets": ("a.csv", "a.csv")}, "datasets = ('a.csv', 'a.csv'): must name each one once"),
        ({"k": ()}, "k = (): must name at least one"),
        ({"k": (1, 0)}, "k[1] = 0: must be at least 1"),
        ({"k": (1.5,)}, "k[0] = 1.5: must be a whole number"),
        ({"k": 5}, "k = 5: must be a list"),
        ({"seeds": (1, 1)}, "seeds = (1, 1): must name each one once"),
        ({"train_texts": 1}, "train_texts = 1: must be at least 2"),
        ({"tokens": 1}, "tokens = 1: must leave room for a token besides BOS"),
        ({"bos": 1}, "bos = 1: must be True or False"),
        ({"dense_probe": "best"}, "dense_probe = 'best': must be 'exact' or 'saebench'"),
        ({"tokens_at_once": 0}, "tokens_at_once = 0: must be at least 1"),
    ],
)
def test_settings_are_checked(given, line):
    with pytest.raises(UserError) as caught:
        ProbingConfig(**given)
    assert str(caught.value) == line


def refusal(saes, lm, settings):
    with pytest.raises(UserError) as caught:
        evaluate_probing_many(saes, lm, LAYER, settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_does_not_fit_is_named(lm, file):
    wide = SAE(InferenceConfig(WIDTH + 1, 30))
    assert refusal([wide], lm, config(file)) == f"sae has width 17: must be {WIDTH}, the width of tiny"
    assert refusal([random_sae(), wide], lm, config(file)).startswith("saes[1] has width 17")
    assert refusal([], lm, config(file)) == "saes = []: must name at least one SAE"
    assert refusal([random_sae(4)], lm, config(file, k=(5,))).startswith("k = 5: sae has 4 latents")
    assert refusal([random_sae()], lm, config(file, tokens=65)).startswith("tokens = 65: tiny reads at most 64")
    assert refusal([random_sae()], lm, config("none.csv")) == "datasets = 'none.csv': no such file"


def test_a_tokenizer_without_bos_and_eos(file):
    tokenizer = make_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    lm = LanguageModel(make_model("llama").double(), tokenizer, "tiny")
    assert refusal([random_sae()], lm, config(file)).startswith("bos = True: the tokenizer has neither BOS nor EOS")
    [found] = evaluate_probing_many([random_sae()], lm, LAYER, config(file, bos=False, all_latents=False))
    assert found.layer == LAYER


def test_activations_that_are_not_finite(file):
    lm = LanguageModel(make_model("llama").double(), make_tokenizer(), "tiny")
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[5] = torch.nan
        lm.model.get_input_embeddings().weight[60:90] = torch.nan
    assert "gives activations that are nan or infinite" in refusal([random_sae()], lm, config(file))


def test_a_model_from_disk_and_real_texts(tmp_path):
    pieces = {module.__name__: re.findall(r"(?s).{300}", inspect.getsource(module)) for module in (argparse, tarfile)}
    splits = ["train"] * 60 + ["test"] * 40
    rows = [
        {"text": text, "label": name, "split": split}
        for name, texts in pieces.items()
        for text, split in zip(texts, splits, strict=False)
    ]
    write_parquet(tmp_path / "modules.parquet", rows)
    lm = load_model(save(make_model("gpt_neox"), tmp_path / "model"), "cpu")
    settings = ProbingConfig(
        datasets=(str(tmp_path / "modules.parquet"),), k=(1, 5), train_texts=100, test_texts=60, tokens=64
    )
    result = evaluate_probing_many([random_sae().float()], lm, LAYER, settings)[0]
    assert [task.train_texts for task in result.datasets[0].tasks] == [100, 100]
    assert 0.3 < result.summary.residual.accuracy.mean < 0.9


def test_saes_that_do_not_fit_into_memory_together_are_probed_in_parts(lm, file, monkeypatch):
    from sampled_sae.evals.probing import evaluate

    saes = [random_sae(seed=seed) for seed in range(3)]
    whole = evaluate_probing_many(saes, lm, LAYER, config(file))
    read, sizes = evaluate.read, []

    def short_of_memory(model, layer, saes, *rest):
        sizes.append(len(saes))
        if len(saes) > 1:
            raise torch.cuda.OutOfMemoryError
        return read(model, layer, saes, *rest)

    monkeypatch.setattr(evaluate, "read", short_of_memory)
    parts = evaluate_probing_many(saes, lm, LAYER, config(file))
    assert sizes == [3, 1, 2, 1, 1]
    assert [numbers(one) for one in parts] == [numbers(one) for one in whole]
