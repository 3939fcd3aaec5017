"""`sampled-sae compare` as a person meets it, on SAEs trained on the spot."""

import csv
import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import sampled_sae as ss
from sampled_sae.cli import parse
from sampled_sae.cli.evaluate import Compare
from sampled_sae.evals.results import save_firing
from sampled_sae.reporting.comparison import matrix_caption, print_comparison, short_names, spark
from sampled_sae.utils.errors import UserError
from tests.evals.autointerp.tools import need_minilm
from tests.evals.similarity.tools import explain, made, rows, seeded


def compare(*words) -> None:
    parse(Compare, [str(word) for word in words], "sampled-sae compare").run()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "run"
    activations = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    shapes = [ss.batchtopk(32, 3), ss.sampled(32, 3, "l2", 3)]
    configs = [replace(config, seed=seed) for config in shapes for seed in (0, 1, 2)]
    ss.train(activations, configs, steps=10, batch_size=200, out=folder, progress=False)
    return folder


def test_seeds_and_scores_of_a_run(run, tmp_path, capsys):
    compare(run, "--out", tmp_path / "out", "--device", "cpu", "--at-once", 100)
    shown = capsys.readouterr()
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [sae["name"] for sae in content["saes"]] == [
        f"{kind}-s{i}" for kind in ("batchtopk", "l2-l3") for i in range(3)
    ]
    groups = [(row["group"], row["mmcs"]["pairs"]) for row in content["seeds"]]
    assert groups == [("batchtopk", 3), ("sampled:score=l2,l=3", 3)]
    assert content["scores"]["all"]["pairs"] == [[3, 3], [3, 3]]
    assert len(content["pairs"]) == 9 and content["versions"]["torch"]
    decoders = {path.parent.name: load_file(path)["W_dec"] for path in (run / "saes").glob("*/sae_weights.safetensors")}
    rows_of = list(csv.DictReader((tmp_path / "out" / "pairs.csv").open()))
    assert len(rows_of) == 9
    for row in rows_of:
        cosine = torch.nn.functional.cosine_similarity(decoders[row["a"]][:, None], decoders[row["b"]][None], dim=2)
        assert float(row["mmcs_a_to_b"]) == pytest.approx(float(cosine.amax(1).mean()), abs=1e-5)
        assert float(row["mmcs_b_to_a"]) == pytest.approx(float(cosine.amax(0).mean()), abs=1e-5)
        assert float(row["random_mean"]) == pytest.approx(content["seeds"][0]["random"])
        assert float(row["matched"]) <= min(float(row["mmcs_a_to_b"]), float(row["mmcs_b_to_a"])) + 1e-5
        assert row["live_mean"] == ""
    for text in (
        "Across seeds",
        "MMCS from rows to columns",
        "batchtopk-s0",
        "skipped, live (6)",
        "skipped, explanations",
    ):
        assert text in shown.out
    assert "9/9 pairs" in shown.err


def test_live_latents_and_explanations(tmp_path, capsys):
    folders = [seeded().save(tmp_path / "run" / "b"), seeded(score="l2").save(tmp_path / "run" / "l")]
    for folder in folders:
        save_firing(folder, torch.arange(12) % 3, tokens=100)
    explain(folders[0], {0: "names of animals", 1: "sums of money"}, {0: 0.9, 1: 0.7})
    explain(folders[1], {2: "prices [bold]in dollars", 5: "chess"}, {2: 0.8, 5: 1.0})
    need_minilm()
    words = (tmp_path / "run", "--out", tmp_path / "out", "--embedder", "minilm", "--device", "cpu")
    compare(*words, "--matching", "live", "--threshold", 1)
    shown = capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [sae["live"] for sae in content["saes"]] == [8, 8] and content["pairs"][0]["matching"]["pairs"] == 8
    assert content["skipped"] == []
    table = list(csv.DictReader((tmp_path / "out" / "unique.csv").open()))
    assert sorted((row["of"], row["latent"], row["explanation"], row["score"]) for row in table) == [
        ("b", "0", "names of animals", "0.9"),
        ("b", "1", "sums of money", "0.7"),
        ("l", "2", "prices [bold]in dollars", "0.8"),
        ("l", "5", "chess", "1.0"),
    ]
    assert {row["match_explanation"] for row in table if row["of"] == "l"} <= {"names of animals", "sums of money"}
    assert "Unique to l against b (2 and 2 explained latents" in shown and "prices [bold]in dollars" in shown
    assert "nearest" in shown and "Left out as not unique: 0 of 2" in shown
    for row in table:
        assert float(row["decoder"]) <= float(row["nearest"]) < 1
        assert (row["explained"], row["have_equal"]) == ("2", "0")
    top = shown[shown.index("Top features of l") :]
    assert top.index("chess") < top.index("prices"), "the better score comes first"
    assert "live latents" in shown and "dead ones included" not in shown and "skipped" not in shown


def test_bad_input_is_one_line(run, tmp_path):
    out = ("--out", tmp_path / "out", "--device", "cpu")
    one = run / "saes" / "batchtopk-s0"
    with pytest.raises(UserError, match="there is no such folder"):
        compare(run, tmp_path / "nothing", *out)
    with pytest.raises(UserError, match="folders: must name at least one"):
        compare(*out)
    with pytest.raises(UserError, match="only 'batchtopk-s0': a comparison needs two SAEs"):
        compare(one, *out)
    with pytest.raises(UserError, match="only 'batchtopk-s0'"):
        compare(one, one, *out)
    narrow = made(rows(6, 3)).save(tmp_path / "narrow")
    with pytest.raises(UserError, match="narrow has width 3 and batchtopk-s0 has width 16"):
        compare(one, narrow, *out)
    with pytest.raises(UserError, match="reference = 'x': must be one of batchtopk, sampled:score=l2,l=3"):
        compare(run, *out, "--reference", "x")
    with pytest.raises(UserError, match="device = 'cuda:99': cannot be used"):
        compare(run, "--out", tmp_path / "out", "--device", "cuda:99")
    infinite = seeded(d=16)
    with torch.no_grad():
        infinite.W_dec.fill_(torch.inf)
    broken = infinite.save(tmp_path / "broken")
    with pytest.raises(UserError, match="broken has entries that are nan or infinite"):
        compare(one, broken, *out)
    (broken / "sae_weights.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match="missing or damaged"):
        compare(one, broken, *out)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write there"):
        compare(run, "--out", tmp_path / "file" / "x", "--device", "cpu")


def test_none_is_unique_where_each_has_an_equal(tmp_path, capsys):
    need_minilm()
    same = rows(12, 6)
    for name, score, explained in (("b", None, {0: "cats"}), ("l", "l2", {1: "dogs", 2: "sums"})):
        explain(made(same, seeded(score=score).cfg.training).save(tmp_path / "run" / name), explained)
    compare(tmp_path / "run", "--out", tmp_path / "out", "--embedder", "minilm", "--device", "cpu")
    shown = " ".join(capsys.readouterr().out.split())
    assert "None is unique: for each of the 2, a latent of b, explained or not, has a decoder cosine of 0.7" in shown
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert sorted((i["of"], i["latents"], i["equals"]) for i in content["pairs"][0]["unique"]) == [
        ("b", 1, 1),
        ("l", 2, 2),
    ]
    assert (tmp_path / "out" / "unique.csv").read_text().count("\n") == 1


def test_what_lies_off_the_diagonal_is_said(run, tmp_path, capsys):
    said = "off-diagonal: same seed, which share start values and so stay alike; diagonal: across seeds"
    compare(run, "--out", tmp_path / "out", "--device", "cpu")
    assert said in " ".join(capsys.readouterr().out.split())
    compare(run, "--out", tmp_path / "out", "--device", "cpu", "--seeds", "different")
    shown = capsys.readouterr().out
    assert "(diagonal: across seeds)" in shown and "start values" not in shown
    some = {"settings": {"seeds": "same"}, "saes": [{"name": n, "seed": s} for n, s in (("a", 0), ("b", 0), ("c", 1))]}
    pairs = [{"kind": "scores", "a": "a", "b": other} for other in "bc"]
    assert "same seed (1 of 2 pairs), which share" in matrix_caption(some | {"pairs": pairs})


@pytest.mark.parametrize("width", [70, 80, 100, 160, 300])
def test_numbers_of_pairs_are_whole_whatever_the_names(run, tmp_path, capsys, width):
    compare(run, "--out", tmp_path / "out", "--device", "cpu")
    capsys.readouterr()
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    for pair in content["pairs"]:
        for side in "ab":
            pair[side] = f"part-000/saes/a-model-of-a-long-name-layer-15-{pair[side]}"
    text = io.StringIO()
    print_comparison(content, Console(width=width, file=text))
    shown = text.getvalue()
    table = shown[shown.index("Pairs") : shown.index("MMCS: mean")]
    for pair in content["pairs"]:
        for value in (pair["all"]["a_to_b"]["mmcs"], pair["matching"]["mean"], pair["matching"]["shared"]):
            assert f" {value:.3f} " in table
    assert ("batchtopk-s0" in table) == (width > 80) and (("█" in table) == (width >= 160))
    assert ("names begin with part-000/saes/a-model-of-a-long-name-layer-15-" in " ".join(table.split())) == (
        width < 300
    )


def test_escape_sequences_in_names_do_not_reach_the_terminal(run, tmp_path, capsys):
    compare(run, "--out", tmp_path / "out", "--device", "cpu")
    capsys.readouterr()
    text = (tmp_path / "out" / "compare.json").read_text().replace("batchtopk", "batch\\u001b[31mtopk\\u009b2J")
    shown = io.StringIO()
    print_comparison(json.loads(text), Console(width=200, file=shown))
    assert "batch?[31mtopk?2J" in shown.getvalue() and not set("\x1b\x9b") & set(shown.getvalue())


def test_short_names():
    assert short_names(["a/b-c", "a/b-d"]) == ({"a/b-c": "c", "a/b-d": "d"}, "a/b-")
    assert short_names(["b", "l"])[1] == short_names(["run"])[1] == short_names([])[1] == ""
    assert short_names(["a-", "a-b"]) == ({"a-": "a-", "a-b": "a-b"}, "")
    assert short_names(["l2-l3", "l2-l30"])[0] == {"l2-l3": "l3", "l2-l30": "l30"}


def test_an_embedder_that_is_not_there_is_said_and_the_rest_measured(tmp_path, capsys):
    for name, score in (("b", None), ("l", "l2")):
        explain(seeded(score=score).save(tmp_path / "run" / name), {0: "cats"})
    compare(tmp_path / "run", "--out", tmp_path / "out", "--embedder", tmp_path / "absent", "--device", "cpu")
    shown = capsys.readouterr()
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content["pairs"][0]["all"]["mean"] is not None and content["pairs"][0]["matching"] is not None
    assert [item["who"] for item in content["skipped"] if "absent': there is no such folder" in item["reason"]] == [
        "l",
        "b",
    ]
    assert "skipped, explanations (2)" in shown.out and "--embedder" in shown.out
    assert shown.err.index("no unique features: embedder = ") < shown.err.index("1/1 pairs"), "before the work"


def test_a_histogram_as_a_line():
    edges = [-1 + i / 50 for i in range(101)]
    counts = [0] * 100
    counts[0], counts[60], counts[99] = 1, 1, 800  # cosines around -.99, .21 and .99
    assert spark(counts, edges) == "▁" + "·" * 3 + "▁" + "·" * 14 + "█"
