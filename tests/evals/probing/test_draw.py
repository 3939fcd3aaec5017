from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampled_sae.evals.probing.data import Labelled
from sampled_sae.evals.probing.features import draw
from sampled_sae.evals.probing.schema import ProbingConfig
from sampled_sae.utils.errors import UserError


def dataset(sizes, split=True, groups=None):
    """`sizes`: texts of each class to fit to and to test on, by label."""
    found = Labelled("made up")
    number = 0
    for label, counts in sizes.items():
        for side, count in zip(("train", "test"), counts, strict=True):
            for i in range(count):
                group = None if groups is None else groups(i)
                found.add(f"{label} {number}", label, side if split else None, group)
                number += 1
    return found


def config(**given):
    return ProbingConfig(datasets=("x.csv",), **({"fewest_texts": 4} | given))


def sides(data, task):
    return ((task.train, "train"), (task.test, "test"))


@given(
    sizes=st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(4, 60), st.integers(1, 30)), min_size=2),
    train=st.integers(2, 60),
    test=st.integers(2, 40),
    split=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_each_task_is_balanced_and_its_sides_apart(sizes, train, test, split, seed):
    data = dataset(sizes, split)
    given = config(train_texts=train, test_texts=test, seeds=(seed, seed + 1), fewest_texts=1)
    try:
        found = draw(data, given)
    except UserError as error:
        assert not split
        assert "must have two classes with enough texts" in str(error)
        return
    left = sorted(sizes.keys() - found.skipped.keys())
    assert [(task.seed, task.label) for task in found.tasks] == [(s, c) for s in given.seeds for c in left]
    if split:
        assert not found.skipped
    for task in found.tasks:
        for (part, side), most in zip(sides(data, task), (train, test), strict=True):
            rows = part.rows.tolist()
            assert len(set(rows)) == len(rows) <= most
            assert int(part.positive.sum()) * 2 == len(rows) > 0
            labels = [data.labels[row] for row in rows]
            assert [label == task.label for label in labels] == part.positive.tolist()
            if split:
                assert {data.splits[row] for row in rows} == {side}
                # Negatives even over the other classes, as far as these have texts.
                negatives = Counter(label for label in labels if label != task.label)
                pools = {c: min(n[side == "test"], most // 2) for c, n in sizes.items() if c != task.label}
                full = max(negatives.values())
                assert all(negatives[c] in (full, full - 1) or negatives[c] == pools[c] for c in pools)
                assert len(rows) // 2 == min(sizes[task.label][side == "test"], most // 2, sum(pools.values()))
        assert not set(task.train.rows.tolist()) & set(task.test.rows.tolist())


def test_seeds_draw_other_texts_and_one_seed_the_same():
    data = dataset({"a": (100, 30), "b": (100, 30), "c": (100, 30)})
    given = config(train_texts=40, test_texts=20, seeds=(0, 1))
    first, again = draw(data, given), draw(data, given)
    for a, b in zip(first.tasks, again.tasks, strict=True):
        assert a.train.rows.equal(b.train.rows)
        assert a.test.rows.equal(b.test.rows)
    rows = {task.seed: set(task.train.rows.tolist()) for task in first.tasks if task.label == "a"}
    assert rows[0] != rows[1]
    alone = draw(data, config(train_texts=40, test_texts=20, seeds=(1,)))
    assert alone.tasks[0].train.rows.equal(first.tasks[3].train.rows)


def test_negatives_come_from_the_pools_of_the_other_classes():
    data = dataset({"a": (50, 10), "b": (50, 10), "c": (50, 10)})
    tasks = draw(data, config(train_texts=20, test_texts=10)).tasks
    pools = {task.label: set(task.train.rows[task.train.positive].tolist()) for task in tasks}
    for task in tasks:
        assert set(task.train.rows[~task.train.positive].tolist()) <= set().union(*pools.values()) - pools[task.label]


def test_two_classes_are_two_tasks_on_the_same_texts():
    tasks = draw(dataset({"a": (30, 10), "b": (30, 10)}), config(train_texts=40, test_texts=10)).tasks
    assert len(tasks) == 2
    assert set(tasks[0].train.rows.tolist()) == set(tasks[1].train.rows.tolist())
    assert set(tasks[0].test.rows.tolist()) == set(tasks[1].test.rows.tolist())


def test_groups_are_drawn_evenly():
    data = dataset({"a": (90, 30), "b": (90, 30)}, groups=lambda i: "rare" if i % 3 == 0 else "usual")
    for task in draw(data, config(train_texts=80, test_texts=24)).tasks:
        for part, each in ((task.train, 20), (task.test, 6)):
            positives = part.rows[part.positive].tolist()
            assert Counter(data.groups[row] for row in positives) == {"rare": each, "usual": each}


def test_a_dataset_without_a_split_is_split_in_the_proportion_that_is_asked_for():
    data = dataset({"a": (100, 0), "b": (50, 0)}, split=False)
    tasks = draw(data, config(train_texts=4000, test_texts=1000)).tasks
    assert [len(task.train.rows) for task in tasks] == [80, 80]
    assert [len(task.test.rows) for task in tasks] == [20, 20]


def test_classes_with_too_few_texts_are_skipped_and_said():
    data = dataset({"a": (30, 10), "b": (30, 10), "few": (19, 10), "untested": (30, 4)})
    found = draw(data, config(fewest_texts=20))
    assert {task.label for task in found.tasks} == {"a", "b"}
    assert found.skipped == {
        "few": "19 texts to fit to and 10 to test on, fewer than 20 and 5",
        "untested": "30 texts to fit to and 4 to test on, fewer than 20 and 5",
    }
    used = {data.labels[row] for task in found.tasks for row in task.train.rows.tolist()}
    assert used == {"a", "b"}
    with pytest.raises(UserError) as caught:
        draw(dataset({"a": (30, 10), "few": (1, 10)}), config(fewest_texts=20))
    assert str(caught.value) == (
        "datasets = 'made up': must have two classes with enough texts, but 'few' has 1 texts to fit to and 10 to test "
        "on, fewer than 20 and 5"
    )
