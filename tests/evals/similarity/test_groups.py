"""Which SAEs belong together, and which are compared."""

from dataclasses import replace

import pytest
import torch

from sampled_sae.evals.similarity.evaluate import compare_saes
from sampled_sae.evals.similarity.members import SimilarityConfig, group, plan
from sampled_sae.evals.similarity.pair import spread
from sampled_sae.method import presets
from sampled_sae.utils.errors import UserError
from tests.evals.similarity.tools import made, member_of, rows, seeded


def members(*named):
    return [member_of(sae, name) for name, sae in named]


def labels(saes) -> dict[str, list[str]]:
    return {found.label: [member.name for member in found.members] for found in group(saes)}


def pairs(saes, **given) -> list[tuple[str, str, str]]:
    return [(pair.kind, pair.a.name, pair.b.name) for pair in plan(saes, SimilarityConfig(**given)).pairs]


def test_seeds_and_names_do_not_part_saes_and_all_else_does():
    base = presets.batchtopk(12, 2, seed=0, name="x")
    saes = members(
        ("first", made(rows(12, 6), base, layer=3)),
        ("seed", made(rows(12, 6), replace(base, seed=1, name="y"), layer=3)),
        ("layer", made(rows(12, 6), replace(base, seed=1), layer=4)),
        ("k", made(rows(12, 6), replace(base, k=3), layer=3)),
        ("l2", seeded(score="l2")),
        ("foreign", made(rows(12, 6))),
        ("foreign too", made(rows(12, 6))),
    )
    assert labels(saes) == {
        "batchtopk k=2 layer=3": ["first", "seed"],
        "batchtopk k=2 layer=4": ["layer"],
        "batchtopk k=3 layer=3": ["k"],
        "sampled:score=l2,l=2": ["l2"],
        "foreign": ["foreign"],
        "foreign too": ["foreign too"],
    }


def test_runs_of_different_length_are_different():
    short, long = ({"training": {"steps": steps, "batch_size": 8, "seed": 0}} for steps in (10, 20))
    saes = members(("a", seeded(seed=0, **short)), ("b", seeded(seed=1, **short)), ("c", seeded(seed=2, **long)))
    assert labels(saes) == {"batchtopk steps=10": ["a", "b"], "batchtopk steps=20": ["c"]}


def test_inputs_of_another_scale_are_different():
    one, other = ({"training": {"steps": 10, "input_norm": norm}} for norm in ("one", "sqrt_d_in"))
    saes = members(("a", seeded(seed=0, **one)), ("b", seeded(seed=1, **other)))
    assert labels(saes) == {"batchtopk input_norm=one": ["a"], "batchtopk input_norm=sqrt_d_in": ["b"]}


def test_seeds_within_and_the_same_seed_across():
    saes = members(
        *((f"{score}-{seed}", seeded(seed=seed, score=score)) for score in ("l2", None) for seed in range(3))
    )
    assert pairs(saes) == [
        *(("seeds", f"l2-{a}", f"l2-{b}") for a, b in ((0, 1), (0, 2), (1, 2))),
        *(("seeds", f"None-{a}", f"None-{b}") for a, b in ((0, 1), (0, 2), (1, 2))),
        *(("scores", f"l2-{i}", f"None-{i}") for i in range(3)),
    ]
    assert len(pairs(saes, across="none")) == 6
    others = [("scores", f"l2-{a}", f"None-{b}") for a in range(3) for b in range(3) if a != b]
    assert pairs(saes, seeds="different")[6:] == others


def test_the_reference_is_b_and_can_be_chosen():
    saes = members(("b", seeded()), ("l", seeded(score="l2")), ("u", seeded(score="uniform")))
    assert pairs(saes) == [("scores", "l", "b"), ("scores", "u", "b"), ("scores", "l", "u")]
    assert pairs(saes, across="reference") == [("scores", "l", "b"), ("scores", "u", "b")]
    chosen = pairs(saes, across="reference", reference="sampled:score=l2,l=2")
    assert chosen == [("scores", "b", "l"), ("scores", "u", "l")]
    with pytest.raises(UserError, match="reference = 'l9': must be one of batchtopk, sampled:score=l2,l=2"):
        pairs(saes, reference="l9")


def test_no_seed_in_common_is_said():
    saes = members(("a", seeded(seed=0)), ("b", seeded(seed=1, score="l2")), ("c", seeded(seed=2, score="l2")))
    found = plan(saes, SimilarityConfig())
    assert [(p.a.name, p.b.name) for p in found.pairs if p.kind == "scores"] == [("b", "a"), ("c", "a")]
    assert [(s.what, s.who) for s in found.skipped] == [("scores", "sampled:score=l2,l=2 and batchtopk")]
    assert found.skipped[0].reason == "seeds = 'same': there are none, so that different were compared"
    assert not plan(saes, SimilarityConfig(seeds="different")).skipped


def test_the_same_seed_twice_says_nothing_about_seeds():
    twice = members(("a", seeded(seed=0)), ("b", seeded(seed=0)))
    with pytest.raises(UserError, match=r"no two of these 2 SAEs .* a and b: both are batchtopk with seed 0"):
        plan(twice, SimilarityConfig())
    # A copy would count its pairs twice.
    more = [*twice, *members(("c", seeded(seed=1)), ("l", seeded(seed=0, score="l2")))]
    assert pairs(more) == [("seeds", "a", "c"), ("scores", "l", "a")]
    found = compare_saes(more)
    assert [member.name for member in found.members] == ["a", "c", "l"]
    assert found.seeds[0].seeds == [0, 1] and found.seeds[0].mmcs is not None and found.seeds[0].mmcs.pairs == 1
    assert ("seeds", "a and b") in [(item.what, item.who) for item in found.skipped]
    assert [sae["name"] for sae in found.to_dict()["saes"]] == ["a", "c", "l"]
    # Another order of the data is another seed.
    order = members(*((name, seeded(seed=0, training={"seed": data})) for name, data in (("a", 0), ("b", 1))))
    assert pairs(order) == [("seeds", "a", "b")]


def test_too_few_and_unlike_saes_are_refused():
    with pytest.raises(UserError, match="folders: only 'a': a comparison needs two SAEs at least"):
        compare_saes(members(("a", seeded())))
    with pytest.raises(UserError, match="folders: none: a comparison needs two"):
        compare_saes([])
    with pytest.raises(UserError, match="b has width 7 and a has width 6: only SAEs of the same activations"):
        compare_saes(members(("a", seeded()), ("b", seeded(d=7))))


def test_two_of_one_name_are_refused():
    """By their names the decoders are held: two of one name would be compared with themselves."""
    with pytest.raises(UserError, match="members: two are called 'a'; names must be unique"):
        compare_saes(members(("a", seeded()), ("b", seeded(seed=1)), ("a", seeded(seed=2))))


def test_a_reference_in_which_nothing_lives():
    from sampled_sae.evals.results import Liveness

    dead = member_of(seeded(), "b", Liveness(torch.zeros(12, dtype=torch.bool), "a test"))
    live = member_of(seeded(score="l2"), "l", Liveness(torch.ones(12, dtype=torch.bool), "a test"))
    found = compare_saes([dead, live])
    assert found.pairs[0].compared.live is None and found.pairs[0].compared.all.mean is not None
    assert [tuple(s) for s in found.skipped if s.what == "live"] == [("live", "b", "none of its 12 latents is live")]
    assert "live" not in found.scores and found.scores["all"].pairs == [[0, 1], [1, 0]]


def test_spread():
    assert spread([None]) is None
    assert spread([0.5]) == (1, 0.5, None, 0.5, 0.5)
    assert spread([0.2, None, 0.4]) == (2, pytest.approx(0.3), pytest.approx(0.02**0.5), 0.2, 0.4)
