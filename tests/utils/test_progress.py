import pytest

from sampled_sae.utils.progress import Bar, Lines, Progress, Rate, clock, counted, show, speed


def test_lines_tell_how_far_how_fast_and_how_long(capsys):
    bar = show(100, start=20)
    assert isinstance(bar, Lines)
    for done in range(21, 101):
        bar.update(done, "FVU 0.5")
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert 7 <= len(lines) <= 10
    assert lines[0] == "training: 21/100 steps, starting  FVU 0.5"
    assert lines[1].startswith("training: 31/100 steps, ")
    assert lines[1].endswith("left  FVU 0.5")


def test_lines_are_not_repeated(capsys):
    bar = Lines(2, 0, "writing", "files")
    for done in (0, 0, 1, 2, 2, 2):
        bar.update(done)
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        *("writing: 0/2 files", "writing: 1/2 files", "writing: 2/2 files")
    ]


def test_the_rate_settles_after_slow_first_steps(monkeypatch):
    now = 0.0
    monkeypatch.setattr("sampled_sae.utils.progress.time.monotonic", lambda: now)
    rate, done, shown = Rate(), 0, []
    for seconds in [20, 10, *[0.5] * 100]:  # compilation, a slow step, then two steps per second
        now, done = now + seconds, done + 1
        shown.append(rate.update(done))
    assert shown[0] == 0 and shown[1] == 0.1  # compilation does not count
    assert shown[-1] == pytest.approx(2, rel=0.1)


def test_the_rate_evens_out_bursts(monkeypatch):
    now = 0.0
    monkeypatch.setattr("sampled_sae.utils.progress.time.monotonic", lambda: now)
    rate, done, shown = Rate(), 0, []
    for _ in range(20):  # a buffer is filled for a minute, then 30 steps take 3 seconds
        for seconds in (60, *[0.1] * 29):
            now, done = now + seconds, done + 1
            shown.append(rate.update(done))
    assert all(0.7 < 30 / 63 / found < 1.4 for found in shown[300:])


def test_nothing_starts_at_the_end(capsys):
    Lines(8, 0, "held-out tokens", "tokens").update(8)
    assert capsys.readouterr().err == "held-out tokens: 8/8 tokens\n"


def test_a_terminal_gets_a_bar(capsys):
    from rich.console import Console

    console = Console(force_terminal=True, width=100)
    bar = Bar(10, 0, "measuring", "SAEs", console)
    bar.update(1)
    bar.update(10, "done")
    bar.close()
    printed = capsys.readouterr().out
    assert "10/10 SAEs" in printed
    assert "SAEs/" in printed


def test_words():
    assert [clock(5), clock(65), clock(3700), clock(1e6)] == ["0:05", "1:05", "1:01:40", "12 days"]
    assert [speed(2.5, "steps"), speed(0.05, "SAEs")] == ["2.5 steps/s", "3 SAEs/min"]
    assert speed(300, "steps", (4096, "tokens")) == "1.2M tokens/s"
    assert [counted(n) for n in (5, 0.25, 123.4, 9999, 56_700, 999_999, 25e6)] == [
        *("5", "0.2", "123", "9,999", "56.7k", "1.0M", "25.0M")
    ]
    assert type(show(3, enabled=False)) is Progress
