import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampled_sae.evals.autointerp.schema import AutointerpConfig
from sampled_sae.evals.autointerp.trials import NO_APART, NO_SILENT, TOO_FEW, Case, build_case
from tests.evals.autointerp.test_examples import made

BUFFER, LENGTH = 3, 40


def text(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(50, (n, LENGTH), generator=torch.Generator().manual_seed(seed))


def activations(n: int, share: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(n, LENGTH, generator=generator) < share) * (0.1 + torch.rand(n, LENGTH, generator=generator))


def near(a, b) -> bool:
    return a.context == b.context and abs(a.centre - b.centre) <= 2 * BUFFER


@settings(max_examples=25)
@given(st.integers(0, 99))
def test_a_case_is_what_the_protocol_asks_for(seed):
    dense = activations(80, 0.03, seed)
    given = AutointerpConfig(buffer=BUFFER, seed=seed)
    case = build_case(text(80), made(dense), 7, given)
    assert isinstance(case, Case)
    assert len(case.shown) == 15
    assert [max(w.activations) for w in case.shown] == sorted((max(w.activations) for w in case.shown), reverse=True)
    assert [trial.kind for trial in case.trials] == ["detection", "balanced", "fuzzing"]
    assert case.missing == {}
    detection, balanced, fuzzing = case.trials

    # Detection: 4 that fire, and 10 that count as silent whether they fire or not.
    assert len(detection.items) == 14
    assert sum(item.right for item in detection.items) == detection.expected == 4
    named_silent = [item.window for item in detection.items if not item.right]
    assert case.random_that_fire == sum(max(window.activations) > case.cut for window in named_silent)

    # Balanced: what is right fires, what is not is silent, and nothing was shown before.
    assert len(balanced.items) == 10
    assert balanced.expected == 5 == sum(item.right for item in balanced.items)
    for item in balanced.items:
        assert item.right == (max(item.window.activations) > 0)
        assert item.marks is None

    # Fuzzing: right marks are the firing tokens; wrong ones are as many others.
    assert fuzzing.expected == 5 == sum(item.right for item in fuzzing.items)
    for item in fuzzing.items:
        fires = [value > case.cut for value in item.window.activations]
        assert sum(item.marks) == sum(fires) > 0
        assert (item.marks == fires) if item.right else not any(m and f for m, f in zip(item.marks, fires, strict=True))
    for item in balanced.items + fuzzing.items:
        assert not any(near(item.window, window) for window in case.shown)

    # The explainer's statistics leave out what is judged, unless it was shown.
    def inside(windows) -> torch.Tensor:
        places = [w.context * LENGTH + p for w in windows for p in range(w.centre - BUFFER, w.centre + BUFFER + 1)]
        return torch.isin(torch.arange(dense.numel()), torch.tensor(places))

    judged = inside([item.window for trial in case.trials for item in trial.items])
    expected = (dense.flatten() > case.cut) & (inside(case.shown) | ~judged)
    assert torch.equal(case.elsewhere, expected.nonzero().squeeze(1))
    assert torch.equal(case.strength, dense.flatten()[case.elsewhere])


def test_the_cut_is_a_share_of_the_largest_activation():
    dense = activations(80, 0.03)
    case = build_case(text(80), made(dense), 7, AutointerpConfig(buffer=BUFFER, mark_above=0.5))
    inner = dense[:, BUFFER : LENGTH - BUFFER]
    assert case.cut == 0.5 * float(inner.max()) or case.cut > 0.5 * float(inner.max())  # an edge may be larger still
    fuzzing = case.trials[-1]
    for item in fuzzing.items:
        if item.right:
            assert item.marks == [value > case.cut for value in item.window.activations]


def test_draws_do_not_depend_on_other_latents_and_do_on_the_seed():
    dense = activations(80, 0.03)
    given = AutointerpConfig(buffer=BUFFER)
    first, again = (build_case(text(80), made(dense), 7, given) for _ in range(2))
    other = build_case(text(80), made(dense), 7, AutointerpConfig(buffer=BUFFER, seed=1))
    assert first.trials == again.trials
    assert first.shown == again.shown
    assert first.trials != other.trials


def test_too_few_firings():
    dense = torch.zeros(40, LENGTH)
    dense[:18, 20] = torch.linspace(1, 2, 18)
    assert build_case(text(40), made(dense), 7, AutointerpConfig(buffer=BUFFER)) == TOO_FEW
    dense[:19, 20] = torch.linspace(1, 2, 19)
    # 12 and 7 are enough for SAEBench's score, and 4 of them for a small balanced one.
    case = build_case(text(40), made(dense), 7, AutointerpConfig(buffer=BUFFER))
    assert [trial.kind for trial in case.trials] == ["detection", "balanced", "fuzzing"]
    assert [len(trial.items) for trial in case.trials] == [14, 8, 4]


def test_windows_that_overlap_what_is_shown_cannot_be_judged():
    dense = torch.zeros(15, LENGTH)
    dense[:, 20] = torch.linspace(1, 2, 15)  # all of these are shown
    dense[:, 21] = 0.5
    given = AutointerpConfig(buffer=BUFFER, scored_top=1, scored_weighted=0, shown_top=14, shown_weighted=1)
    case = build_case(text(15), made(dense), 7, given)
    assert case.missing == {"balanced": NO_APART, "fuzzing": NO_APART}
    assert [trial.kind for trial in case.trials] == ["detection"]


def test_silent_windows_do_not_overlap_what_is_shown():
    dense = torch.zeros(40, LENGTH)
    dense[:25, 12] = torch.linspace(2, 3, 25)
    dense[:, 20:] = 0.1  # silent windows lie before, and many of them would begin or end in one around position 12
    case = build_case(text(40), made(dense), 7, AutointerpConfig(buffer=BUFFER, fuzzing_each=0))
    silent = [item.window for item in case.trials[1].items if not item.right]
    assert len(silent) == 5 and not any(near(window, other) for window in silent for other in case.shown)


def test_a_latent_that_fires_everywhere_has_no_negatives():
    dense = activations(80, 1.0)
    case = build_case(text(80), made(dense), 7, AutointerpConfig(buffer=BUFFER))
    assert case.missing == {"balanced": NO_SILENT, "fuzzing": NO_SILENT}
    assert case.random_that_fire == 10


def test_scores_that_are_not_wanted():
    given = AutointerpConfig(buffer=BUFFER, balanced_each=0, fuzzing_each=0)
    case = build_case(text(80), made(activations(80, 0.03)), 7, given)
    assert [trial.kind for trial in case.trials] == ["detection"]
    assert case.missing == {}
