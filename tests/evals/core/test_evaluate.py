import math

import pytest
import torch

import sampled_sae as ss
from sampled_sae.evals import bootstrap
from sampled_sae.evals.core.schema import CoreConfig
from tests.evals.core.tools import LAYER, as_json, constant_sae, evaluate_core, identity_sae, random_sae, tiny
from tests.models.tiny_models import WIDTH, WORDS

# ---- against dense formulas --------------------------------------------------------------------------


@torch.no_grad()
def dense(sae, lm, contexts, chosen, batch):
    """The measures of one set of tokens, all at once."""
    x = lm.activations(contexts, [LAYER])[LAYER]
    codes, x_hat = sae.encode(x), sae(x)
    error = (x - x_hat).square().sum(-1)
    inside = [slice(i, i + batch) for i in range(0, len(contexts), batch)]
    around = torch.cat([(x[rows] - x[rows][chosen[rows]].mean(0)).square().sum(-1) for rows in inside])
    return {
        "tokens": int(chosen.sum()),
        "fvu": error[chosen].sum() / (x - x[chosen].mean(0)).square().sum(-1)[chosen].sum(),
        "explained_variance_legacy": (1 - error / around)[chosen].mean(),
        "l0": (codes > 0).sum(-1)[chosen].double().mean(),
        "cosine": torch.cosine_similarity(x, x_hat, dim=-1)[chosen].mean(),
        "relative_norm": (x_hat.norm(dim=-1) / x.norm(dim=-1))[chosen].mean(),
    }


@torch.no_grad()
def dense_loss(lm, contexts, chosen, replace):
    clean, logits = lm.logits(contexts).log_softmax(-1), lm.logits_with(contexts, LAYER, replace).log_softmax(-1)
    ce = -logits[:, :-1].gather(2, contexts[:, 1:, None]).squeeze(2)
    kl = (clean.exp() * (clean - logits)).sum(-1)
    return float(ce[chosen[:, :-1]].mean()), float(kl[chosen].mean())


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_reconstruction_is_the_formula(family, contexts):
    lm, sae = tiny(family), random_sae()
    x = lm.activations(contexts, [LAYER])[LAYER]
    norms = x.norm(dim=2)[:, 2:]
    factor = 0.5 * (norms / norms.median()).max().item() + 0.5  # so that some are above
    result = evaluate_core(sae, lm, LAYER, contexts, CoreConfig(skip_first=2, norm_factor=factor, legacy_batch=3))
    measured = torch.ones(contexts.shape, dtype=torch.bool)
    measured[:, :2] = False
    normal = measured & (x.norm(dim=2) <= factor * norms.median())
    assert 0 < normal.sum() < measured.sum()
    assert result.median_norm == pytest.approx(float(norms.median()))
    for found, chosen in ((result.measured, measured), (result.normal, normal)):
        for name, value in dense(sae, lm, contexts, chosen, 3).items():
            got = getattr(found, name)
            if name == "tokens":
                assert got == value
            else:
                assert got.value == pytest.approx(float(value), rel=1e-9)
                assert got.low <= got.value <= got.high


@pytest.mark.parametrize("put_in", ["saebench", "measured", "normal", "everywhere"])
@torch.no_grad()
def test_loss_is_the_formula(lm, contexts, put_in):
    sae, ignored = random_sae(), (int(contexts[0, 3]), int(contexts[2, 9]))
    given = CoreConfig(skip_first=1, left_out=ignored, norm_factor=1.3, put_in=put_in)
    loss = evaluate_core(sae, lm, LAYER, contexts, given).loss
    measured = ~torch.isin(contexts, torch.tensor(ignored))
    measured[:, 0] = False
    x = lm.activations(contexts, [LAYER])[LAYER]
    normal = measured & (x.norm(dim=2) <= 1.3 * x.norm(dim=2)[measured].median())
    assert 0 < normal.sum() < measured.sum()
    everywhere = torch.ones_like(measured)
    where, ablated = {
        "saebench": (measured, everywhere),
        "measured": (measured, measured),
        "normal": (normal, normal),
        "everywhere": (everywhere, everywhere),
    }[put_in]
    mean = x[normal if put_in == "normal" else measured].mean(0)
    ce, kl = {}, {}
    ce["model"], kl["model"] = dense_loss(lm, contexts, measured, lambda h: h)
    for name, new, places in (
        ("sae", sae(x), where),
        ("zero", torch.zeros(()).double(), ablated),
        ("mean", mean, ablated),
    ):
        ce[name], kl[name] = dense_loss(
            lm, contexts, measured, lambda h, new=new, places=places: torch.where(places[..., None], new, h)
        )
        assert getattr(loss, f"kl_{name}").value == pytest.approx(kl[name], rel=1e-9)
    for name, value in ce.items():
        assert getattr(loss, f"ce_{name}").value == pytest.approx(value, rel=1e-9)
    for base, ending in (("zero", ""), ("mean", "_mean")):
        recovered = (ce[base] - ce["sae"]) / (ce[base] - ce["model"])
        assert getattr(loss, f"ce_recovered{ending}").value == pytest.approx(recovered, rel=1e-6)
        assert getattr(loss, f"kl_recovered{ending}").value == pytest.approx(1 - kl["sae"] / kl[base], rel=1e-6)


@torch.no_grad()
def test_density_is_the_formula(lm, contexts):
    sae = random_sae()
    sae.b_enc[:5] = -1e6  # never
    sae.b_enc[5:7] = 1e3  # always
    x = lm.activations(contexts, [LAYER])[LAYER][:, 3:].flatten(0, 1)
    norms = x.norm(dim=1)
    given = CoreConfig(skip_first=3, norm_factor=1.3)
    result = evaluate_core(sae, lm, LAYER, contexts, given)
    fires = (sae.encode(x) > 0).double()
    normal = norms <= 1.3 * norms.median()
    assert 0 < normal.sum() < len(x)
    for found, density in (
        (result.density, fires[normal].mean(0)),
        (result.density_measured, fires.mean(0)),
    ):
        assert found.over_10_percent.value == float((density > 0.1).double().mean())
        assert found.over_1_percent.value == float((density > 0.01).double().mean())
        middle = density[(density >= 0.001) & (density <= 0.1)].sum() / density.sum()
        assert found.middle_firings == pytest.approx(float(middle))
        assert found.alive == float((density > 0).double().mean())
        assert found.dead == int((density == 0).sum()) >= 5
        assert sum(found.histogram) + found.dead == sae.d_sae
        assert found.histogram[-1] >= 2
        assert len(found.log10_edges) == len(found.histogram) + 1
    assert torch.equal(result.fired.double(), fires[normal].sum(0))


@torch.no_grad()
def test_a_latent_that_fires_at_high_norms_alone_is_dead(lm, contexts):
    x = lm.activations(contexts, [LAYER])[LAYER]
    longest = int(x.norm(dim=2).flatten().argmax())
    sae = random_sae()
    sae.W_enc[:, 0] = 1e3 * x.flatten(0, 1)[longest]
    sae.b_enc[0] = -1e3 * float(x.norm(dim=2).max() ** 2) * 0.999 + 1e3 * float(x.flatten(0, 1)[longest] @ sae.b_dec)
    factor = float(x.norm(dim=2).max() / x.norm(dim=2).median()) * 0.999
    result = evaluate_core(sae, lm, LAYER, contexts, CoreConfig(norm_factor=factor, loss=False))
    assert result.fired[0] == 0
    assert result.density.dead == result.density_measured.dead + 1


# ---- SAEs of which everything is known ---------------------------------------------------------------


def test_an_identity_sae_loses_nothing(lm, contexts):
    result = evaluate_core(identity_sae(), lm, LAYER, contexts)
    for found in (result.measured, result.normal):
        assert found.fvu.value == pytest.approx(0, abs=1e-12)
        assert found.explained_variance_legacy.value == pytest.approx(1)
        assert found.cosine.value == found.relative_norm.value == pytest.approx(1)
        assert found.l0.value == WIDTH
    for name in ("ce_recovered", "ce_recovered_mean", "kl_recovered", "kl_recovered_mean"):
        assert getattr(result.loss, name).value == pytest.approx(1)
    assert result.loss.kl_sae.value == pytest.approx(0, abs=1e-12)
    assert result.trained is None


def test_a_zero_sae_is_zero_ablation(lm, contexts):
    result = evaluate_core(constant_sae(), lm, LAYER, contexts)
    loss = result.loss
    assert loss.ce_sae == loss.ce_zero
    assert loss.kl_sae == loss.kl_zero
    assert loss.ce_recovered.value == loss.kl_recovered.value == 0
    assert result.measured.cosine.value == result.measured.relative_norm.value == result.measured.l0.value == 0
    assert result.density.alive == 0
    assert result.density.dead == 4
    assert result.density.over_1_percent.value == sum(result.density.histogram) == 0


def test_a_mean_sae_is_mean_ablation(lm, contexts):
    mean = lm.activations(contexts, [LAYER])[LAYER].flatten(0, 1).mean(0)
    result = evaluate_core(constant_sae(mean), lm, LAYER, contexts)
    assert result.measured.fvu.value == pytest.approx(1)
    assert result.loss.ce_sae.value == pytest.approx(result.loss.ce_mean.value)
    assert result.loss.kl_sae.value == pytest.approx(result.loss.kl_mean.value)
    assert result.loss.ce_recovered_mean.value == pytest.approx(0, abs=1e-9)


# ---- numbers that do not exist -----------------------------------------------------------------------


def test_one_context_has_values_and_no_intervals(lm, contexts):
    result = evaluate_core(random_sae(config=ss.batchtopk(40, 3)), lm, LAYER, contexts[:1])
    estimates = [*result.measured[1:], *result.trained[1:], *result.density[:2], *result.loss]
    for found in estimates:
        assert found.value is not None
        assert found.low is found.high is None
    as_json(result)


def test_no_variance_and_nothing_to_predict(lm, contexts):
    given = CoreConfig(skip_first=9)
    result = evaluate_core(random_sae(), lm, LAYER, contexts[:1].expand(3, -1), given)
    assert result.measured.fvu == result.measured.explained_variance_legacy == bootstrap.NOTHING
    assert result.measured.l0.value is not None
    assert result.loss.ce_sae == result.loss.ce_recovered == bootstrap.NOTHING
    assert result.loss.kl_sae.value > 0
    as_json(result)


@torch.no_grad()
def test_activations_of_zeros(contexts):
    lm = tiny()
    for weight in lm.model.parameters():
        weight.zero_()
    result = evaluate_core(constant_sae(), lm, LAYER, contexts, CoreConfig(norm_factor=math.inf))
    assert result.measured.tokens == result.normal.tokens == 70
    assert result.measured.fvu == result.measured.cosine == result.measured.relative_norm == bootstrap.NOTHING
    assert result.loss.ce_zero.value == pytest.approx(math.log(len(WORDS)))
    assert result.loss.ce_recovered == result.loss.kl_recovered == bootstrap.NOTHING
    assert as_json(result)["settings"]["norm_factor"] == "inf"


def test_a_negative_threshold_lets_no_zero_fire(lm, contexts):
    sae = constant_sae()
    sae.threshold.fill_(-1.0)
    assert evaluate_core(sae, lm, LAYER, contexts).density.dead == 4
