"""Probing accuracies beside those of SAEBench's own functions. Runs in that peer's environment."""

import json
import random
from pathlib import Path

import jaxtyping
import pytest
import sae_bench.evals.sparse_probing.probe_training as theirs
import torch
import transformers
from pydantic import TypeAdapter
from sae_bench.evals.sparse_probing.eval_output import SparseProbingEvalOutput
from sae_bench.sae_bench_utils import activation_collection, dataset_utils
from sae_lens import SAE as SAELensSAE
from sklearn.linear_model import LogisticRegression
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformer_lens import HookedTransformer

import sampled_sae as ss
from sampled_sae.evals.probing.evaluate import contrast, evaluate_probing_many, top_probes
from sampled_sae.evals.probing.features import Part, Task, read, tokenize
from sampled_sae.evals.probing.schema import ProbingConfig, to_saebench
from sampled_sae.models.language_model import LanguageModel

WIDTH, LAYER, TOKENS, TRAIN, TEST = 32, 1, 24, 400, 200
"""Train and test texts are those of one class."""
K = (1, 2, 5, 10)
CLASSES = ("a", "b", "c", "d")


@pytest.fixture(scope="module", autouse=True)
def unchecked_shapes():
    """SAEBench annotates the texts of one class and those of a task with the same size, which newer jaxtyping minds."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def vocabulary():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {word: i for i, word in enumerate(["<end>", "<begin>", *letters])}


@pytest.fixture(scope="module")
def lm():
    backend = Tokenizer(models.BPE(vocabulary(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # SAEBench's models have tokenizers that put BOS in front.
    backend.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<begin>", eos_token="<end>", pad_token="<end>"
    )
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(shape)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return LanguageModel(model, tokenizer, "tiny")


@pytest.fixture(scope="module")
def texts():
    """For each class texts to fit to and texts to test on: letters, of which each class prefers some."""
    chance = random.Random(0)

    def text(label):
        favourites = "etaoinshrdlu"[3 * CLASSES.index(label) :][:3]
        return "".join(
            chance.choice(favourites if chance.random() < 0.25 else "etaoinshrdlu ")
            for _ in range(chance.randint(5, 40))
        )

    return {split: {c: [text(c) for _ in range(n)] for c in CLASSES} for split, n in (("train", TRAIN), ("test", TEST))}


@pytest.fixture(scope="module")
def sae(lm, texts):
    """Trained for a moment on the model's activations."""
    ids = tokenize([t for c in CLASSES for t in texts["train"][c]], lm.tokenizer, settings())
    whole = torch.tensor([one for one in ids if len(one) == TOKENS - 1])
    x = lm.activations(whole, [LAYER])[LAYER].flatten(0, 1).float()
    return ss.train(x, ss.batchtopk(256, 12), steps=150, batch_size=512, device="cpu", progress=False)


@pytest.fixture(scope="module")
def lens(sae, tmp_path_factory):
    """The same SAE in SAELens."""
    sae.cfg.metadata.update({"model_name": "tiny", "hook_name": f"blocks.{LAYER}.hook_resid_post"})
    return SAELensSAE.load_from_disk(str(sae.save(tmp_path_factory.mktemp("sae") / "saved")))


class Hooked(HookedTransformer):
    """Our model where SAEBench expects one of TransformerLens."""

    def __init__(self, lm):
        torch.nn.Module.__init__(self)
        self.lm, self.tokenizer = lm, lm.tokenizer

    def run_with_hooks(self, tokens, stop_at_layer, fwd_hooks):
        [(_, hook)] = fwd_hooks
        hook(self.lm.activations(tokens, [stop_at_layer - 1])[stop_at_layer - 1].clone(), None)


def settings(**given):
    return ProbingConfig(**({"datasets": ("x.jsonl",), "k": K, "tokens": TOKENS} | given))


def their_means(lm, lens, by_class):
    """SAEBench's features of the texts of each class: of the residual stream, and of the SAE."""
    tokens = dataset_utils.tokenize_data_dictionary(by_class, lm.tokenizer, TOKENS, "cpu")
    acts = activation_collection.get_all_llm_activations(
        tokens, Hooked(lm), 64, LAYER, "any", mask_bos_pad_eos_tokens=True
    )
    meaned = activation_collection.create_meaned_model_activations(acts)
    return meaned, activation_collection.get_sae_meaned_activations(acts, lens, 64)


@pytest.fixture(scope="module")
def means(lm, lens, texts):
    """SAEBench's features by kind and split."""
    both = {split: their_means(lm, lens, texts[split]) for split in ("train", "test")}
    return {kind: {split: both[split][i] for split in both} for i, kind in enumerate(("llm", "sae"))}


def their_draws(seed):
    """The texts that SAEBench draws for each class after this seed, numbered through, train before test."""
    start, numbers = 0, {}
    for split, n in (("train", TRAIN), ("test", TEST)):
        numbers[split] = {}
        for label in CLASSES:
            numbers[split][label] = torch.arange(start, start + n)[:, None].float()
            start += n
    torch.manual_seed(seed)
    tasks = []
    for label in CLASSES:
        parts = []
        for split in ("train", "test"):
            rows, labels = theirs.prepare_probe_data(numbers[split], label)
            parts.append(Part(rows[:, 0].long(), labels == 1))
        tasks.append(Task(label, seed, *parts))
    return tasks


@torch.no_grad()
def our_probes(lm, sae, texts, tasks):
    """Our probes by kind on those texts."""
    ids = tokenize(
        [t for split in ("train", "test") for c in CLASSES for t in texts[split][c]], lm.tokenizer, settings()
    )
    weights = contrast(tasks, len(ids))
    found = read(lm, LAYER, [sae], ids, weights, settings(), lambda more: None)
    codes = found.codes[0]
    return {
        "llm": top_probes(weights @ found.residual, lambda c: found.residual[:, c], tasks, K),
        "sae": top_probes(codes.difference, codes.columns, tasks, K),
    }


def optimum(x, task, k):
    """Accuracy of SAEBench's probe on its own features x [n, m], if scikit-learn did not stop before the optimum."""
    mask = theirs.get_top_k_mean_diff_mask(x[task.train.rows], task.train.positive.int(), k)
    chosen = theirs.apply_topk_mask_reduce_dim(x, mask).double().numpy()
    probe = LogisticRegression(tol=1e-10, max_iter=100_000)
    probe.fit(chosen[task.train.rows], task.train.positive.numpy())
    return float((probe.predict(chosen[task.test.rows]) == task.test.positive.numpy()).mean())


@pytest.mark.parametrize("seed", range(3))
def test_accuracy_on_the_same_texts(lm, sae, texts, means, seed):
    """SAEBench stops at scikit-learn's default tolerance, which moves a weak probe by a text or two, up or down."""
    tasks = their_draws(seed)
    ours = our_probes(lm, sae, texts, tasks)
    for kind in ("llm", "sae"):
        x = torch.cat([means[kind][split][c] for split in ("train", "test") for c in CLASSES])
        for k in K:
            torch.manual_seed(seed)
            _, accuracies = theirs.train_probe_on_activations(means[kind]["train"], means[kind]["test"], select_top_k=k)
            found = [scores.accuracy for scores in ours[kind].scores[k]]
            assert found == pytest.approx([optimum(x, task, k) for task in tasks], abs=1e-9), (kind, k)
            assert found == pytest.approx([accuracies[c] for c in CLASSES], abs=0.005 + 1e-9), (kind, k)
            assert sum(found) / 4 == pytest.approx(sum(accuracies.values()) / 4, abs=0.005)
    # There is something to find, and not everything is found.
    assert 0.6 < ours["sae"].scores[10][0].accuracy < 0.99


def write(path, texts, classes):
    rows = [
        {"text": text, "label": label, "split": split}
        for split in ("train", "test")
        for label in classes
        for text in texts[split][label]
    ]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_whole_evaluation_of_two_classes(lm, sae, texts, means, tmp_path):
    """All texts are used and there is but one other class, so that SAEBench's draws and ours are the same."""
    two = CLASSES[:2]
    given = settings(
        datasets=(write(tmp_path / "two.jsonl", texts, two),),
        train_texts=2 * TRAIN,
        test_texts=2 * TEST,
        dense_probe="saebench",
    )
    result = evaluate_probing_many([sae], lm, LAYER, given)[0]
    layout = to_saebench(result, given)
    found = {name: value for part in layout["eval_result_metrics"].values() for name, value in part.items()}
    for kind in ("llm", "sae"):
        train, test = ({c: means[kind][split][c] for c in two} for split in ("train", "test"))
        for k in K:
            _, accuracies = theirs.train_probe_on_activations(train, test, select_top_k=k)
            assert found[f"{kind}_top_{k}_test_accuracy"] == pytest.approx(sum(accuracies.values()) / 2, abs=0.005)
        _, accuracies = theirs.train_probe_on_activations(
            train, test, select_top_k=None, use_sklearn=False, batch_size=250, epochs=100, lr=1e-2
        )
        # Its start and its batches are random.
        assert found[f"{kind}_test_accuracy"] == pytest.approx(sum(accuracies.values()) / 2, abs=0.02)


def test_saebench_reads_our_layout(lm, sae, texts, tmp_path):
    given = settings(datasets=(write(tmp_path / "four.jsonl", texts, CLASSES),), k=(1, 3, 5), all_latents=False)
    layout = to_saebench(evaluate_probing_many([sae], lm, LAYER, given)[0], given)
    rest = {"eval_id": "x", "datetime_epoch_millis": 1, "sae_bench_commit_hash": "x", "sae_cfg_dict": None}
    rest |= dict.fromkeys(("sae_lens_id", "sae_lens_release_id", "sae_lens_version"))
    read_back = TypeAdapter(SparseProbingEvalOutput).validate_python(json.loads(json.dumps(layout | rest)))
    metrics = read_back.eval_result_metrics
    assert metrics.sae.sae_top_5_test_accuracy == layout["eval_result_metrics"]["sae"]["sae_top_5_test_accuracy"]
    assert metrics.sae.sae_test_accuracy is None
    assert metrics.llm.llm_test_accuracy > 0.5
    assert read_back.eval_result_details[0].dataset_name == "four_results"
    assert read_back.eval_config.k_values == [1, 5]
