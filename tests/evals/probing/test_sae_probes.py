"""Datasets of the package sae-probes, with a small package of the same layout in its place."""

import csv
import io
from importlib.metadata import PackageNotFoundError, files

import pytest
import zstandard

from sampled_sae.evals.probing import data as sae_probes
from sampled_sae.evals.probing.data import load
from sampled_sae.utils.errors import UserError

TAGS = {
    "5_hist_fig_ismale": "Binary Classification",
    "6_hist_fig_isamerican": "Binary Classification",
    "10_nyc_borough": "Multiclass Classification",
    "11_us_lat": "Continuous Data",
}


def compressed(path, columns, rows):
    text = io.StringIO()
    csv.writer(text).writerows([columns, *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.compress(text.getvalue().encode()))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages with sae-probes, whose code must not be imported."""
    data = tmp_path / "sae_probes" / "data"
    rows = [[name.partition("_")[2], f"cleaned_data/{name}.csv", kind] for name, kind in TAGS.items()]
    compressed(data / sae_probes.LIST, ["Dataset Tag", "Dataset save name", "Data type"], [*rows, ["", "", ""]])
    for number, name in enumerate(TAGS):
        labels = ["yes", "no", "perhaps"][: 2 + (number == 2)]
        texts = [[f"text {i},\nof {name}", 9, labels[i % len(labels)]] for i in range(12)]
        compressed(data / "cleaned_data" / f"{name}.csv.zst", ["prompt", "prompt_len", "target"], texts)
    (tmp_path / "sae_probes" / "__init__.py").write_text("raise RuntimeError\n")
    info = tmp_path / "sae_probes-0.4.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sae-probes\nVersion: 0.4.2\n")
    paths = [path.relative_to(tmp_path) for path in (tmp_path / "sae_probes").rglob("*") if path.is_file()]
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in paths))
    monkeypatch.syspath_prepend(str(tmp_path))
    return data


def test_a_dataset_by_name(site):
    (found,) = load(["sae-probes:hist_fig_ismale"], 100, 20)
    assert found.name == "sae-probes:hist_fig_ismale" and found.source == "sae-probes:hist"
    assert found.classes == ["no", "yes"] and len(found.texts) == 12
    assert found.texts[0] == "text 0,\nof 5_hist_fi" and found.labels[:2] == ["yes", "no"]


def test_all_or_those_of_one_kind(site):
    every = ["sae-probes:hist_fig_ismale", "sae-probes:hist_fig_isamerican", "sae-probes:nyc_borough"]
    assert sae_probes.expanded(["a.csv", "sae-probes"]) == ["a.csv", *every]
    assert sae_probes.expanded(["sae-probes:binary"]) == every[:2]
    assert sae_probes.expanded([every[2], "sae-probes:multiclass"]) == [every[2]]
    assert [item.source for item in load(["sae-probes"], 100, 20)] == [
        "sae-probes:hist",
        "sae-probes:hist",
        "sae-probes:nyc",
    ]


@pytest.mark.parametrize(
    ("tag", "source"),
    [
        ("glue_mnli_neutral", "glue"),
        ("wikidatasex_or_gender", "wikidata"),
        ("wikidata_occupation_isactor", "wikidata"),
        ("high-school", "compound-words"),
        ("living-room", "compound-words"),
    ],
)
def test_sources(tag, source):
    assert sae_probes.source_of(f"sae-probes:{tag}") == f"sae-probes:{source}"


def test_refusals(site):
    with pytest.raises(UserError, match=r"'sae-probes:us_lat': must be sae-probes, sae-probes:binary, .*another name"):
        load(["sae-probes:us_lat"], 100, 20)
    path = site / "cleaned_data" / "10_nyc_borough.csv.zst"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"10_nyc_borough\.csv\.zst: cannot be read"):
        load(["sae-probes:nyc_borough"], 100, 20)
    compressed(path, ["text", "label"], [["a", "b"]])
    with pytest.raises(UserError, match="row 1 has no prompt or no target"):
        load(["sae-probes:nyc_borough"], 100, 20)


def test_without_the_package():
    try:
        installed = files("sae-probes")
    except PackageNotFoundError:
        installed = None
    if installed:
        pytest.skip("sae-probes is installed")
    with pytest.raises(UserError, match="pip install --no-deps sae-probes"):
        load(["sae-probes"], 100, 20)
