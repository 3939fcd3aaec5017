"""Wrongly typed values of the command line: one line with the flag."""

import io
import re

import pytest

from sampled_sae import cli
from sampled_sae.utils.errors import UserError

REQUIRED = {"cache": ["--tokens", "5", "--out", "o"], "eval": ["f"], "browse": ["f", "--text", "t", "--out", "o"]}
"""Arguments that must be there; of the other commands, `FOLDER --out o` or `--out o`."""


def flags(name, capsys):
    """The flags that take numbers or a choice."""
    with pytest.raises(SystemExit):
        cli.parse(cli.load(name), ["--help-all"], name)
    return dict.fromkeys(re.findall(r"(--[a-z][\w.-]*) \[?(?:INT|FLOAT|\{)", capsys.readouterr().out))


NAMES = ["train", "cache", "eval", "compare", "browse", "reproduce", "synthetic"]


@pytest.mark.parametrize("name, encoding", [("cache", "ascii"), *((name, "utf-8") for name in NAMES)])
def test_wrong_values(name, encoding, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    command, found = cli.load(name), flags(name, capsys)
    needed = REQUIRED.get(name, ["f", "--out", "o"] if name in ("compare", "merge") else ["--out", "o"])
    assert len(found) >= 4
    monkeypatch.setenv("COLUMNS", "40")  # does not break the line
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    for flag in list(found)[:: -(-len(found) // 6)]:  # parsing takes some time
        with pytest.raises(UserError) as error:
            cli.parse(command, [*needed, flag, "x" * 300], name)
        assert re.match(rf"\S*{flag}\S* = '?'?x{{190,}}\.\.\.'?: must be [^\n]+$", str(error.value)), str(error.value)


@pytest.mark.parametrize(
    "words, line",
    [
        (["--steps"], "--steps: needs a value"),
        (["f", "--resume", "x y"], "x y: not known; train --help lists the options"),
        (["f", "--resume", ""], "'': not known; train --help lists the options"),
    ],
)
def test_missing_and_unknown_words(words, line):
    with pytest.raises(UserError, match=re.escape(line)):
        cli.parse(cli.load("train"), [*words, "--out", "o"], "train")


@pytest.mark.parametrize(
    "name, words, names",
    [
        ("resume", [], "FOLDER"),
        ("convert", [], "SOURCE, OUT"),
        ("convert", ["sae"], "OUT"),
        ("push", ["sae", "--private"], "REPO"),
        ("merge", [], "--out"),
        ("cache", [], "--out, --tokens"),
    ],
)
def test_missing_arguments_are_named_as_in_the_help(name, words, names):
    with pytest.raises(UserError, match=rf"^{names}: is missing; {name} --help describes it$"):
        cli.parse(cli.load(name), words, name)


@pytest.mark.parametrize("words", ["sweep status {}", "resume {}", "study {}", "report {} --out o", "convert {} o"])
def test_names_that_are_too_long_for_a_file(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(words.format("n" * 5000).split())
    printed = capsys.readouterr().err
    assert end.value.code == 2 and printed.startswith("error: ") and printed.count("\n") == 1
    assert not list(tmp_path.iterdir())
