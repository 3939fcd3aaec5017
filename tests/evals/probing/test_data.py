import csv
import json
import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from sampled_sae.evals.probing import data as probing_hub
from sampled_sae.evals.probing.data import load
from sampled_sae.evals.probing.schema import SAEBENCH_DATASETS, ProbingConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.third_party import install

ROWS = [
    {"text": "good, very\nlong", "label": "yes", "split": "train"},
    {"text": "bad", "label": "no", "split": "train"},
    {"text": "schön \U0001f600", "label": "yes", "split": "test"},
    {"text": "bad", "label": "no", "split": "test"},
    {"text": " \n", "label": "no", "split": "test"},
    {"text": "later", "label": "no", "split": "validation"},
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS = {"a.jsonl": write_jsonl, "a.csv": write_csv, "a.parquet": write_parquet}


def one(source, texts_a_class=100, characters=1000):
    return load([str(source)], texts_a_class, characters)[0]


def refusal(source, **options):
    with pytest.raises(UserError) as caught:
        one(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_with_a_split(tmp_path, name):
    WRITERS[name](tmp_path / name, ROWS)
    found = one(tmp_path / name)
    assert found.name == "a"
    assert found.texts == ["good, very\nlong", "bad", "schön \U0001f600", "bad"]
    assert found.labels == ["yes", "no", "yes", "no"]
    assert found.splits == ["train", "train", "test", "test"]
    assert (found.blank, found.other_split, found.repeated) == (1, 1, 0)


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_without_a_split_uses_a_text_once(tmp_path, name):
    WRITERS[name](tmp_path / name, [{"label": row["label"], "text": row["text"]} for row in ROWS])
    found = one(tmp_path / name)
    assert found.texts == ["good, very\nlong", "bad", "schön \U0001f600", "later"]
    assert found.splits is None
    assert (found.blank, found.repeated) == (1, 1)


def test_labels_may_be_numbers_and_long_texts_are_cut(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "abcdef", "label": 1}, {"text": "xyz", "label": False}])
    found = one(tmp_path / "a.jsonl", characters=4)
    assert found.texts == ["abcd", "xyz"]
    assert found.classes == ["1", "False"]


def test_files_of_the_same_name_keep_apart(tmp_path):
    sources = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_csv(tmp_path / folder / "a.csv", ROWS)
        sources.append(str(tmp_path / folder / "a.csv"))
    assert [data.name for data in load(sources, 9, 99)] == sources


def test_what_no_probe_can_be_made_of_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    assert refusal(path) == f"datasets = '{path}': no such file"
    assert "must be a file ending in .parquet, .jsonl, .csv, or one of sae-probes, LabHC/" in refusal("no/such-dataset")
    for rows, line in (
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "x"}], "all labels are 'x'; must have at least two"),
        ([{"text": " ", "label": "x"}, {"text": None, "label": "y"}], "holds no text (2 blank, 0 of other splits)"),
        ([{"text": "a", "class": "x"}], "row 1: has no column 'label'; its columns are text, class"),
        ([{"content": "a", "label": "x"}], "row 1: has no column 'text'; its columns are content, label"),
        ([{"text": 3, "label": "x"}], "row 1: 'text' is a int: must be text"),
        ([{"text": "a", "label": None}], "row 1: 'label' is missing: must be a word or a number"),
        ([{"text": "a", "label": ["x"]}], "row 1: 'label' is a list: must be a word or a number"),
        ([{"text": "a", "label": "x", "split": None}], "row 1: 'split' is missing"),
        ([ROWS[0], {"text": "a", "label": "x"}], "row 2: a split must be given for all rows or for none"),
        (ROWS[:2], "column 'split' has no 'test'; must have train and test, or leave it out"),
        ([["a", "x"]], "row 1 is a list: must be an object with text and label"),
    ):
        write_jsonl(path, rows)
        assert line in refusal(path)


def test_missing_columns_of_parquet_and_csv(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"body": "a", "label": "x"}])
    assert refusal(tmp_path / "a.parquet").endswith("row 1: has no column 'text'; its columns are body, label")
    write_csv(tmp_path / "a.csv", [{"text": "a", "kind": "x"}])
    assert refusal(tmp_path / "a.csv").endswith("row 1: has no column 'label'; its columns are text, kind")


def test_damaged_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": ')
    assert "cannot be read after row 1" in refusal(tmp_path / "a.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    assert "cannot be read after row 0" in refusal(tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_bytes(b"text,label\n\xff\xfe,x\n")
    assert "cannot be read after row 0" in refusal(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("text,label\na\n")
    assert "line 2 has not as many fields as the header" in refusal(tmp_path / "a.csv")


def test_no_pyarrow(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert refusal(tmp_path / "a.parquet").endswith(f"pyarrow is missing; {install('lm')}")


# ---- the hub -----------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets`, which needs a network: `hub.tables` says what is there."""
    package = SimpleNamespace(tables={}, asked=[])

    def load_dataset(*args, streaming, split, data_files=None):
        assert streaming
        package.asked.append((*args, split, data_files))
        return iter(package.tables[(*args, split)])

    package.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", package)
    return package


def test_the_names_are_saebenchs():
    assert tuple(ProbingConfig().datasets) == SAEBENCH_DATASETS
    assert set(probing_hub.HUB) == set(SAEBENCH_DATASETS)


def test_bios_are_balanced_over_gender(hub):
    for split in ("train", "test"):
        hub.tables["LabHC/bias_in_bios", split] = [
            {"hard_text": f"{split} {p} {g}", "profession": p, "gender": g} for p in (0, 6, 11) for g in (0, 1)
        ]
    found = one("LabHC/bias_in_bios_class_set1")
    assert found.name == "LabHC/bias_in_bios_class_set1"
    assert found.labels == ["0", "0", "6", "6"] * 2
    assert found.groups == ["0", "1"] * 4
    assert found.splits == ["train"] * 4 + ["test"] * 4
    assert found.texts[0] == "train 0 0"


def test_reviews_by_category_and_by_rating(hub):
    name = "canrager/amazon_reviews_mcauley_1and5"
    for split in ("train", "test"):
        hub.tables[name, split] = [
            {"text": f"{c} {r}", "category": c, "rating": r} for c in (1, 2, 9) for r in (1.0, 5.0)
        ]
    by_category, by_rating = one(name), one(f"{name}_sentiment")
    assert by_category.classes == ["1", "2"]
    assert set(by_category.groups) == {"1.0", "5.0"}
    assert by_rating.classes == ["1.0", "5.0"]
    assert by_rating.groups is None
    assert len(by_rating.texts) == 12


def test_code_is_told_by_its_path_and_stops_when_there_is_enough(hub):
    long = "x" * 600

    def rows():
        endings = ["c", "h", "py", "html", "java", "php5", "js", "C"]
        for i in range(100):
            yield {"path": f"a/b.{endings[i % 8]}", "content": f"{i:03d}" * 60 + long}
            yield {"path": "a/short.py", "content": "x" * 534}
        raise AssertionError("read on")

    hub.tables["parquet", "train"] = rows()
    found = one("codeparrot/github-code", texts_a_class=5)
    assert found.classes == ["C", "HTML", "Java", "PHP", "Python"]
    assert all(found.labels.count(label) == 5 for label in found.classes)
    assert found.texts[0] == ("000" * 60 + long)[150:]
    assert found.splits is None
    assert hub.asked[0][-1] == "hf://datasets/codeparrot/github-code/data/train-*.parquet"


def test_europarl_takes_each_language_from_its_pair(hub):
    for language, pair in probing_hub.PAIRS.items():
        texts = [f"{language} {i}" for i in range(9)]
        hub.tables["Helsinki-NLP/europarl", pair, "train"] = [
            {"translation": {language: text, "xx": "other"}} for text in ["", texts[0], *texts]
        ]
    found = one("Helsinki-NLP/europarl", texts_a_class=4)
    assert found.classes == sorted(probing_hub.PAIRS)
    assert found.texts[:4] == ["en 0", "en 1", "en 2", "en 3"]
    assert (found.blank, found.repeated) == (5, 5)


def test_the_hub_fails(hub, monkeypatch):
    assert refusal("fancyzhx/ag_news").startswith(
        "datasets = 'fancyzhx/ag_news': cannot be opened on the Hugging Face hub"
    )
    hub.tables["fancyzhx/ag_news", "train"] = [{"title": "a", "label": 0}]
    assert refusal("fancyzhx/ag_news").endswith("the hub's rows have no 'text' any more; they have title, label")

    def broken():
        yield {"text": "a", "label": 0}
        raise ConnectionError("no\nmore")

    hub.tables["fancyzhx/ag_news", "train"] = broken()
    assert refusal("fancyzhx/ag_news").endswith("the hub's stream broke off at row 1 (no more)")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal("fancyzhx/ag_news").endswith(f"datasets is missing; {install('lm')}")
