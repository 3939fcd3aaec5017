import itertools
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import sampled_sae
from sampled_sae.data import cache_index
from sampled_sae.data.cache import CacheConfig, bytes_needed, open_cache, write_cache
from sampled_sae.data.source import load_activations
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in

ROWS = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
WHAT = {"model": "tiny", "layers": (1, 2)}
SHARD = "shard-00001.safetensors"


class Source:
    """ROWS from any token on, in batches of odd sizes; after `stop` batches it fails."""

    def __init__(self, rows=ROWS, batch=7, stop=None):
        self.rows, self.batch, self.stop, self.starts = rows, batch, stop, []

    def __call__(self, start):
        self.starts.append(start)
        for number, batch in enumerate(self.rows[start:].split(self.batch)):
            if number == self.stop:
                raise RuntimeError("interrupted")
            yield batch


def write(folder, source=None, tokens=100, what=WHAT, shard_tokens=30, **more):
    write_cache(folder, source or Source(), tokens, what, shard_tokens, **more)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def one_line(error):
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shard_tokens", [1, 7, 30, 99, 100, 1000])
def test_what_is_written_is_read_exactly(shard_tokens, tmp_path):
    write(tmp_path, shard_tokens=shard_tokens)
    cached = open_cache(tmp_path, verify=True)
    assert (cached.width, cached.tokens, len(cached), cached.shape) == (6, 100, 100, (100, 6))
    assert cached.description == {"model": "tiny", "layers": [1, 2]}
    assert torch.equal(cached.take(torch.arange(100)), ROWS.bfloat16())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert torch.equal(torch.cat([load_file(file)["activations"] for file in files]), ROWS.bfloat16())
    assert sum(file.stat().st_size for file in files) == bytes_needed(100, 6, shard_tokens)


def test_bfloat16_is_kept_to_the_bit(tmp_path):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    values = values[values.abs() < 1e17][:, None].expand(-1, 2)
    write(tmp_path, Source(values, batch=999), tokens=len(values), shard_tokens=10_000)
    taken = open_cache(tmp_path).take(torch.arange(len(values)))
    assert torch.equal(taken.view(torch.int16), values.contiguous().view(torch.int16))


def test_contexts_and_empty_batches_are_taken_as_rows(tmp_path):
    write(tmp_path, lambda start: iter([ROWS[:0], ROWS[:20].reshape(4, 5, 6), ROWS[:0], ROWS[20:]]))
    assert torch.equal(open_cache(tmp_path).take(torch.arange(100)), ROWS.bfloat16())


@settings(max_examples=30)
@given(st.lists(st.integers(0, 39)), st.integers(1, 50), st.integers(1, 50))
def test_rows_are_those_of_the_whole_tensor(rows, shard_tokens, batch):
    rows = torch.tensor(rows, dtype=torch.long)
    folder = Path(tempfile.mkdtemp())
    try:
        write(folder, Source(batch=batch), tokens=40, shard_tokens=shard_tokens)
        assert torch.equal(open_cache(folder).take(rows), ROWS.bfloat16()[rows])
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("rows", [[-1, 3], [3, 100]])
def test_rows_out_of_range_are_refused(rows, tmp_path):
    write(tmp_path)
    with pytest.raises(IndexError, match="of a cache of 100 tokens"):
        open_cache(tmp_path).take(torch.tensor(rows))


@pytest.mark.parametrize("stop", range(15))
def test_interrupted_anywhere_and_continued_it_is_the_same(stop, tmp_path):
    write(tmp_path / "whole")
    with pytest.raises(RuntimeError):
        write(tmp_path / "cut", Source(stop=stop))
    assert not list((tmp_path / "cut").glob(".*.tmp"))
    if stop:  # before that, the width is not known and nothing is there
        with pytest.raises(UserError, match=rf"not finished \({stop * 7 // 30 * 30} of 100 tokens\)") as error:
            open_cache(tmp_path / "cut")
        one_line(error)
    source = Source(batch=11)
    write(tmp_path / "cut", source)
    assert source.starts == [stop * 7 // 30 * 30]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("call", range(9))
def test_killed_at_any_write_it_continues_to_the_same(call, tmp_path, monkeypatch):
    """Five indexes and four shards take their places one by one; before any of these, the process may die."""
    write(tmp_path / "whole")
    count, replace = itertools.count(), Path.replace

    def killed(self, target):
        if next(count) == call:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        write(tmp_path / "cut")
    write(tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_leftovers_of_a_killed_writer_go_and_never_count(tmp_path):
    with pytest.raises(RuntimeError):
        write(tmp_path, Source(stop=6))
    (tmp_path / f".{SHARD}.1234.tmp").write_bytes(b"half")
    (tmp_path / SHARD).write_bytes(b"moved into place, but not in the index")
    write(tmp_path)
    open_cache(tmp_path, verify=True)
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_finished_cache_is_not_written_again(tmp_path):
    write(tmp_path)
    source = Source()
    with alone_in(tmp_path):  # nor does it need the lock
        write(tmp_path, source)
    assert source.starts == []


def test_a_finished_cache_grows_but_does_not_shrink(tmp_path):
    write(tmp_path / "whole")
    write(tmp_path / "grown", tokens=40)
    reader = open_cache(tmp_path / "grown")
    source = Source()
    write(tmp_path / "grown", source)
    assert source.starts == [30]
    assert contents(tmp_path / "grown") == contents(tmp_path / "whole")
    assert torch.equal(reader.take(torch.arange(40)), ROWS[:40].bfloat16())
    with pytest.raises(UserError, match=r"tokens = 50: the cache in .* has 100 already") as error:
        write(tmp_path / "grown", tokens=50)
    one_line(error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"what": {"model": "tiny", "layers": [1, 3]}}, r"another one: layers\[1\] was 2 and is now 3"),
        ({"what": {**WHAT, "text": "x"}}, "another one: text was None and is now 'x'"),
        ({"shard_tokens": 31}, "another one: shard_tokens was 30 and is now 31"),
    ],
)
def test_another_cache_is_refused_and_left_alone(change, said, tmp_path):
    write(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=said) as error:
        write(tmp_path, **change)
    one_line(error)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("done", [True, False])
def test_a_missing_or_cut_shard_is_named_and_restored(done, tmp_path):
    write(tmp_path)
    before, path = contents(tmp_path), tmp_path / SHARD
    if done:
        path.unlink()
    else:
        path.write_bytes(before[SHARD][:-5])
    with pytest.raises(UserError, match="shard is missing" if done else "cut short or changed") as error:
        open_cache(tmp_path)
    one_line(error)
    assert SHARD in str(error.value)
    source = Source()
    write(tmp_path, source)
    assert source.starts == [30]
    assert contents(tmp_path) == before


@pytest.mark.parametrize("at", [20, -1])
def test_a_changed_shard_is_found(at, tmp_path):
    write(tmp_path)
    path = tmp_path / SHARD
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=f"{SHARD}: .* delete it and write the cache again") as error:
        open_cache(tmp_path, verify=True)
    one_line(error)
    path.unlink()
    write(tmp_path)
    open_cache(tmp_path, verify=True)


def test_two_writers_are_kept_apart_and_readers_are_not(tmp_path):
    write(tmp_path, tokens=60)
    seen = []

    def batches(start):
        seen.append(open_cache(tmp_path / "other").tokens)
        with pytest.raises(UserError, match="another process is at work there"):
            write(tmp_path)
        yield from Source()(start)

    write(tmp_path / "other", tokens=60)
    write(tmp_path, batches)
    assert seen == [60]


def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    append, count = cache_index.append, itertools.count()

    def full(file, path, data):
        def refuse(rest):
            raise OSError(28, "No space left on device")

        append(SimpleNamespace(write=refuse) if next(count) == 9 else file, path, data)

    monkeypatch.setattr(cache_index, "append", full)
    with pytest.raises(UserError, match=f"{SHARD}: the disk is full; free some space") as error:
        write(tmp_path)
    one_line(error)
    assert sorted(contents(tmp_path)) == ["cache.json", "shard-00000.safetensors"]
    source = Source()
    write(tmp_path, source)
    assert source.starts == [30]
    open_cache(tmp_path, verify=True)


def test_too_little_space_is_said_before_the_first_write(tmp_path, monkeypatch):
    needed = bytes_needed(100, 6, 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(UserError, match=r"the cache needs 0\.00 GB more and 0\.00 GB are free") as error:
        write(tmp_path)
    one_line(error)
    assert contents(tmp_path) == {}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    write(tmp_path)


def test_the_size_is_told_beforehand():
    assert bytes_needed(25_000_000, 768) == pytest.approx(25e6 * 768 * 2, rel=1e-5)
    assert bytes_needed(1, 1) == 128 + 2


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS[:65], "the stream ended after 65 tokens; give more activations, or set tokens = 65"),
        (ROWS[:0], "the stream ended after 0 tokens; it must give"),
        (torch.full((100, 6), 3.4e38), "item 0 of the stream: 3.4e\\+38 in row 0: .* beyond the range of float32"),
        (torch.full((100, 6), float("nan")), "item 0 of the stream: NaN or infinity"),
        (ROWS.long(), "item 0 of the stream is torch.int64"),
    ],
)
def test_a_bad_stream_gets_a_clear_line(rows, said, tmp_path):
    with pytest.raises(UserError, match=said) as error:
        write(tmp_path, lambda start: iter(rows[start:].split(7) if len(rows) else []))
    one_line(error)
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_stream_that_was_too_short_is_finished_at_its_length(tmp_path):
    with pytest.raises(UserError, match="set tokens = 65"):
        write(tmp_path, Source(ROWS[:65]))
    write(tmp_path, Source(ROWS[:65]), tokens=65)
    assert open_cache(tmp_path).tokens == 65


@pytest.mark.parametrize("changed", ["{", "[]", '{"format": "another"}'])
def test_an_index_that_is_none_is_named(changed, tmp_path):
    write(tmp_path)
    (tmp_path / "cache.json").write_text(changed)
    line = r"cache\.json: (not valid JSON|must hold an object|format = .another.: must be)"
    with pytest.raises(UserError, match=line) as error:
        open_cache(tmp_path)
    one_line(error)
    (tmp_path / "cache.json").unlink()
    with pytest.raises(UserError, match=r"cache\.json: no such file"):
        open_cache(tmp_path)
    with pytest.raises(UserError, match=r"a shard without its cache\.json"):
        write(tmp_path)


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 0, 1.5, True, 2**62, 2**70, [None], [{}]])
def test_an_index_with_wrong_values_is_refused(value, tmp_path):
    write(tmp_path)
    whole = json.loads((tmp_path / "cache.json").read_text())
    for name in whole.keys() - {"finished", "format_version"}:
        if name == "description" and value == {}:
            continue
        (tmp_path / "cache.json").write_text(json.dumps({**whole, name: value}))
        with pytest.raises(UserError) as error:
            open_cache(tmp_path)
        one_line(error)
    for name in whole["shards"][0].keys() - {"file"}:
        shards_ = [{**whole["shards"][0], name: value}, *whole["shards"][1:]]
        (tmp_path / "cache.json").write_text(json.dumps({**whole, "shards": shards_}))
        if value == whole["shards"][0][name] and type(value) is int:
            continue
        with pytest.raises(UserError) as error:
            open_cache(tmp_path)
        one_line(error)


def test_settings_check_themselves(tmp_path):
    assert CacheConfig(65, 30).sizes() == [30, 30, 5]
    for settings_, said in [((0,), "tokens = 0: must be at least 1"), ((5, 0), "shard_tokens = 0: must be at least 1")]:
        with pytest.raises(UserError, match=said):
            CacheConfig(*settings_)
    with pytest.raises(UserError, match="must be plain JSON"):
        write(tmp_path / "none", what={"layer": torch.nn})
    assert not (tmp_path / "none").exists()


def test_progress_is_told_the_token_reached(tmp_path):
    told = []
    write(tmp_path, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 100
    assert json.loads((tmp_path / "cache.json").read_text())["finished"] is True


def test_the_trainer_reads_a_cache_as_it_reads_a_tensor(tmp_path):
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    write_cache(tmp_path / "cache", lambda start: iter(x[start:].split(70)), 1000, {"layer": 3}, shard_tokens=300)
    settings = {"steps": 8, "batch_size": 100, "progress": False, "device": "cpu"}
    from_tensor = sampled_sae.train(x, sampled_sae.topk(32, 3), **settings)
    from_cache = sampled_sae.train(load_activations(tmp_path / "cache"), sampled_sae.topk(32, 3), **settings)
    for a, b in zip(from_tensor.parameters(), from_cache.parameters(), strict=True):
        assert torch.equal(a, b)
