"""Direct effects on the output against what the model itself does when a row is added to its last layer."""

import pytest
import torch

from sampled_sae.browser.collect import final_norm, measure_norm, neighbors, output_tokens, unembedding
from sampled_sae.browser.latents import NONE
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils.errors import UserError
from tests.models.tiny_models import FAMILIES, LAYERS, WIDTH, WORDS, make_model, make_tokenizer


def language_model(family: str) -> LanguageModel:
    return LanguageModel(make_model(family), make_tokenizer(), family)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_against_the_model(family):
    """For a row at right angles to the residual stream, a small step changes the logits as said, up to one factor."""
    model, tokens = language_model(family), torch.tensor([[5, 9, 20, 7]])
    softcap = getattr(model.model.config, "final_logit_softcapping", None)
    assert softcap is None or family == "gemma2"
    model.model.config.final_logit_softcapping = None
    stream = model.activations(tokens, [LAYERS - 1])[LAYERS - 1][0, -1]
    row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(3))
    out = unembedding(model)
    assert out.centered == (family in ("gpt2", "gpt_neox"))
    across = stream - stream.mean() if out.centered else stream
    row = row - row.mean() if out.centered else row
    row = row - across * (row @ across) / (across @ across)

    def logits(step: float) -> torch.Tensor:
        def replace(h):
            h = h.clone()
            h[0, -1] += step * row
            return h

        return model.logits_with(tokens, LAYERS - 1, replace)[0, -1].double()

    change = logits(0.01) - logits(-0.01)
    change -= change.mean()
    said = out.project(row[None])[0].double()
    assert float(torch.nn.functional.cosine_similarity(change, said, dim=0)) > 0.9999
    found = output_tokens(row[None], model, 4)
    order = change.argsort(descending=True)
    assert found.promoted[0].tolist() == order[:4].tolist()
    assert found.suppressed[0].tolist() == order.flip(0)[:4].tolist()
    torch.testing.assert_close(found.promoted_by[0], said[order[:4]].float())
    torch.testing.assert_close(found.suppressed_by[0], said[order.flip(0)[:4]].float())


def test_half_precision_keeps_the_norm_exact():
    model = language_model("gemma2")
    gain, _ = measure_norm(final_norm(model), model)
    model.model.to(torch.bfloat16)
    rounded, centered = measure_norm(final_norm(model), model)
    torch.testing.assert_close(gain, 1 + model.model.model.norm.weight.float(), rtol=0.01, atol=0.01)
    torch.testing.assert_close(rounded, 1 + model.model.model.norm.weight.float(), rtol=1e-4, atol=1e-5)
    assert not centered


def test_rows_in_pieces(monkeypatch):
    model, rows = language_model("llama"), torch.randn(40, WIDTH)
    whole, ticks = output_tokens(rows, model, 3), []
    monkeypatch.setattr("sampled_sae.browser.collect.AT_ONCE", 7 * len(WORDS))
    parts = output_tokens(rows, model, 3, ticks.append)
    assert all(torch.equal(a, b) for a, b in zip(whole[::2], parts[::2], strict=True))
    assert ticks == [7] * 5 + [5]


def test_odd_widths():
    model = language_model("llama")
    norm = torch.nn.LayerNorm(15)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    model.width = 15
    gain, centered = measure_norm(norm, model)
    torch.testing.assert_close(gain, norm.weight.detach(), rtol=1e-4, atol=1e-5)
    assert centered


def test_a_model_without_a_final_norm():
    model = language_model("llama")
    model.model.model.norm = torch.nn.Identity()
    with pytest.raises(UserError, match="cannot identify the final norm of llama"):
        output_tokens(torch.randn(2, WIDTH), model, 3)


def test_rows_beyond_the_tokenizer_are_no_tokens():
    model = language_model("llama")
    model.model.resize_token_embeddings(len(WORDS) + 40)
    found = output_tokens(torch.randn(30, WIDTH), model, 10)
    assert int(torch.stack((found.promoted, found.suppressed)).max()) < len(WORDS)


# ---- nearest latents, against all cosines at once ----


def test_against_all_cosines(monkeypatch):
    monkeypatch.setattr("sampled_sae.browser.collect.ROWS_AT_ONCE", 100)
    a, b = torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(0))
    a[4], a[11] = 0, a[12]
    cosine = torch.nn.functional.cosine_similarity(a[:, None], a[None], dim=2)
    cosine[:, 4] = -torch.inf
    cosine.fill_diagonal_(-torch.inf)
    own = neighbors(a, None, 3)
    rows = [row for row in range(30) if row != 4]
    # Twins are as near as each other, so that their order is open.
    torch.testing.assert_close(own.cosine[rows], cosine.topk(3).values[rows])
    torch.testing.assert_close(own.cosine[rows], cosine.gather(1, own.latent.clamp_min(0))[rows])
    assert all(len(set(row)) == 3 for row in own.latent[rows].tolist())
    assert own.latent[4].tolist() == [NONE] * 3 and own.cosine[4].isnan().all()
    assert own.latent[11, 0] == 12 and own.latent[12, 0] == 11, "a twin is another latent, not the same"
    there = neighbors(a, b, 3)
    cosine = torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=2)
    assert torch.equal(there.latent[rows], cosine.topk(3).indices[rows])
    torch.testing.assert_close(there.nearest[rows], cosine.amax(1)[rows])


def test_fewer_than_asked_for():
    found = neighbors(torch.eye(3), None, 5)
    assert (found.latent >= 0).sum(1).tolist() == [2, 2, 2] and (found.latent[:, 2:] == NONE).all()
    assert neighbors(torch.eye(3), None, 0).nearest.isnan().all()
    assert neighbors(torch.eye(3), torch.zeros(2, 3), 2).nearest.isnan().all()
