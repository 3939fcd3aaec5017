from sampled_sae.utils.progress import Bar, Lines, Progress, clock, show, speed


def test_lines_tell_how_far_how_fast_and_how_long(capsys):
    bar = show(100, start=20)
    assert isinstance(bar, Lines)
    for done in range(21, 101):
        bar.update(done, "FVE 0.5")
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert 7 <= len(lines) <= 10
    assert lines[0].startswith("training: 21/100 steps, ")
    assert lines[0].endswith("left  FVE 0.5")


def test_a_terminal_gets_a_bar(capsys):
    from rich.console import Console

    console = Console(force_terminal=True, width=100)
    bar = Bar(10, 0, "measuring", "SAEs", console)
    bar.update(10, "done")
    bar.close()
    printed = capsys.readouterr().out
    assert "10/10" in printed
    assert "SAEs/" in printed


def test_words():
    assert [clock(5), clock(65), clock(3700)] == ["0:05", "1:05", "1:01:40"]
    assert [speed(3, "steps"), speed(0.05, "SAEs")] == ["3.0 steps/s", "3.0 SAEs/min"]
    assert type(show(3, enabled=False)) is Progress
