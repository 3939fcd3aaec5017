"""Features that another SAE lacks, against two loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from sampled_sae.evals.results import Explanation
from sampled_sae.evals.similarity.evaluate import compare_saes, meanings, unique_features
from sampled_sae.evals.similarity.matching import directions
from sampled_sae.evals.similarity.members import SimilarityConfig
from sampled_sae.models.embedder import open_embedder
from sampled_sae.utils.errors import UserError
from tests.evals.autointerp.tools import need_minilm
from tests.evals.similarity.tools import made, member_of, rows, seeded, slow_best


def prepared(decoder, latents, vectors):
    return meanings(directions(decoder), {latent: Explanation(f"is {latent}", 0.5) for latent in latents}, vectors)


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 8),
    k=st.integers(1, 8),
    at_once=st.integers(1, 40),
    threshold=st.sampled_from([0.5, 0.7, 0.9, 1.0]),
)
@settings(max_examples=30)
def test_each_best_match_is_the_one_that_two_loops_find(seed, n, k, at_once, threshold):
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
    found = unique_features(
        a, b, directions(decoders[1]).rows, "a", "b", SimilarityConfig(unique=5, at_once=at_once, threshold=threshold)
    )
    assert found is not None and (found.latents, found.others, found.left_out) == (n, k, 0)
    assert found.mean == pytest.approx(sum(value[0] for value in expected.values()) / n, abs=1e-5)
    closest = dict(zip(latents[0], slow_best(decoders[0][latents[0]], decoders[1]), strict=True))
    alone = {latent for latent, cosine in closest.items() if cosine < threshold}
    assert found.equals == n - len(alone) and len(found.table) == min(len(alone), 5)
    assert {row.latent for row in found.table} <= alone
    assert [row.overall for row in found.table] == sorted(row.overall for row in found.table)
    lowest = sorted(value[0] for latent, value in expected.items() if latent in alone)[:5]
    assert [row.overall for row in found.table] == pytest.approx(lowest, abs=1e-5)
    for row in found.table:
        overall, decoder, text, match = expected[row.latent]
        assert (row.overall, row.decoder, row.text) == pytest.approx((overall, decoder, text), abs=1e-5)
        assert row.nearest == pytest.approx(closest[row.latent], abs=1e-5) and row.nearest >= row.decoder
        assert row.match == match and row.match_explanation == f"is {match}" and row.explanation == f"is {row.latent}"


def test_latents_without_a_direction_are_left_out_and_counted():
    decoder = rows(4, 3)
    decoder[1] = 0
    vectors = normalize(rows(3, 5), dim=1)
    a = prepared(decoder, [0, 1, 3], vectors)
    assert a.latent == [0, 3] and a.left_out == 1 and torch.equal(a.vectors, vectors[[0, 2]])
    b = prepared(rows(4, 3), [2], vectors[:1])
    config = SimilarityConfig(threshold=1)
    found = unique_features(a, b, b.rows, "a", "b", config)
    assert found is not None and found.left_out == 1 and [row.match for row in found.table] == [2, 2]
    nothing = prepared(torch.zeros(4, 3), [2], vectors[:1])
    assert unique_features(nothing, b, b.rows, "a", "b", config) is None


def test_a_latent_whose_equal_nobody_explained_is_not_unique():
    """The other SAE has the same directions, and explains other latents of them."""
    eye, texts = torch.eye(8), {0: "cats", 1: "dogs", 2: "sums"}
    near = eye.clone()
    near[2] = torch.tensor([0, 0, 0.6, 0, 0, 0, 0, 0.8])
    own = member_of(made(eye), "own", explained={i: Explanation(text, None) for i, text in texts.items()})
    other = member_of(made(near.roll(1, 0)), "other", explained={6: Explanation("chess", None)})
    found = compare_saes([other, own], embedder=Letters)
    table = next(item for item in found.pairs[0].unique if item.of == "own")
    assert (table.latents, table.equals, [row.latent for row in table.table]) == (3, 2, [2])
    assert table.table[0].decoder == 0 and table.table[0].nearest == pytest.approx(0.6)
    strict = compare_saes([other, own], SimilarityConfig(threshold=0.5), embedder=Letters)
    table = next(item for item in strict.pairs[0].unique if item.of == "own")
    assert table.equals == 3 and table.table == []


def test_an_embedder_that_cannot_be_opened_costs_unique_features_alone():
    def absent():
        raise UserError("embedder = 'x': is not there")

    saes = [
        member_of(seeded(score=score), name, explained=explained(_0="cat"))
        for name, score in (("b", None), ("l", "l2"))
    ]
    found = compare_saes(saes, embedder=absent)
    assert found.pairs[0].compared.all.mean is not None and found.pairs[0].compared.matching is not None
    assert found.pairs[0].unique == []
    missing = [item for item in found.skipped if item.what == "explanations"]
    assert sorted(item.who for item in missing) == ["b", "l"]
    assert all("--embedder" in item.reason and "'x': is not there" in item.reason for item in missing)


class Letters:
    """A text as its counts of letters: a real embedding, if a modest one."""

    def embed(self, texts):
        letters = [chr(ord("a") + i) for i in range(26)]
        return normalize(torch.tensor([[float(text.count(c)) for c in letters] for text in texts]), dim=1)


def explained(**texts: str) -> dict[int, Explanation]:
    return {int(name[1:]): Explanation(text, 1.0) for name, text in texts.items()}


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

    found = compare_saes(saes, SimilarityConfig(threshold=1), embedder=open_letters)
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


def test_meaning_counts_with_real_embeddings():
    """Directions that say nothing (all orthogonal), so that meaning alone decides."""
    need_minilm()
    eye = torch.eye(8)
    a = {0: "names of animals such as dogs and cats", 1: "the opening of a chess game", 2: "sums of money in dollars"}
    b = {0: "prices and amounts of money", 1: "pets: cats, dogs, hamsters"}
    saes = [
        member_of(made(rows_, None), name, explained={i: Explanation(t, None) for i, t in texts.items()})
        for name, rows_, texts in (("b", eye[:4], b), ("a", eye[4:], a))
    ]
    found = compare_saes(saes, embedder=lambda: open_embedder("minilm", "cpu"))
    table = next(item for item in found.pairs[0].unique if item.of == "a").table
    assert table[0].latent == 1 and table[0].decoder == 0, "only chess has no equal"
    assert {row.latent: row.match for row in table[1:]} == {0: 1, 2: 0}
    assert table[0].text < 0.3 < table[1].text
