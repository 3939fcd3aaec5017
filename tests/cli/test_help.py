"""The help: complete, with real defaults, and with examples that can be run."""

import re
import shlex

import pytest
import tyro

from sampled_sae import cli
from sampled_sae.cli.help import groups
from sampled_sae.utils.errors import UserError


def shown(name: str, flag: str, capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.parse(cli.load(name), [flag], f"sampled-sae {name}")
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_what_the_parser_takes(name, monkeypatch, capsys):
    """Flags, defaults and descriptions come from the dataclass; tyro, which parses, lists the same flags."""
    monkeypatch.setenv("COLUMNS", "100")
    command = cli.load(name)
    printed = shown(name, "--help-all", capsys)
    options = [option for group in groups(command) for option in group.options]
    assert all(len(option.text) > 3 for option in options), [o.flag for o in options if len(o.text) <= 3]
    titled = {name for names in getattr(command, "GROUPS", {}).values() for name in names}
    assert titled <= {option.field for option in options}, "GROUPS names a field that is not there"
    assert titled or len(groups(command)[0].options) <= 12, "so many options need GROUPS"
    assert not re.search(r"\bunset\b|Default: (None|\.|\(\)|<[a-z])", printed)
    assert max(map(len, printed.splitlines())) <= 100

    with pytest.raises(SystemExit):
        tyro.cli(command, prog=name, args=["--help"])
    switches = {flag for option in options for flag in re.findall(r"--[\w.\[\]-]+", option.flag)}
    ours = {flag.replace("[no-]", "") for flag in switches}
    theirs = tyro_flags(capsys.readouterr().out)
    assert ours <= theirs
    former = {"--latents", "--help"}
    assert {flag for flag in theirs - ours - former if not re.search(r"(^--|\.)no-", flag)} == set()


def tyro_flags(printed: str) -> set[str]:
    """The flags at the beginning of the lines in tyro's boxes."""
    lines = [line.strip("│| ") for line in printed.splitlines()]
    first = [re.match(r"--[a-zA-Z].*?(?=  |$)", line) for line in lines]  # up to the second column
    return {flag.rstrip(".") for found in first if found for flag in re.findall(r"--[a-zA-Z][\w.-]*", found[0])}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_examples_can_be_parsed(name, monkeypatch, capsys):
    examples = cli.load(name).EXAMPLES
    assert len(examples) == 3
    assert all(line.split()[0] in shown(name, "--help", capsys) for line in examples)
    for line in examples:
        cli.parse(cli.load(name), shlex.split(line), name)


def test_eval_lists_evaluations_and_shows_one(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    brief = shown("eval", "--help", capsys)
    assert len(brief.splitlines()) <= 60
    for name in ("core", "probing", "absorption", "autointerp"):
        assert re.search(rf"^  {name} +\w", brief, re.M)
        assert f"--{name}." in shown("eval", f"--help-{name}", capsys)
    assert "--core.contexts INT" not in brief
    with pytest.raises(UserError, match="--help-probin: not known; must be --help, --help-all, --help-core"):
        cli.parse(cli.load("eval"), ["--help-probin"], "eval")
