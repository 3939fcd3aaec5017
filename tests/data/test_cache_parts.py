"""A cache that several processes write together: the same bytes as from one, whatever is interrupted."""

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sampled_sae import cli
from sampled_sae.data.cache import open_cache, write, write_cache
from sampled_sae.data.cache_index import Index, Part
from sampled_sae.data.model_source import ModelActivations
from sampled_sae.data.source import open_source
from sampled_sae.data.text import TextList
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import alone_in
from tests.data.test_cache import WHAT, Source, contents
from tests.data.test_cache import write as write_rows
from tests.data.tools import harvest
from tests.models.tiny_models import make_model, make_tokenizer, save

TOKENS = 100


@pytest.fixture
def whole(tmp_path):
    write_rows(tmp_path / "whole", shard_tokens=9)
    return contents(tmp_path / "whole")


def write_part(folder, number, of, source=None, tokens=TOKENS):
    write_cache(folder, source or Source(), tokens, WHAT, 9, part=Part(number, of))


@pytest.mark.parametrize("of", [1, 2, 3, 4, 12, 20])
def test_the_bytes_do_not_depend_on_the_number_of_writers(of, whole, tmp_path):
    order = list(range(1, of + 1))
    random.Random(of).shuffle(order)
    for number in order[:-1]:
        write_part(tmp_path / "c", number, of)
        with pytest.raises(UserError, match=r"the cache is not finished \(\d+ of 100 tokens\)"):
            open_cache(tmp_path / "c")
    write_part(tmp_path / "c", order[-1], of)
    assert contents(tmp_path / "c") == whole


def test_writers_at_the_same_time(whole, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: write_part(tmp_path / "c", number, 4), range(1, 5)))
    assert contents(tmp_path / "c") == whole


def test_interrupted_parts_continue_with_any_number_of_writers(whole, tmp_path):
    folder = tmp_path / "c"
    for number in (1, 2, 3):
        with pytest.raises(RuntimeError):
            write_part(folder, number, 3, Source(stop=3))
    there = {shard.number for shard in Index.read(folder).shards}
    assert len(there) == 6  # two shards of each
    for number in (1, 2):
        source = Source()
        write_part(folder, number, 2, source)
        assert not {start // 9 for start in source.starts} & there
    assert contents(folder) == whole
    # One writer alone takes over too.
    other = tmp_path / "other"
    write_part(other, 2, 3)
    write_rows(other, shard_tokens=9)
    assert contents(other) == whole


def test_a_complete_cache_grows_in_parts(tmp_path):
    folder = tmp_path / "c"
    for tokens in (40, TOKENS):
        for number in (2, 1):
            write_part(folder, number, 2, tokens=tokens)
    write_rows(tmp_path / "whole", shard_tokens=9)
    assert contents(folder) == contents(tmp_path / "whole")
    write_part(folder, 1, 2)  # nothing to do
    assert contents(folder) == contents(tmp_path / "whole")


def test_errors(tmp_path):
    write_part(tmp_path, 1, 2)
    with pytest.raises(UserError, match="the cache there is another one: model"):
        write_cache(tmp_path, Source(), TOKENS, WHAT | {"model": "other"}, 9, part=Part(2, 2))
    with alone_in(Part(2, 2).folder(tmp_path)), pytest.raises(UserError, match="another process is at work there"):
        write_part(tmp_path, 2, 2)
    for text in ("0/2", "3/2", "2", "a/b", "1/", "-1/2"):
        with pytest.raises(UserError, match="must be I/N with I from 1 to N"):
            Part.parse(text)
    assert Part.parse("2/4") == Part(2, 4)


def test_readers_see_the_same_batches_however_many_they_are(whole, tmp_path):
    def batches(_):
        [stream] = open_source(tmp_path / "whole").open(8, 20, 3).values()
        return torch.stack([stream.heldout[:8].float(), *(stream.batch(n).float() for n in range(20))])

    [one] = map(batches, range(1))
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(one, other) for other in pool.map(batches, range(4)))


DOCUMENTS = tuple(" ".join(f"the{n * i % 97}" for i in range(60)) for n in range(60))


def test_parts_of_a_language_model_agree_on_the_buffer(tiny_model, tmp_path):
    """Its size follows from the free memory where it is unset: the first part decides."""
    config = harvest((1,), buffer_tokens=400)
    settings = {"tokens": 700, "heldout_tokens": 40, "shard_tokens": 100, "progress": False}
    source = ModelActivations(tiny_model, TextList(DOCUMENTS), config, False)
    write(source, tmp_path / "whole", **settings)

    class Late(ModelActivations):
        """Another part begins the cache while this one is opened."""

        def open(self, *arguments, **more):
            if not (tmp_path / "c").exists():
                write(source, tmp_path / "c", part=Part(1, 2), **settings)
            return super().open(*arguments, **more)

    late = Late(tiny_model, TextList(DOCUMENTS), harvest((1,), buffer_tokens=480), False)
    write(late, tmp_path / "c", part=Part(2, 2), **settings)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


@pytest.fixture(scope="module")
def tiny_model():
    from sampled_sae import load_model

    return load_model((make_model("llama"), make_tokenizer()), device="cpu")


def test_torchrun_writes_the_same_cache_as_one_process(tmp_path):
    save(make_model("llama"), tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(DOCUMENTS))
    words = ["cache", "--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")]
    words += ["--layer", "1", "--context", "20", "--source.buffer-tokens", "400", "--tokens", "700", "--device", "cpu"]
    words += ["--heldout-tokens", "40", "--shard-tokens", "100", "--out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ranks = subprocess.run(
        [*torchrun, "-m", "sampled_sae", *words, str(tmp_path / "ranks")],
        **{"capture_output": True, "text": True, "env": os.environ | {"OMP_NUM_THREADS": "1"}},
    )
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stdout.count("0.00 GB in") == 1
    cli.main([*words, str(tmp_path / "whole")])
    assert contents(tmp_path / "ranks") == contents(tmp_path / "whole")
