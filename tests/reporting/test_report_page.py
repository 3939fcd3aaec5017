"""The page of a sweep, as text; test_report_browser.py looks at it in a browser."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("plotly")

import sampled_sae as ss
from sampled_sae.method import presets
from sampled_sae.reporting.collect import collect
from sampled_sae.reporting.report_page import page
from sampled_sae.reporting.sweep import sweeps
from sampled_sae.reporting.write import write_report
from sampled_sae.utils.errors import UserError
from tests.reporting.made_up_sweep import K, M, absorption, core, grid, put, write_run, write_sae, write_sweep
from tests.reporting.test_synthetic_page import Reader


def html(folder: Path) -> str:
    found = collect([folder])
    return page(found, sweeps(found))


def explorer(text: str) -> dict[str, Any]:
    """What the page's script draws any two numbers from."""
    block = text.split("data-explorer=", 1)[1].split('<script type="application/json">', 1)[1]
    content: dict[str, Any] = json.loads(block.split("</script>", 1)[0])
    return content


def test_one_file_without_network(tmp_path: Path) -> None:
    text = html(write_sweep(tmp_path))
    reader = Reader(text)
    for _, attributes in reader.tags:
        for name in ("src", "href"):
            assert not (attributes.get(name) or "").startswith(("http", "//", "/"))
    assert text.count("plotly.js v") == 1 and "default-src 'none'" in text
    ids = [attributes["id"] for _, attributes in reader.tags if attributes.get("id")]
    assert len(ids) == len(set(ids)) and set(reader.figures) <= set(ids)


def test_everything_is_there(tmp_path: Path) -> None:
    text = html(write_sweep(tmp_path))
    reader = Reader(text)
    shown = " ".join(reader.texts)
    assert all(str(config.name) in shown for config in grid())
    for name in ("curve-loss", "curve-fve", "curve-dead", "curve-churn", "density-0", "probing_5-0", "absorption-1"):
        assert f"s0-{name}" in reader.figures
    assert "14 of 14" in shown and "stdlib" in shown and "tiny, layer 1" in shown
    assert '"score": "uniform"' in shown  # the settings


def row_of(text: str, title: str) -> str:
    """The cells of a metric in the table of results."""
    return text.split(f">{title}</span><small>", 1)[1].split("</th>", 1)[1].split("</tr>", 1)[0]


def test_best_values_name_the_right_sae(tmp_path: Path) -> None:
    text = html(write_sweep(tmp_path))
    cells = ("batchtopk", "0.102", "0.100 to 0.104", "2", "1.000", "0.102 (0.100 to 0.104)")
    assert row_of(text, "FVU") == "".join(f"<td>{cell}</td>" for cell in cells)
    words = "<b>FVU</b>: <b>batchtopk</b> is best, 0.102 (0.100 to 0.104), ahead of <b>topk</b>, 0.122"
    assert words in text


def test_no_winner_within_noise_or_with_one_seed(tmp_path: Path) -> None:
    noisy = html(write_sweep(tmp_path / "noisy"))
    row = row_of(noisy, "Probing accuracy, k\u00a0=\u00a05")
    assert "no clear winner: " in row and "<td>2</td><td>0.500</td>" in row
    assert "no clear winner among " in noisy
    alone = html(write_sweep(tmp_path / "alone", seeds=(0,)))
    assert row_of(alone, "FVU").startswith("<td>not known: one SAE each</td>")
    assert "<b>FVU</b> ranges from 0.100 (<b>batchtopk</b>) to " in alone and "none is named best" in alone
    assert "</b> is best" not in alone
    assert 'class="best' not in alone and 'class="best' in html(write_sweep(tmp_path / "two"))


def test_the_explorer_has_the_numbers_of_the_files(tmp_path: Path) -> None:
    content = explorer(html(write_sweep(tmp_path)))
    assert len(content["rows"]) == 7 and len(content["saes"]) == 14
    by_label = {row["label"]: row["values"] for row in content["rows"]}
    assert by_label["batchtopk"]["fvu"] == pytest.approx([0.102, 0.1, 0.104])
    assert content["metrics"]["fvu"]["better"] == "low" and content["metrics"]["l0"]["better"] is None
    assert content["groups"][-1]["name"] == "batchtopk" and content["groups"][-1]["marker"]["symbol"] == "x"
    about = next(row["about"] for row in content["rows"] if row["label"] == "sampled:score=l2,l=5")
    assert all(part in about for part in ("score=l2,l=5", "lr 0.001", "seeds 0, 1", "K = 4"))


def test_panels_have_a_score_each_with_batchtopk_in_it(tmp_path: Path) -> None:
    reader = Reader(html(write_sweep(tmp_path)))
    for i, group in enumerate(("l2", "uniform")):
        traces = reader.figures[f"s0-probing_5-{i}"]["data"]
        names = [trace.get("name") for trace in traces if trace.get("name")]
        assert names == [f"sampled:score={group}", "batchtopk"]
        (texts,) = [trace for trace in traces if trace.get("mode") == "markers+text"]
        assert set(texts["text"]) <= {"2", "5"} and texts["text"]
    others = reader.figures["s0-probing_5-2"]["data"]
    assert [trace["name"] for trace in others if trace.get("name")] == ["topk", "released", "batchtopk"]


def test_densities_are_shares_of_all_latents(tmp_path: Path) -> None:
    (config,) = presets.named([presets.batchtopk(M, K)], 0)
    write_sae(tmp_path, config, core=core(0.2, alive=32))
    (trace,) = Reader(html(tmp_path)).figures["s0-density-0"]["data"]
    assert sum(trace["y"][:-1]) == pytest.approx(32 / M)
    assert trace["x"][0] == pytest.approx(1e-7) and trace["x"][-1] == pytest.approx(1.0)


@pytest.mark.parametrize("missing", ["core", "probing", "log", "settings"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    write_sweep(tmp_path)
    for config in grid():
        folder = tmp_path / "saes" / str(config.name)
        if missing == "settings":
            (folder / "sampled_sae.json").unlink()
        elif missing != "log":
            (folder / "evals" / f"{missing}.json").unlink()
    if missing == "log":
        (tmp_path / "log.jsonl").unlink()
    text = html(tmp_path)
    expected = {
        "core": "No SAE has FVU and another metric",
        "probing": "<td>0 of 14</td><td>all</td>",
        "log": "there is no log.jsonl in the folder",
        "settings": "a model without a name, width 16",
    }
    assert expected[missing] in text


def test_one_sae_and_nothing_else(tmp_path: Path) -> None:
    (config,) = presets.named([presets.batchtopk(M, K)], 0)
    write_sae(tmp_path, config)
    text = html(tmp_path)
    assert "1 SAE of" in text and 'class="best"' not in text
    for sentence in ("No SAE has FVU", "The densities are missing", "without the log"):
        assert sentence in text


def test_without_evaluations_training_gives_the_summary(tmp_path: Path) -> None:
    x = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    methods = [presets.batchtopk(32, 3), presets.topk(32, 3)]
    configs = [config for seed in (0, 1) for config in presets.named(methods, seed)]
    ss.train(x, configs, steps=4, batch_size=100, out=tmp_path, progress=False)
    text = html(tmp_path)
    assert "No SAE here has a headline metric yet" not in text and "FVU, held out" in text.split("</section>", 1)[0]


def test_an_sae_without_live_latents(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    put(tmp_path / "saes" / "topk-s0" / "evals" / "core.json", {"result": core(1.2, alive=0)})
    put(tmp_path / "saes" / "topk-s1" / "evals" / "core.json", {"result": core(1.2, alive=0)})
    text = html(tmp_path)
    assert "No latent fires in topk." in text and "no latent fires on the held-out text" in text
    assert ">NaN<" not in text and ">nan<" not in text and ">None<" not in text


def test_a_run_that_is_not_finished_shows_its_curves(tmp_path: Path) -> None:
    text = html(write_run(tmp_path, grid(), finished=False))
    assert "s0-curve-fve" in Reader(text).figures
    assert "training is not finished" in text


def test_models_are_apart_and_one_can_be_chosen(tmp_path: Path) -> None:
    write_sweep(tmp_path / "a", seeds=(0,))
    write_sweep(tmp_path / "b", model="other", layer=3)
    text = html(tmp_path)
    assert text.count("<article") == 2 and "not comparable" in text
    written = write_report([tmp_path], tmp_path / "out", model="other", figures=False)
    assert [sweep.title for sweep in written.sweeps] == ["other, layer 3"]
    assert "not comparable" not in written.page.read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"layer = 7: no such SAE; there are other, layer 3; tiny, layer 1"):
        write_report([tmp_path], tmp_path / "out", layer=7, figures=False)
    unnamed = write_sweep(tmp_path / "c", model=None, layer=None)
    with pytest.raises(UserError, match=r"model = 'x': no such SAE; there are a model without a name$"):
        write_report([unnamed], tmp_path / "out", model="x", figures=False)


def test_damaged_files_are_on_the_page(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    put(tmp_path / "saes" / "topk-s0" / "evals" / "core.json", '{"result": {"norm')
    text = html(tmp_path)
    assert "was it cut short?); left out" in text.replace("&#x27;", "'") or "cut short?; left out" in text
    assert "13 of 14" in text


@pytest.mark.parametrize(
    "name", ["<b>x", "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a'b\"c&lt;"]
)
def test_hostile_text_stays_text(tmp_path: Path, name: str) -> None:
    def tags(model: str, label: str, folder: Path) -> tuple[list[str], Reader]:
        config = presets.sampled(M, K, label, 5, name=label.replace("/", "|"))
        found = write_sae(folder / "x", config, model=model, core=core(), absorption=absorption(None, label))
        put(
            found.parent / "compare.json",
            {
                "seeds": [{"group": label, "seeds": [0, 1]}],
                "saes": [{"name": label, "top_features": [{"latent": 1, "score": 0.5, "explanation": label}]}],
            },
        )
        reader = Reader(html(folder))
        return [tag for tag, _ in reader.tags], reader

    plain, _ = tags("model", "score", tmp_path / "plain")
    hostile, reader = tags(name, name, tmp_path / "hostile")
    assert hostile == plain
    assert any(name in text for text in reader.texts)


def test_the_same_page_twice_and_stale_files_go(tmp_path: Path) -> None:
    write_sweep(tmp_path / "run")
    first = write_report([tmp_path / "run"], tmp_path / "out", figures=False)
    before = first.page.read_text(encoding="utf-8")
    assert (tmp_path / "out" / "tables" / "probing.md").exists()
    again = write_report([tmp_path / "run"], tmp_path / "out", figures=False)
    assert again.page.read_text(encoding="utf-8") == before
    mine = tmp_path / "out" / "tables" / "mine.md"
    mine.write_text("kept")
    for folder in (tmp_path / "run" / "saes").iterdir():
        (folder / "evals" / "probing.json").unlink()
    write_report([tmp_path / "run"], tmp_path / "out", figures=False)
    assert not (tmp_path / "out" / "tables" / "probing.md").exists() and mine.read_text() == "kept"


def test_a_comparison_alone_and_an_odd_one(tmp_path: Path) -> None:
    spread = {"pairs": 1, "mean": 0.81, "sd": None, "low": 0.8, "high": 0.82}
    content = {
        "seeds": [{"group": "l2-l5", "seeds": [0, 1], "mmcs": spread, "random": 0.2, "live": None, "shared": spread}],
        "scores": {"all": {"groups": ["a", "b"], "mmcs": [[1.0, 0.4], [0.3, None]], "pairs": [[0, 1], [1, 0]]}},
        "skipped": [{"what": "live", "who": "a", "reason": "nobody said"}],
    }
    put(tmp_path / "one" / "compare.json", content)
    text = html(tmp_path)
    reader = Reader(text)
    assert reader.figures["compare-0-all"]["data"][0]["z"] == [[1.0, 0.4], [0.3, None]]
    assert "0.810" in text and "live: nobody said (1)" in text
    shutil.rmtree(tmp_path / "one")
    put(tmp_path / "two" / "compare.json", {"seeds": 3, "scores": [], "pairs": None})
    assert "The file holds no comparison." in html(tmp_path)


def _places(content: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [before, *(place for name, item in inside for place in _places(item, (*before, name)))]


def test_odd_values_anywhere_do_not_stop_it(tmp_path: Path) -> None:
    """A file of another version, or edited by hand: something is missing, the page is there."""
    draw = random.Random(0)
    write_sweep(tmp_path, seeds=(0,), ls=(2,), scores=("l2",))
    files = sorted(tmp_path.rglob("*.json"))
    for _ in range(15):
        file = draw.choice(files)
        before = file.read_text()
        content = json.loads(before)
        *way, last = draw.choice([place for place in _places(content) if place])
        part = content
        for name in way:
            part = part[name]
        part[last] = draw.choice([None, [], {}, "x", -1, 1e300, True, [1, 2], {"a": 1}, "\u202e<b>"])
        file.write_text(json.dumps(content))
        text = html(tmp_path)
        assert "batchtopk" in text and "\u202e" not in text
        file.write_text(before)


def test_links_to_the_feature_browsers(tmp_path: Path) -> None:
    write_sweep(tmp_path / "run")
    folder = tmp_path / "run" / "saes" / "batchtopk-s0" / "browser"
    put(folder / "browser.json", {"sae": ".."})
    put(folder / "index.html", "")
    elsewhere = tmp_path / "run" / "pages" / "a #1"
    put(elsewhere / "browser.json", {"sae": "../../saes/topk-s1"})
    put(elsewhere / "index.html", "")
    put(tmp_path / "run" / "broken" / "browser.json", {"sae": 3})
    text = write_report([tmp_path / "run"], tmp_path / "out", figures=False).page.read_text(encoding="utf-8")
    assert '<a href="../run/saes/batchtopk-s0/browser/index.html">batchtopk-s0</a>' in text
    assert '<a href="../run/pages/a%20%231/index.html">topk-s1</a>' in text
    assert text.count('">Feature browser</a>') == 2


def test_the_first_axes_are_those_that_most_saes_have(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    for config in grid()[2:]:
        (tmp_path / "saes" / str(config.name) / "evals" / "absorption.json").unlink()
    text = html(tmp_path)
    chosen = [
        part.split('"', 1)[0]
        for part in text.split('<option value="')[1:]
        if part.split(">", 1)[0].endswith("selected")
    ]
    assert chosen[:2] == ["fvu", "ce_recovered"]


def test_every_section_can_be_reached(tmp_path: Path) -> None:
    reader = Reader(html(write_sweep(tmp_path)))
    ids = {attributes.get("id") for _, attributes in reader.tags}
    links = [
        href[1:] for tag, attributes in reader.tags if tag == "a" and (href := attributes.get("href") or "")[:1] == "#"
    ]
    assert len(links) == 8 and set(links) <= ids
