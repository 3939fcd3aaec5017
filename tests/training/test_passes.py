import pytest
import torch

import sampled_sae as ss
from sampled_sae.data.source import open_source
from sampled_sae.data.stream import ActivationSource, permutation
from sampled_sae.training import division as passes
from sampled_sae.training.estimate import memory_needed
from tests.small_runs import same_weights

CPU = torch.device("cpu")
STREAM = list(open_source(torch.zeros(100, 16)).open(64, 0, 0).values())


def test_configurations_are_split_by_memory_in_order():
    configs = [ss.batchtopk(m, 4) for m in (100, 100, 100, 5000, 100)]
    assert passes.split(configs, STREAM, 64, CPU, 10**12) == [configs]
    two = int(memory_needed(configs[:2], 16, 64, torch.float32) / passes.USED) + 1
    assert passes.split(configs, STREAM, 64, CPU, two) == [configs[:2], configs[2:3], configs[3:4], configs[4:]]
    assert passes.split(configs, STREAM, 64, CPU, None) == [configs]


def test_several_passes_train_the_same_saes_as_one(activations, tmp_path, monkeypatch):
    configs = [ss.batchtopk(32, 4), ss.topk(32, 4), ss.sampled(32, 4, "l2", 3)]
    settings = {"steps": 12, "batch_size": 100, "seed": 0, "progress": False, "checkpoint_every": 5, "device": "cpu"}
    one = ss.train(activations, configs, out=tmp_path / "one", **settings)
    monkeypatch.setattr(passes, "split", lambda full, *rest: [full[:2], full[2:]])
    opened = []

    class Counted(ActivationSource):
        def open(self, batch_size, heldout_tokens, seed, steps=None):
            opened.append(1)
            return open_source(activations).open(batch_size, heldout_tokens, seed, steps)

    source = Counted()
    several = ss.train(source, configs, out=tmp_path / "several", **settings)
    assert len(opened) == 2
    folders = [sae.folder for sae in several]
    assert [f.relative_to(tmp_path / "several").parts[0] for f in folders] == ["pass-1", "pass-1", "pass-2"]
    for a, b in zip(one, several, strict=True):
        assert same_weights(a, b)
        assert same_weights(a, ss.SAE.load(b.folder))
    monkeypatch.setattr(passes, "split", lambda full, *rest: [full])  # another day, more memory
    again = ss.train(source, configs, out=tmp_path / "several", resume=True, **settings)
    assert [sae.folder for sae in again] == folders
    with pytest.raises(ss.UserError, match=r"passes.json: is of a run with other SAEs"):
        ss.train(source, configs[:1], out=tmp_path / "several", resume=True, **settings)


class Shuffled:
    """As a DataLoader with shuffle=True."""

    def __init__(self, x):
        self.x, self.epoch = x, 0

    def __iter__(self):
        self.epoch += 1
        return iter(self.x[permutation(len(self.x), 0, self.epoch)].split(100))


def test_iterables_in_several_passes(activations, tmp_path, monkeypatch):
    """A list is read again; what can be read once, or begins otherwise each time, is refused before training."""
    configs = [ss.batchtopk(32, 4), ss.topk(32, 4)]
    settings = {"steps": 4, "batch_size": 100, "heldout_tokens": 200, "progress": False, "device": "cpu"}
    parts = list(activations.split(100))
    one = ss.train(parts, configs, out=tmp_path / "one", **settings)
    monkeypatch.setattr(passes, "split", lambda full, *rest: [full[:1], full[1:]])
    for once in (iter(parts), Shuffled(activations)):
        with pytest.raises(ss.UserError, match=r"configs: 2 SAEs do not fit .* 2 passes, .* do not repeat themselves"):
            ss.train(once, configs, out=tmp_path / "once", **settings)
        assert not (tmp_path / "once").exists()
    several = ss.train(parts, configs, out=tmp_path / "several", keep=False, **settings)
    for a, b in zip(one, several, strict=True):
        assert b.device.type == "meta"  # only on disk
        assert same_weights(a, ss.SAE.load(b.folder))
