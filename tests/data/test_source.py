"""What users have: files, data sets, loaders, streams of their own; and what is wrong with some of them."""

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import sampled_sae as ss
from sampled_sae.data import stream as streams
from sampled_sae.data.cache import write, write_cache
from sampled_sae.data.source import NAME, open_source
from sampled_sae.data.stream import ActivationStream
from sampled_sae.utils.errors import UserError
from tests.small_runs import QUIET

X = torch.randn(1000, 6, generator=torch.Generator().manual_seed(0))


def opened(activations, batch=90, **options):
    return open_source(activations, **options).open(batch, 100, 0)[NAME]


def refused(activations, *parts: str, **options) -> None:
    with pytest.raises(UserError) as error:
        stream = opened(activations, **options)
        for index in range(10):
            stream.batch(index)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


# ---- what people have ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".npy", ".safetensors", ".pt"])
def test_a_path_is_what_it_holds(ending, tmp_path):
    path = tmp_path / f"x{ending}"
    if ending == ".npy":
        np.save(path, X.numpy())
    elif ending == ".pt":
        torch.save(X, path)
    else:
        from safetensors.torch import save_file

        save_file({"acts": X}, path)
    for given in (path, str(path)):
        assert torch.equal(opened(given).batch(3), opened(X).batch(3))
    assert opened(path).identity == opened(X).identity


def test_gradients_are_left_behind():
    x = X.clone().requires_grad_()
    assert not opened(x).batch(0).requires_grad
    assert not opened(iter([x])).batch(0).requires_grad
    [sae] = ss.train(x, [ss.batchtopk(16, 2)], steps=2, **QUIET)
    assert sae.d_in == 6


def test_a_data_loader():
    from torch.utils.data import DataLoader, TensorDataset

    plain, named = DataLoader(X, batch_size=37), DataLoader(TensorDataset(X), batch_size=37)
    for loader in (plain, named):
        assert torch.equal(opened(loader).batch(0), X[100:190])


def test_a_column_of_a_data_set():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"acts": X.tolist(), "text": ["a"] * 1000})
    found = opened(data, key="acts")
    assert torch.allclose(found.batch(2), opened(X).batch(2))
    assert torch.allclose(opened(data.to_iterable_dataset(), key="acts").batch(0), X[100:190])
    refused(data, "key = None: the data set has the columns acts, text")
    refused(data, "key = 'text': each row of the column must be a vector", key="text")
    refused(datasets.DatasetDict({"train": data}), "give one split", key="acts")
    wrong = X.clone()
    wrong[777, 2] = torch.nan
    bad = datasets.Dataset.from_dict({"acts": wrong.tolist()})
    for data in (bad, bad.to_iterable_dataset()):
        with pytest.raises(UserError, match=r"NaN or infinity \(first in (its row 777, )?row 777"):
            list(map(opened(data).batch, range(10)))


def test_items_of_several_columns_and_rows_of_sequences():
    """As a DataLoader over a data set gives them."""
    items = [{"acts": part, "ids": torch.arange(len(part))} for part in X.split(100)]
    assert torch.equal(opened(items, key="acts").batch(0), X[100:190])
    refused(items, "key = None: activations: item 0 of the stream has acts, ids; name one of them")
    assert torch.equal(opened([{"acts": part} for part in X.split(100)]).batch(0), X[100:190])
    wrong = X.reshape(50, 20, -1).clone()
    wrong[31, 7, 0] = torch.inf
    refused(wrong, "first in row 31, position 7)")
    refused(np.ones((30, 4), np.int32), "activations are int32 of shape (30, 4): must be floating point")


def test_several_by_name_are_opened_together():
    found = open_source({3: X, "mlp": X + 1}).open(90, 100, 0)
    assert list(found) == ["layer-3", "mlp"]
    with pytest.raises(UserError, match="must hold at least one layer"):
        open_source({})


class Mine(ActivationStream):
    d_in, batch_size, heldout = 6, 90, X[:100]

    def batch(self, index):
        return X[100:190] + index


def test_a_stream_of_ones_own_has_defaults():
    stream = opened(Mine())
    assert (dict(stream.identity), dict(stream.metadata), stream.memory_estimate(), stream.close()) == ({}, {}, 0, None)
    refused(Mine(), "batch_size = 50: the stream of activations gives batches of 90", batch=50)

    class Half:
        def batch(self, index):
            return X

    refused(Half(), "Half: not a whole stream; inherit from sampled_sae.data.stream.ActivationStream")


def test_a_source_is_returned_as_it_is():
    source = open_source(X)
    assert open_source(source) is source
    with pytest.raises(UserError, match="heldout: is not used with Source"):
        open_source(source, heldout=X)


def test_held_out_tokens_of_several_activations():
    several, held = {3: X, "b": 5 * X}, {"b": 5 * X[:50], 3: X[50:90]}
    streams = open_source(several, heldout=held).open(90, 100, 0)
    assert torch.equal(streams["layer-3"].heldout, held[3]) and torch.equal(streams["b"].heldout, held["b"])
    for wrong in (X[:50], {3: X[:50]}, {3: X[:50], "b": X[:50], "c": X[:50]}):
        with pytest.raises(
            UserError, match=r"heldout: must be a dictionary .* by name as activations: \['layer-3', 'b'\]"
        ):
            open_source(several, heldout=wrong)
    for activations, empty in ((X, X[:0]), (several, held | {"b": held["b"][:0]})):
        with pytest.raises(UserError, match="heldout: holds no tokens; give some, or leave it out"):
            open_source(activations, heldout=empty)
    assert torch.equal(open_source({3: X}, heldout=X[:50]).open(90, 100, 0)["layer-3"].heldout, X[:50])


# ---- what is wrong with it -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e38])
@pytest.mark.parametrize("kind", ["tensor", "memory map"])
def test_a_bad_value_is_reported_with_its_true_row(value, kind, tmp_path):
    x = X.clone()
    x[723, 4] = value
    np.save(tmp_path / "x.npy", x.numpy())
    what = "-3e+38 in row 723: its square is beyond the range" if value == -3e38 else "infinity (first in row 723)"
    refused(x if kind == "tensor" else tmp_path / "x.npy", what)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_infinity_in_any_dtype(dtype):
    x = X.to(dtype)
    x[5, 5] = float("inf")
    refused(x, "NaN or infinity (first in row 5)")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: X.to_sparse(), "is a sparse_coo tensor: must be dense"),
        (
            lambda: X.to(torch.float8_e4m3fn),
            "is torch.float8_e4m3fn of shape (1000, 6): must be floating point: float16",
        ),
        (lambda: torch.empty(1000, 6, device="meta"), "is a meta tensor"),
        (lambda: torch.tensor(1.0), "activations have shape ()"),
        (lambda: np.float32(3), "activations = float32: must be a tensor, an array"),
        (lambda: np.array(1.0), "activations have shape ()"),
        (lambda: X.numpy().astype(complex), "activations are complex128 of shape"),
        (lambda: X.to(torch.complex64), "is torch.complex64 of shape"),
        (lambda: np.array([["a", "b"]] * 200), "activations are <U1 of shape"),
        (lambda: torch.empty(0, 6), "activations hold 0 tokens"),
        (lambda: torch.empty(5, 0), "activations have shape (5, 0)"),
    ],
)
def test_arrays_of_a_wrong_kind(make, line):
    refused(make(), line)


def damaged(path: Path, change) -> Path:
    np.save(path, X.numpy())
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(bytes(content))
    return path


def lying(content: bytearray) -> None:
    content[:128] = content[:128].replace(b"(1000, 6)", b"(9999, 6)")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.__setitem__(slice(0, 6), b"nonsen"),
        lambda content: content.__setitem__(slice(10, 40), b"{" * 30),
        lambda content: content.__setitem__(slice(8, 10), b"\xff\xff"),
        lambda content: content.__delitem__(slice(60, None)),
        lambda content: content.clear(),
        lying,
    ],
)
def test_damaged_npy_files(change, tmp_path):
    refused(damaged(tmp_path / "x.npy", change), "x.npy': cannot be read (")


def test_npy_files_of_another_kind(tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        np.savez(file, a=X.numpy())
    refused(tmp_path / "x.npy", "an .npz archive; save the array alone")
    np.save(tmp_path / "x.npy", np.array(3.0))
    refused(tmp_path / "x.npy", "activations have shape ()")
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    refused(tmp_path / "x.npy", "cannot be read (")
    np.save(tmp_path / "x.npy", np.zeros((200, 3), dtype=[("a", "f4")]))
    refused(tmp_path / "x.npy", "activations are [('a', '<f4')]")
    refused(tmp_path / "missing.npy", "missing.npy': no such file")
    refused(tmp_path, "must be a cache's folder or a file ending in .npy, .safetensors, .pt, .pth")


class Code:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ([X], "holds a list; must be a tensor"),
        ("text", "holds a str; must be a tensor"),
        ({"a": {"b": X}}, "holds a dict; must be a tensor"),
        ({"a": X, "b": X}, "key = None: "),
        ({}, "holds nothing"),
        ({3: X, 4: X}, "holds 3, 4; name one of them"),
        (Code(), "cannot be read ("),
    ],
)
def test_pt_files_with_something_else_inside(content, line, tmp_path):
    torch.save(content, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", line)


def test_damaged_pt_and_safetensors_files(tmp_path):
    torch.save(X, tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "x.pt", "x.pt': cannot be read (")
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02]")
    refused(tmp_path / "x.pt", "x.pt': cannot be read (")
    for header in (b"{", json.dumps({"a": {"dtype": "F32", "shape": [9, 9], "data_offsets": [0, 400]}}).encode()):
        (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        refused(tmp_path / "x.safetensors", "x.safetensors': cannot be read (")
    (tmp_path / "x.safetensors").write_bytes((2**60).to_bytes(8, "little"))
    refused(tmp_path / "x.safetensors", "x.safetensors': cannot be read (")


# ---- the same data on resume ---------------------------------------------------------------------------


def test_other_training_rows_are_noticed_on_resume(tmp_path, monkeypatch):
    common = {"steps": 6, "out": tmp_path / "run", **QUIET}
    held = torch.randn(100, 6)
    ss.train(X, [ss.batchtopk(16, 2)], heldout=held, **common)
    other = X.clone()
    other[500] += 1
    with pytest.raises(UserError, match=r"is on other activations: digest was '\w{8}' and is now '\w{8}'"):
        ss.train(other, [ss.batchtopk(16, 2)], heldout=held, resume=True, **common)
    assert len(ss.train(X.numpy(), [ss.batchtopk(16, 2)], heldout=held, resume=True, **common)) == 1


def test_a_large_file_is_identified_by_a_sample_and_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "DIGEST_BYTES", 1000 * 6 * 4 // 10)
    np.save(tmp_path / "x.npy", X.numpy())
    before = opened(tmp_path / "x.npy").identity
    assert before["modified"] == (tmp_path / "x.npy").stat().st_mtime and "modified" not in opened(X).identity
    for rows, changed in (([10], True), ([11], False), (range(500, 520), True)):
        other = X.clone()
        other[list(rows)] += 1
        assert (opened(other).identity["digest"] != before["digest"]) == changed


# ---- caches --------------------------------------------------------------------------------------------


def test_any_source_can_be_cached(tmp_path):
    folder = write(open_source(X.repeat(10, 1)), tmp_path / "cache", 5000, heldout_tokens=50, progress=False)
    stream = open_source(X.repeat(10, 1)).open(4096, 50, 0)[NAME]
    cached = open_source(folder).open(100, 50, 0)[NAME]
    assert torch.equal(cached.rows.take(torch.arange(4096)), stream.batch(0).bfloat16())
    assert cached.metadata["digest"] == stream.identity["digest"]
    with pytest.raises(UserError, match="hook points a, b: a cache holds one"):
        write(open_source({"a": X.repeat(5, 1), "b": X.repeat(5, 1)}), tmp_path / "two", 100, progress=False)


def cache(folder: Path) -> Path:
    write_cache(folder, lambda start: iter([X[start:]]), 1000, {"max_norm": 3.0}, shard_tokens=300)
    return folder


@pytest.mark.parametrize("large", [False, True])
def test_swapped_shards_and_flipped_bits_are_noticed(large, tmp_path, monkeypatch):
    from sampled_sae.data import cache as caches

    if large:
        monkeypatch.setattr(caches, "VERIFY_FIRST", 0)
    first, second = (cache(tmp_path / "swapped") / f"shard-0000{n}.safetensors" for n in (0, 1))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    flipped = cache(tmp_path / "flipped") / "shard-00002.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-700] ^= 1
    flipped.write_bytes(content)
    for folder, name in (("swapped", first.name), ("flipped", flipped.name)):
        with pytest.raises(UserError, match=f"{name}: its bytes have changed"):
            stream = opened(tmp_path / folder)
            for thread in [t for t in caches.threading.enumerate() if t.name == "verify cache"]:
                thread.join()
            stream.batch(0)


def test_caches_of_version_0_are_upgraded_and_grow(tmp_path):
    """Once max_norm was the name of an absolute norm in caches, and of a factor in runs."""
    index = cache(tmp_path) / "cache.json"
    content = json.loads(index.read_text())
    assert content.pop("format_version") == 1 and content.pop("checksum")
    index.write_text(json.dumps(content))
    assert opened(tmp_path).metadata == {"high_norm_limit": 3.0}
    more = torch.cat([X, X])
    write_cache(tmp_path, lambda start: iter([more[start:]]), 1500, {"high_norm_limit": 3.0}, shard_tokens=300)
    assert json.loads(index.read_text())["format_version"] == 1
    assert opened(tmp_path).rows.shape == (1500, 6)


def test_a_changed_index_of_a_cache_is_noticed(tmp_path):
    index = cache(tmp_path) / "cache.json"
    index.write_text(index.read_text().replace('"max_norm": 3.0', '"max_norm": 4.0'))
    with pytest.raises(UserError, match=r"cache\.json: changed since it was written"):
        opened(tmp_path)


def test_nested_tensors_are_refused():
    with pytest.raises(UserError, match="a nested tensor: must be dense"):
        open_source(torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)]))
