import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

from sampled_sae.evals.probing import fit as probing_fit
from sampled_sae.evals.probing.evaluate import score
from sampled_sae.evals.probing.fit import fit, fit_adam, fit_kernel, fit_one, products


def problem(n, k, scale=1.0, shift=0.0, seed=0, noise=0.5):
    """Texts that a few columns tell apart more or less, with columns that are often 0 as those of codes are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator, dtype=torch.float64).relu()
    hidden = x @ torch.randn(k, generator=generator, dtype=torch.float64)
    hidden += noise * hidden.std() * torch.randn(n, generator=generator, dtype=torch.float64)
    return x * scale + shift, hidden > hidden.median()


def sklearn(x, positive, C=1.0):
    return LogisticRegression(C=C, tol=1e-10, max_iter=100_000).fit(x.numpy(), positive.numpy())


def objective(x, positive, w, b, C):
    f = x @ w + b
    return float(w @ w / 2 + C * torch.nn.functional.softplus(torch.where(positive, -f, f), threshold=1e9).sum())


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("shift", [0.0, 3.0])
@pytest.mark.parametrize(("n", "k", "C"), [(300, 1, 1.0), (300, 10, 1.0), (60, 3, 0.1)])
def test_coefficients_are_sklearns(n, k, C, scale, shift):
    x, positive = problem(n, k, scale, shift * scale)
    theirs = sklearn(x, positive, C)
    w, b = fit(x[None], positive[None], C=C)
    # scikit-learn's own tolerance limits how near they can be; ours is never the higher one.
    their_w, their_b = torch.from_numpy(theirs.coef_[0]), float(theirs.intercept_[0])
    torch.testing.assert_close(w[0], their_w, rtol=1e-3, atol=1e-5 * float(their_w.abs().max()))
    assert float(b) == pytest.approx(their_b, rel=1e-3, abs=1e-4)
    lowest = objective(x, positive, w[0], b[0], C)
    assert lowest <= objective(x, positive, their_w, their_b, C) * (1 + 1e-12)
    assert ((x @ w[0] + b > 0).numpy() == theirs.predict(x.numpy())).mean() > 0.995


def test_the_gradient_is_zero_at_the_optimum():
    x, positive = problem(200, 6)
    w, b = (part.clone().requires_grad_() for part in fit(x[None], positive[None]))
    f = x @ w[0] + b
    loss = w[0] @ w[0] / 2 + torch.nn.functional.binary_cross_entropy_with_logits(f, positive.double(), reduction="sum")
    for gradient in torch.autograd.grad(loss, [w, b]):
        assert float(gradient.abs().max()) < 1e-8


def test_problems_of_a_batch_do_not_touch_each_other():
    problems = [problem(50 + 7 * i, 4, scale=10.0**i, seed=i) for i in range(-2, 3)]
    longest = max(len(x) for x, _ in problems)
    x, positive, weight = (
        torch.full((5, longest, 4), 9.0),
        torch.ones(5, longest, dtype=torch.bool),
        torch.zeros(5, longest),
    )
    for i, (one, truth) in enumerate(problems):
        x[i, : len(one)], positive[i, : len(one)], weight[i, : len(one)] = one, truth, 1
    w, b = fit(x, positive, weight)
    for i in range(5):
        n = int(weight[i].sum())
        alone_w, alone_b = fit(x[i : i + 1, :n], positive[i : i + 1, :n])
        torch.testing.assert_close(w[i], alone_w[0], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(b[i], alone_b[0], rtol=1e-7, atol=1e-9)


def test_separable_texts_and_columns_of_zeros_have_an_optimum():
    x = torch.zeros(40, 3)
    x[:20, 1] = 50.0
    positive = torch.arange(40) < 20
    w, b = fit(x[None], positive[None])
    theirs = sklearn(x, positive)
    torch.testing.assert_close(w[0], torch.from_numpy(theirs.coef_[0]).double(), rtol=1e-4, atol=1e-6)
    assert float(b) == pytest.approx(float(theirs.intercept_[0]), rel=1e-4)
    assert float(w[0, 0]) == float(w[0, 2]) == 0
    empty, middle = fit(torch.zeros(1, 40, 2), positive[None])
    assert float(empty.abs().max()) == 0
    assert abs(float(middle)) < 1e-12


@given(n=st.integers(4, 40), k=st.integers(1, 60), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_kernel_finds_the_same_as_the_columns(n, k, scale, seed):
    x, positive = problem(n, k, scale, seed=seed)
    if positive.all() or not positive.any():
        positive[0] = ~positive[0]
    w, b = fit(x[None], positive[None])
    a, kernel_b = fit_kernel(x @ x.T, positive)
    torch.testing.assert_close(x.T @ a, w[0], rtol=1e-5, atol=1e-6 * max(1.0, float(w.abs().max())))
    torch.testing.assert_close(x @ (x.T @ a) + kernel_b, x @ w[0] + b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "u"), [(50, 20), (50, 400)])
def test_one_problem_by_either_way_is_sklearns(n, u):
    x, positive = problem(n + 30, u, noise=1.0)
    found = fit_one(x[:n], positive[:n], x[n:])
    theirs = sklearn(x[:n], positive[:n])
    torch.testing.assert_close(found, torch.from_numpy(theirs.decision_function(x[n:].numpy())), rtol=1e-4, atol=1e-4)


def test_products_in_parts(monkeypatch):
    left, right, middle = torch.randn(5, 23), torch.randn(7, 23), torch.randn(23).double()
    monkeypatch.setattr(probing_fit, "COLUMNS", 4)
    torch.testing.assert_close(products(left, right, middle), (left - middle) @ (right - middle).T)


def test_no_convergence_is_an_error(monkeypatch):
    monkeypatch.setattr(probing_fit, "ROUNDS", 1)
    x, positive = problem(60, 3)
    with pytest.raises(RuntimeError, match="did not converge"):
        fit(x[None], positive[None])
    with pytest.raises(RuntimeError, match="did not converge"):
        fit_kernel(x @ x.T, positive)


# ---- columns of any scale ----------------------------------------------------------------------------

SCALES = [1e-6, 1e-3, 1.0, 1e2, 1e4, 1e6, 1e8]


def odd_problem(kind, n, k, scale):
    """As above, and separable, or with a constant column, one twice, a large mean, a massive text or column."""
    x, positive = problem(n, k, noise=0.0 if kind == "separable" else 0.7)
    if kind == "constant":
        x[:, 0] = 1.0
    if kind == "twice":
        x[:, 1] = x[:, 0]
    if kind == "shifted":
        x += 100.0
    if kind == "massive text":
        x[0] *= 1e4
    if kind == "massive column":
        x[:, 0] *= 1e4
    return x * scale, positive


KINDS = ["usual", "separable", "constant", "twice", "shifted", "massive text", "massive column"]


def gradient_share(x, positive, w, b):
    """The largest entry of the gradient as a share of the terms that it is the sum of, around the columns' means."""
    inner, sign = x - x.mean(0), positive.double() * 2 - 1
    pull = -sign * torch.sigmoid(-sign * (inner @ w + (b + x.mean(0) @ w)))
    by_w = (inner.T @ pull + w).abs() / (inner.abs().T @ pull.abs() + w.abs()).clamp_min(1e-300)
    return max(float(by_w.max()), float(pull.sum().abs() / pull.abs().sum()))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(120, 5), (40, 39), (30, 60)])
def test_the_gradient_is_zero_at_any_scale(n, k, kind, scale):
    x, positive = odd_problem(kind, n, k, scale)
    w, b = fit(x[None], positive[None])
    assert gradient_share(x, positive, w[0], b[0]) < 1e-6


@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale <= 1e2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_and_its_limit(kind, scale):
    x, positive = odd_problem(kind, 30, 60, scale)
    inner = x - x.mean(0)
    gram = inner @ inner.T
    if float(gram.diagonal().max()) > probing_fit.LARGE:
        with pytest.raises(ValueError, match="fit_one takes others"):
            fit_kernel(gram, positive)
        return
    a, b = fit_kernel(gram, positive)
    w = inner.T @ a
    assert gradient_share(x, positive, w, b - x.mean(0) @ w) < 1e-6


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "u"), [(60, 20), (30, 60)])
def test_one_problem_of_any_scale_is_found_by_either_way(n, u, kind, scale):
    x, positive = odd_problem(kind, n + 20, u, scale)
    w, b = fit(x[None, :n], positive[None, :n])
    found = fit_one(x[:n], positive[:n], x[n:])
    torch.testing.assert_close(found, x[n:] @ w[0] + b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale >= 1])
def test_a_scale_is_a_weaker_penalty(scale):
    """Columns s times as large are those of C = s^2, which scikit-learn can solve too."""
    x, positive = problem(200, 4, noise=1.0)
    w, b = fit(scale * x[None], positive[None])
    theirs = sklearn(x, positive, scale**2).decision_function(x.numpy())
    torch.testing.assert_close(scale * x @ w[0] + b, torch.from_numpy(theirs), rtol=1e-3, atol=1e-3)


def test_problems_of_several_scales_in_one_batch():
    problems = [odd_problem("twice", 50, 4, scale) for scale in SCALES]
    w, b = fit(torch.stack([x for x, _ in problems]), torch.stack([positive for _, positive in problems]))
    for (x, positive), own_w, own_b in zip(problems, w, b, strict=True):
        assert gradient_share(x, positive, own_w, own_b) < 1e-6


@pytest.mark.parametrize("u", [3, 50])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite(u, wrong):
    x, positive = problem(20, u)
    x[3, 1] = wrong
    with pytest.raises(ValueError, match="not finite"):
        fit_one(x, positive, x)


# ---- scores ------------------------------------------------------------------------------------------


@given(n=st.integers(2, 60), distinct=st.integers(1, 8), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_scores_are_sklearns(n, distinct, seed):
    generator = torch.Generator().manual_seed(seed)
    f = (torch.randint(distinct, (3, n), generator=generator) - distinct // 2).double()
    positive = torch.rand(3, n, generator=generator) < 0.5
    positive[:, 0], positive[:, 1] = True, False
    there = torch.rand(3, n, generator=generator) < 0.8
    there[:, :2] = True
    for i, found in enumerate(score(f, positive, there)):
        values, truth = f[i][there[i]].numpy(), positive[i][there[i]].numpy()
        assert found.accuracy == pytest.approx(accuracy_score(truth, values > 0))
        assert found.f1 == pytest.approx(f1_score(truth, values > 0, zero_division=0))
        assert found.auc == pytest.approx(roc_auc_score(truth, values))


# ---- SAEBench's training -----------------------------------------------------------------------------


def test_adam_learns_and_is_the_same_for_a_seed():
    x, positive = problem(2000, 30, noise=0.2)
    arguments = x[:1500], positive[:1500], x[1500:], positive[1500:], 30
    found = fit_adam(*arguments, seed=1)
    assert torch.equal(found, fit_adam(*arguments, seed=1))
    assert not torch.equal(found, fit_adam(*arguments, seed=2))
    exact = fit_one(x[:1500], positive[:1500], x[1500:])
    right, best = (float(((f > 0) == positive[1500:]).double().mean()) for f in (found, exact))
    assert best > 0.85
    assert right == pytest.approx(best, abs=0.02)
