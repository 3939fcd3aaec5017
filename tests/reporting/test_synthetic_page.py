"""The page of the synthetic experiment, on small made-up results."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from sampled_sae.reporting.pages import in_script
from sampled_sae.reporting.synthetic import write_page
from sampled_sae.utils.errors import UserError

BUCKETS = ("LF+HA", "HF+HA", "LF+LA", "HF+LA")


def sae(label: str, group: str, l: float | None = None, seed: int = 0, **numbers: Any) -> dict[str, Any]:
    values = {"fve_train": 0.8, "fve_heldout": 0.75, "fve_heldout_threshold": 0.7, "l0_threshold": 60.0, "dead": 0.1}
    return {
        "name": f"{label}-s{seed}",
        "label": label,
        "group": group,
        "l": l,
        "seed": seed,
        "config": {"pool": {"score": group}},
        "fidelity": None,
        "recovery": dict.fromkeys(BUCKETS, 0.5),
        **values,
        **numbers,
    }


def results(*saes: dict[str, Any]) -> dict[str, Any]:
    part = {"features": 10, "p": 0.02, "sigma": 1.0, "mean_activation": 0.8, "std_activation": 0.6}
    data = {"config": {"d": 8}, "coherence": 0.0625, "buckets": [{"name": name, **part} for name in BUCKETS]}
    return {"preset": "demo", "data": data, "train": {"steps": 100, "batch_size": 8}, "saes": list(saes)}


def line(run: dict[str, Any], step: int, **numbers: Any) -> dict[str, Any]:
    return {"step": step, "sae": run["name"], "loss": 2.0, "fve": 0.5, "dead": 0.1, "churn": 0.2, **numbers}


def page(folder: Path, content: dict[str, Any], log: list[dict[str, Any]] | None = None) -> str:
    (folder / "results.json").write_text(json.dumps(content))
    if log is not None:
        (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    path = write_page(folder)
    assert path == folder / "index.html"
    return path.read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Collects what a browser would see: tags with their attributes, text, and the figures' JSON."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.figures: dict[str, Any] = {}
        self.inside: dict[str, str | None] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs) if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside is None:
            self.texts.append(data)
        elif name := self.inside.get("data-figure"):
            self.figures[name] = json.loads(data)

    def values(self, column: int) -> list[str | None]:
        """The sort keys of one column of numbers of the results table."""
        cells = [attrs["data-value"] for tag, attrs in self.tags if tag == "td" and "data-value" in attrs]
        heads = sum(tag == "button" for tag, _ in self.tags) - 1
        return cells[column::heads]


def several() -> list[dict[str, Any]]:
    return [
        sae("BatchTopK", "batchtopk"),
        sae("TopK", "topk", fve_heldout_threshold=0.9),
        *(sae("l2 l=5", "l2", 5.0, seed, fve_heldout_threshold=0.5 + seed / 10) for seed in range(3)),
        *(sae("uniform l=5", "uniform", 5.0, seed, fve_heldout_threshold=-3.0) for seed in range(3)),
    ]


def test_one_file_without_network(tmp_path: Path) -> None:
    text = page(tmp_path, results(*several()), [line(run, step) for run in several() for step in (10, 20)])
    reader = Reader(text)
    for _, attributes in reader.tags:
        for name in ("src", "href"):
            assert not (attributes.get(name) or "").startswith(("http", "//", "/"))
    assert text.count("plotly.js v") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_every_sae_and_figure_is_there(tmp_path: Path) -> None:
    runs = several()
    reader = Reader(page(tmp_path, results(*runs), [line(run, step) for run in runs for step in (10, 20)]))
    shown = " ".join(reader.texts)
    assert all(run["name"] in shown and run["label"] in shown for run in runs)
    curves = {f"curve-{key}" for key in ("loss", "fve", "dead", "churn")}
    assert set(reader.figures) == {"fve", "recovery", "l-0", "l-1"} | curves
    # Each picture is drawn into an element of its own.
    ids = [attributes["id"] for _, attributes in reader.tags if attributes.get("id")]
    assert len(ids) == len(set(ids)) and set(reader.figures) <= set(ids)


def test_summary_follows_the_numbers(tmp_path: Path) -> None:
    text = page(tmp_path, results(*several()))
    best = "<b>Held-out FVE at the inference threshold</b>: no clear winner among all configurations"
    assert f"{best} (2 of them with one seed, which decides nothing). " in text
    assert " Means range from 0.900" in text
    assert "<b>Share of true features recovered</b> is 0.500 for all 4 configurations" in text
    worse = [run | {"fve_heldout_threshold": 0.1} if run["label"] == "TopK" else run for run in several()]
    assert "Means range from 0.700 (<b>BatchTopK</b>)" in page(tmp_path, results(*worse))


def test_one_seed_names_no_winner(tmp_path: Path) -> None:
    text = page(tmp_path, results(*(run for run in several() if run["seed"] == 0)))
    assert "ranges from 0.900 (<b>TopK</b>) to -3.000 (<b>uniform l=5</b>); <b>BatchTopK</b> has 0.700." in text
    assert "the noise between seeds is not known" in text and "best," not in text and 'class="best' not in text


def test_seeds_become_mean_and_range(tmp_path: Path) -> None:
    runs = several()
    log = [line(run, 10, fve=0.1 * run["seed"]) for run in runs]
    text = page(tmp_path, results(*runs), log)
    assert "0.600<small>0.500 to 0.700</small>" in text
    reader = Reader(text)
    dots = next(trace for trace in reader.figures["fve"]["data"] if "inference threshold" in str(trace.get("text")))
    assert dots["error_x"]["array"] == pytest.approx([0, 0, 0.1, 0])
    (curve,) = (trace for trace in reader.figures["curve-fve"]["data"] if trace.get("name") == "l2 l=5")
    assert curve["y"] == pytest.approx([0.1])


def test_a_very_low_fve_does_not_stretch_the_axis(tmp_path: Path) -> None:
    figure = Reader(page(tmp_path, results(*several()))).figures["fve"]
    low, high = figure["layout"]["xaxis"]["range"]
    assert -0.2 < low < high < 1.1
    for trace in figure["data"][1:]:
        assert all(low <= x <= high for x in trace["x"])
    assert figure["data"][-1]["marker"]["symbol"].count("triangle-left") == 1


def test_an_axis_where_all_fves_are_below_zero(tmp_path: Path) -> None:
    bad = dict.fromkeys(["fve_train", "fve_heldout", "fve_heldout_threshold"], -6.0)
    figure = Reader(page(tmp_path, results(sae("BatchTopK", "batchtopk") | bad))).figures["fve"]
    assert figure["layout"]["xaxis"]["range"][0] < -6.0
    assert figure["data"][-1]["marker"]["symbol"] == ["circle"]


def test_groups_keep_their_color(tmp_path: Path) -> None:
    runs = [sae("mine l=5", "mine", 5.0), sae("other l=5", "other", 5.0, fve_heldout_threshold=0.9)]
    reader = Reader(page(tmp_path, results(*runs), [line(run, 10) for run in runs]))
    dots = reader.figures["fve"]["data"][-1]["marker"]["color"]  # best first
    curves = [trace["line"]["color"] for trace in reader.figures["curve-loss"]["data"]]
    against_l = [trace["line"]["color"] for trace in reader.figures["l-0"]["data"]]
    assert dots == curves[::-1] == against_l[::-1]
    assert len(set(dots)) == 2


@pytest.mark.parametrize("name", ["<b>x", "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "&lt;"])
def test_hostile_names_stay_text(tmp_path: Path, name: str) -> None:
    run = sae(name, name, 5.0)
    plain = Reader(page(tmp_path, results(sae("a", "a", 5.0)), [line(sae("a", "a"), 10)]))
    reader = Reader(page(tmp_path, results(run) | {"preset": name}, [line(run, 10)]))
    assert [tag for tag, _ in reader.tags] == [tag for tag, _ in plain.tags]
    assert any(name in text for text in reader.texts)
    escaped = name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert reader.figures["curve-loss"]["data"][0]["name"].startswith(escaped)
    assert "<script" not in "".join(reader.figures["fve"]["layout"]["yaxis"]["ticktext"])


def test_json_cannot_leave_its_script() -> None:
    written = in_script("</script><!-- &")
    assert not set("<>&") & set(written)
    assert json.loads(written) == "</script><!-- &"


def test_missing_numbers(tmp_path: Path) -> None:
    empty = dict.fromkeys(["fve_train", "fve_heldout", "fve_heldout_threshold", "l0_threshold", "dead", "recovery"])
    runs = [sae("BatchTopK", "batchtopk"), sae("none l=1", "l2", 1.0) | empty]
    log = [line(runs[0], 10, churn=None), line(runs[1], 10, churn=None, loss=None)]
    text = page(tmp_path, results(*runs), log)
    assert ">NaN<" not in text and ">None<" not in text and ">nan<" not in text
    reader = Reader(text)
    assert reader.values(0) == ["0.8", ""]
    assert "curve-churn" not in reader.figures
    assert "There are no such numbers." in text


def test_nothing_but_missing_numbers(tmp_path: Path) -> None:
    bare = {"name": "only", "label": "only", "group": "topk"}
    text = page(tmp_path, {"saes": [bare]}, [])
    assert "No SAE has a held-out FVE at the inference threshold." in text
    assert "no FVE against l" in text
    assert "The curves are missing" in text


def test_one_sae(tmp_path: Path) -> None:
    run = sae("BatchTopK", "batchtopk")
    text = page(tmp_path, results(run), [line(run, 10)])
    assert "<b>Held-out FVE at the inference threshold</b> of <b>BatchTopK</b> is 0.700; n = 1." in text
    assert 'class="best"' not in text


def test_long_logs_are_thinned(tmp_path: Path) -> None:
    run = sae("BatchTopK", "batchtopk")
    reader = Reader(page(tmp_path, results(run), [line(run, step) for step in range(1, 1002)]))
    steps = reader.figures["curve-loss"]["data"][0]["x"]
    assert len(steps) <= 200 and steps[-1] == 1001 and steps == sorted(steps)


def test_the_first_step_has_no_churn(tmp_path: Path) -> None:
    run = sae("BatchTopK", "batchtopk")
    reader = Reader(page(tmp_path, results(run), [line(run, step) for step in (0, 10)]))
    assert reader.figures["curve-churn"]["data"][0]["x"] == [10]
    assert reader.figures["curve-loss"]["data"][0]["x"] == [0, 10]


def test_multipliers_are_short(tmp_path: Path) -> None:
    runs = [sae("uniform 50%", "uniform", 1024 / 30), sae("l2 l=0.25", "l2", 0.25), sae("l2 l=5", "l2", 5.0)]
    axis = Reader(page(tmp_path, results(*runs))).figures["l-0"]["layout"]["xaxis"]
    assert axis["ticktext"] == ["0.25", "5", "34.1"] and axis["tickvals"][-1] == pytest.approx(1024 / 30)


def test_damaged_log_lines_are_counted(tmp_path: Path) -> None:
    run = sae("BatchTopK", "batchtopk")
    (tmp_path / "log.jsonl").write_text(json.dumps(line(run, 10)) + '\n[1]\n{"step": 2\n')
    text = page(tmp_path, results(run))
    assert "Unreadable lines of log.jsonl that were left out: 2." in text
    assert "curve-loss" in Reader(text).figures


def test_no_log(tmp_path: Path) -> None:
    text = page(tmp_path, results(*several()))
    assert "The curves are missing: there is no log.jsonl in the folder." in text
    assert not any(name.startswith("curve") for name in Reader(text).figures)


def test_same_page_twice(tmp_path: Path) -> None:
    assert page(tmp_path, results(*several())) == page(tmp_path, results(*several()))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file"),
        ('{"preset": "demo", "saes": [{"na', "not valid JSON"),
        ("[]", "must hold an object"),
        ('{"saes": [1]}', "not the results"),
        ('{"saes": []}', "no SAEs"),
    ],
)
def test_bad_results_are_one_clear_line(tmp_path: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(UserError) as error:
        write_page(tmp_path)
    assert str(tmp_path / "results.json") in str(error.value) and complaint in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "index.html").exists()
