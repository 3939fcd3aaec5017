import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sampled_sae.method.scores import SCORES, get_score, load_scores, register_input_score, register_score
from sampled_sae.method.scores.builtin import RIDGE
from sampled_sae.utils.errors import UserError

batches = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 6), st.integers(1, 8)),
    elements=st.one_of(st.just(0.0), st.floats(1e-3, 1e3)),
).map(torch.from_numpy)
generator = torch.Generator().manual_seed(0)


def score(name: str, Z: torch.Tensor) -> torch.Tensor:
    return get_score(name)(Z, generator)


@given(batches)
def test_scores_follow_their_formulas(Z):
    tokens = Z.shape[0]
    energy, total = Z.square().sum(0), Z.sum(0)
    q = Z / total.clamp_min(1e-300)
    spread = -(q * (q + 1e-300).log()).sum(0)
    torch.testing.assert_close(score("l2", Z), energy.sqrt())
    torch.testing.assert_close(score("squared_l2", Z), energy + RIDGE)
    torch.testing.assert_close(score("l1", Z), total)
    torch.testing.assert_close(score("frequency", Z), (Z > 0).double().mean(0))
    torch.testing.assert_close(score("entropy", Z), spread, atol=1e-9, rtol=1e-9)
    fired = total > 0
    torch.testing.assert_close(score("low_entropy", Z)[fired], (math.log(tokens) - spread)[fired], atol=1e-9, rtol=1e-9)
    assert (score("low_entropy", Z)[~fired] == -torch.inf).all()
    torch.testing.assert_close(score("participation", Z)[fired], (total.square() / energy)[fired])
    assert (score("participation", Z)[~fired] == 0).all()


@given(batches)
def test_leverage_is_the_ridge_hat_matrix_diagonal(Z):
    ridge = RIDGE * Z.square().sum() / Z.shape[0] + 1e-150
    hat = Z.T @ torch.linalg.inv(Z @ Z.T + ridge * torch.eye(len(Z), dtype=Z.dtype)) @ Z
    torch.testing.assert_close(score("leverage", Z), hat.diagonal(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name, s in SCORES.items() if s.reads != "input" and name != "uniform"])
def test_groups_are_scored_on_their_own(name):
    Z = torch.rand(3, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(score(name, Z), torch.stack([score(name, part) for part in Z]), check_dtype=False)


def test_preactivation_l2_is_the_norm_before_the_relu():
    x, W, b = torch.randn(3, 9, 5).double(), torch.randn(7, 5).double(), torch.randn(7).double()
    q = get_score("preactivation_l2").from_input(x, W, b)
    torch.testing.assert_close(q, torch.linalg.vector_norm(x @ W.T + b, dim=-2))


def test_an_input_score_of_the_wrong_shape_is_refused():
    register_input_score("wrong_shape")(lambda x, W, b: b[:-1])
    try:
        with pytest.raises(UserError, match="returned shape"):
            get_score("wrong_shape").from_input(torch.randn(4, 3), torch.randn(6, 3), torch.randn(6))
    finally:
        del SCORES["wrong_shape"]


def test_l2_prefers_the_spike_and_participation_what_fires_often():
    """The paper's prose has it the other way round for L2: 100 on 5% of the tokens against 10 on 50%."""
    Z = torch.zeros(100, 2)
    Z[:5, 0], Z[:50, 1] = 100, 10
    assert score("l2", Z).argmax() == 0
    assert score("l1", Z).tolist() == [500, 500]
    assert score("participation", Z).argmax() == score("frequency", Z).argmax() == 1


def test_a_users_score_works_by_name(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from sampled_sae import register_score\n@register_score('biggest')\ndef biggest(Z): return Z.amax(dim=-2)\n"
    )
    try:
        load_scores(script)
        assert score("biggest", torch.tensor([[1.0, 5.0], [3.0, 2.0]])).tolist() == [3, 5]
    finally:
        SCORES.pop("biggest", None)


def test_a_built_in_score_stays_what_it_is(tmp_path):
    before = SCORES["l2"]
    for register in (register_score, register_input_score):
        with pytest.raises(
            UserError, match="score = 'l2': is the name of a built-in score; register yours under another"
        ):
            register("l2")(lambda *_: torch.zeros(3))
    script = tmp_path / "mine.py"
    script.write_text("from sampled_sae import register_score\nregister_score('l2')(lambda Z: Z)\n")
    with pytest.raises(UserError, match=r"^scores from '.*mine.py': score = 'l2': is the name of a built-in"):
        load_scores(script)
    assert register_score("l2", sums=("energy",))(before.function) is before.function
    assert SCORES["l2"] == before
    try:
        for value in (1, 2):  # one's own may be written anew
            register_score("mine")(lambda Z, value=value: Z.sum(dim=-2) * value)
        assert score("mine", torch.ones(1, 1)).tolist() == [2]
    finally:
        SCORES.pop("mine", None)


def test_bad_scores_get_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"score = 'l3': unknown; the scores are l2, squared_l2"):
        get_score("l3")
    with pytest.raises(UserError, match="no such Python file"):
        load_scores(tmp_path / "absent.py")
    try:
        register_score("wrong-axis")(lambda Z: Z.sum(dim=-1))
        with pytest.raises(UserError, match=r"'wrong-axis' returned shape \(4,\).*dim=-2"):
            score("wrong-axis", torch.rand(4, 3))
        register_score("nan")(lambda Z: Z.sum(dim=-2) * torch.nan)
        with pytest.raises(UserError, match="'nan' returned NaN"):
            score("nan", torch.rand(4, 3))
    finally:
        SCORES.pop("wrong-axis", None)
        SCORES.pop("nan", None)


@pytest.mark.parametrize("name", ["entropy", "low_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_latents_that_fire_on_one_token_tie(name, dtype):
    """Their entropy is 0, whatever their strength: the pool takes those of the lowest index, not of rounding errors."""
    strength = torch.rand(4096, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 1000 + 1e-3
    for tokens in (1, 7, 200):
        Z = torch.zeros(tokens, 4096, dtype=dtype)
        Z[tokens // 2] = strength
        assert len(score(name, Z).unique()) == 1
    Z[0] = strength
    assert (score("entropy", Z) > 0.6).all()


def test_a_users_score_of_sums_is_validated():
    try:
        register_score("mean_square", sums=("energy",))(lambda sums: sums.energy / sums.tokens)
        assert score("mean_square", torch.tensor([[1.0, 3.0], [1.0, 1.0]])).tolist() == [1, 5]
        register_score("mean_square", sums=("energy",))(lambda sums: sums.energy[:1])
        with pytest.raises(UserError, match=r"'mean_square' returned shape \(1,\) for Z \(4, 3\)"):
            score("mean_square", torch.rand(4, 3))
    finally:
        SCORES.pop("mean_square", None)
    with pytest.raises(UserError, match=r"sums = 'median': must be among total, energy, z_log_z, fired"):
        register_score("mean_square", sums=("median",))


class _NoConstants(TorchDispatchMode):
    """Refuses tensors of Python numbers: on a GPU they are copied from the host, which a CUDA graph cannot capture."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.lift_fresh.default, "a tensor is made from a number"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in SCORES if name not in ("gate", "leverage", "preactivation_l2")])
def test_scores_can_be_captured_as_a_cuda_graph(name):
    Z = torch.rand(6, 8)
    with _NoConstants():
        score(name, Z)
