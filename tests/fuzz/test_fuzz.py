"""A short run of `make fuzz`, and one damaged file for each failure that it has found."""

import json

import pytest

from tests.fuzz.commands import COMMANDS, prepare
from tests.fuzz.mutate import Damage, unsealed, unsealed_damage
from tests.fuzz.processes import execute, outcome
from tests.fuzz.run import Fuzzer, run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("undamaged")


@pytest.fixture(scope="module")
def fuzzer(root):
    return Fuzzer(root)


def test_random_damage_is_noticed(root, capsys):
    assert run(root, 300) == [], capsys.readouterr().out


def field(*path, value):
    """Replace one value in a JSON file."""

    def change(content: bytes) -> bytes:
        whole = json.loads(content)
        inner = whole
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        return json.dumps(whole).encode()

    return change


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


FIRST = "batchtopk-s0"
CASES = [
    ("sae", "cfg.json", "value", field("apply_b_dec_to_input", value=False)),
    ("sae", "sampled_sae.json", "type", field("metadata", "training", "heldout", "l0", value=True)),
    ("sae", "sampled_sae.json", "value", field("threshold_ema", value=9.0)),
    ("sealed results", "evals/core.json", "value", field("result", "density", "dead", value=3)),
    ("sealed explanations", "evals/explanations.json", "value", field("latents", "3", "score", value=0.9)),
    ("sealed comparison", "compare.json", "value", field("pairs", 0, "a", value=1)),
    ("record of a training", "train.json", "value", field("train", "steps", value=99)),
    ("cache", "cache.json", "value", field("description", "origin", value="elsewhere")),
    ("compare", f"{FIRST}/sae_weights.safetensors", "bytes", flip),
    ("collect", f"saes/{FIRST}/evals/core.json", "syntax", lambda text: text[:-1] + b', "result": null}'),
    ("record of stages", "reproduce.json", "syntax", lambda text: b'{"stages": 1e999}'),
    ("collect", "log.jsonl", "syntax", lambda text: text + b'{"step": ' + b"9" * 5000 + b"}\n" + b"[" * 9999),
    ("answers", "answers.jsonl", "syntax", lambda text: text + b"[" * 9999),
    ("explanations", "evals/explanations.json", "value", field("latents", "3", "score", value=10**400)),
    ("report", f"saes/{FIRST}/evals/core.json", "value", field("result", "density", "dead", value=10**400)),
    ("report", f"saes/{FIRST}/sampled_sae.json", "type", field("metadata", "training", "batch_size", value=[0, 1])),
    ("collect", "run.json", "type", field("config", "saes", 1, "name", value=list(range(100)))),
    ("dictionary_learning matryoshka", "config.json", "type", field("trainer", "group_sizes", value=None)),
    ("jobs of a sweep", "sweep.json", "value", field("cwd", value="n" * 5000)),
    ("merge", "one/results.json", "type", field("saes", 0, value=True)),
    ("merge", "two/log.jsonl", "syntax", lambda text: text + b"\xc0\n"),
    ("synthetic", "results.json", "type", field("data", value="x")),
    ("synthetic", "results.json", "type", field("saes", 0, "seed", value=[[]])),
    ("synthetic", "results.json", "type", field("train", value=1e308)),
    ("synthetic", "results.json", "type", field("data", "buckets", 3, "features", value="many")),
    ("synthetic", "results.json", "type", field("data", "buckets", 0, "name", value={"a": None})),
    ("synthetic", "results.json", "type", field("data", "buckets", 1, value=True)),
    ("synthetic", "results.json", "type", field("data", "buckets", value=[0, 1])),
    ("design of a study", "design.json", "field", field("methods", value={"batchtopk": {"spec": "batchtopk"}})),
    ("design of a study", "design.json", "value", field("tokens", value=-1)),
    ("lines of a study", "results.jsonl", "syntax", lambda text: text + b"[" * 9999 + b"\n"),
    ("lines of a study", "results.jsonl", "syntax", lambda text: b"\xff" + text),
    ("lines of a study", "results.jsonl", "type", lambda text: text.replace(b'"seed":0', b'"seed":[]')),
    ("tables of a study", "results.jsonl", "value", lambda text: text.replace(b'"first"', b'"other"')),
    ("tables of a study", "results.jsonl", "value", lambda text: text.replace(b'"seconds":2.0', b'"seconds":0')),
    ("tables of a study", "design.json", "value", field("claims", 0, "metric", value="")),
    ("tables of a study", "synthetic/finite.json", "type", field("saes", 0, "recovery", value=None)),
    ("latents of a study", "first-good-x1-s0.safetensors", "bytes", lambda content: content[:100]),
    ("page of latents", "browser.json", "type", field("limit", value="x")),
]


@pytest.mark.parametrize("target, file, kind, change", CASES)
def test_past_failures(fuzzer, root, target, file, kind, change):
    one = fuzzer.targets[target]
    [found] = [each for each in one.files if each.name == file]
    content = (root / one.folder / file).read_bytes()
    content = change(unsealed(content) if found.damage is unsealed_damage else content)
    _, failure = fuzzer.judge(one, found, Damage(content, kind, "a past failure", "data"))
    assert failure is None, failure


def test_a_damaged_cache_through_the_command_line(root, fuzzer):
    prepare(root)
    [command] = [each for each in COMMANDS if each.words[:2] == ("train", "cache")]
    shard = "cache/shard-00001.safetensors"
    damaged = flip((root / shard).read_bytes())
    for interpreter in (False, True):
        finished, made = execute(root, command.words, shard, damaged, interpreter)
        assert outcome(finished, made)[0] == "refused", finished.stderr
