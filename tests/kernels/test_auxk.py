from dataclasses import replace
from functools import partial

import pytest
import torch

import sampled_sae as ss
from sampled_sae import kernels
from sampled_sae.kernels import masked
from sampled_sae.kernels.auxk import LatentRows, list_latents, slots
from sampled_sae.kernels.gradients import RowGradients, note_rows_
from sampled_sae.kernels.masked import keep_largest_of_rows_
from sampled_sae.kernels.path import FastPath
from sampled_sae.kernels.sparse import Rows
from sampled_sae.method import presets
from sampled_sae.method.config import AuxKConfig
from sampled_sae.method.parameters import Parameters
from sampled_sae.method.selection import Dead
from sampled_sae.training.callbacks import Callback
from sampled_sae.training.learner import LOOK_EVERY, Learner
from sampled_sae.training.step import PlainPath, add_auxk
from sampled_sae.utils.errors import UserError
from tests.kernels import test_path
from tests.kernels.test_path import DEVICE, K, distance

M, B = 70, 24
weights_and_batch = partial(test_path.weights_and_batch, seed=0, m=M, tokens=B)


def reference_cut(z: torch.Tensor, keep: int) -> torch.Tensor:
    order = z.float().sort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(z).scatter_(1, order.indices[:, :keep], order.values[:, :keep].to(z.dtype))
    return kept.relu()


@pytest.mark.parametrize("limit", [2**14, 0])
@pytest.mark.parametrize(
    ("width", "keep"), [(40, 7), (300, 64), (300, 300), (64, 1), (41, 7), (900, 200), (5000, 384), (16_001, 700)]
)
def test_the_largest_of_each_row_stay(width, keep, limit, monkeypatch):
    monkeypatch.setattr(masked, "WHOLE_ROWS", limit)  # 0: rows that are too wide for the registers
    generator = torch.Generator().manual_seed(width)
    z = torch.randn(14, width, generator=generator).bfloat16()
    z[1] = z[1].abs().round()  # many ties
    z[2], z[3] = -z[2].abs(), torch.nan_to_num(z[3], 0) * 1e-30
    z[4, : width // 2] *= 1e-6  # the cut is far below the largest
    z[5] = 2.0
    z[6, ::2] = -torch.inf  # empty slots
    z[7] = 2 ** torch.linspace(-20, 1, width)  # the cut is any number of factors below the largest
    z[8], z[8, : keep - 1] = 1e-40, 0  # fewer positive values than wanted, or as many
    z[9], z[9, : keep - 1] = 9.2e-41, 3.0
    z[10], z[10, : width // 2] = 1.0, -1.0  # ties that begin in the middle
    z[11], z[11, : keep // 2] = 1.0, 2.0
    z[12] = torch.where(torch.arange(width) % 2 > 0, 0.0, -0.0)
    wanted, z = reference_cut(z, keep), z.to(DEVICE)
    keep_largest_of_rows_(z, keep)
    assert torch.equal(z.cpu(), wanted)


@pytest.mark.parametrize("m", [70, 5000])
def test_latents_are_listed_in_order(m):
    mask = torch.rand(m, generator=torch.Generator().manual_seed(0)) < 0.1
    numbers = mask.nonzero().squeeze(1)
    found = list_latents(mask.to(DEVICE), len(numbers) + 9).cpu()
    assert torch.equal(found[: len(numbers)], numbers) and found[len(numbers) :].tolist() == [m] * 9


def test_the_room_for_dead_latents_takes_few_lengths():
    rooms = [slots(n, 65_536) for n in range(1, 65_537)]
    assert all(n <= room for n, room in enumerate(rooms, 1)) and all(room % 16 == 0 for room in rooms)
    assert len(set(rooms)) < 60 and slots(6554, 65_536) == 6656 and rooms[-1] == 65_536


@pytest.mark.parametrize(
    "config",
    [presets.batchtopk(M, K), presets.sampled(M, K, "l2", 5), presets.matryoshka(M, K, (5, 0.3))],
    ids=["all", "pool", "prefixes"],
)
@pytest.mark.parametrize(("d", "share", "k"), [(32, 0.1, 3), (32, 0.6, 3), (37, 1.0, 3), (37, 0.1, 9)])
def test_auxk_adds_what_the_plain_path_adds(d, share, k, config):
    config = replace(config, auxk=AuxKConfig(k=k))  # the last: fewer are dead
    weights, x = weights_and_batch(d)
    x = (x + 0.5).bfloat16().float()  # the mean error is not that of the first prefix
    path = FastPath(weights, config, 10, torch.Generator(DEVICE).manual_seed(0))
    selection = path.select(x, 0, torch.zeros(M, dtype=torch.bool, device=DEVICE))
    silent = (~selection.fired).nonzero().squeeze(1)
    dead = silent[: max(1, int(share * len(silent)))]
    without = path.gradients(selection, None)
    mask = torch.zeros(M, dtype=torch.bool, device=DEVICE).index_fill_(0, dead, True)
    outcome = path.gradients(selection, list_latents(mask, slots(len(dead) + 5, M)))
    plain = PlainPath(weights, config, 10, torch.Generator(DEVICE).manual_seed(0))
    codes = plain.select(x, 0, torch.zeros(M, dtype=torch.bool, device=DEVICE)).codes
    error = x - weights.b_dec - codes.decode(weights.W_dec)
    added = Parameters(*(torch.zeros_like(w) for w in weights))
    loss = add_auxk(added, x, weights, error, dead, config.auxk)
    added.b_dec.sub_(added.b_enc @ weights.W_enc)
    assert distance(outcome.auxk, loss) < 0.01
    for name, a, b, wanted in zip(
        Parameters._fields, outcome.gradients.full(), without.gradients.full(), added, strict=True
    ):
        assert distance(a - b, wanted) < 0.03, name


def test_rows_of_the_dead_are_noted():
    m, d, stride, n, others = 20, 37, 48, 7, 3
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    latents = torch.tensor([1, 4, 5, 11, 19, m, m], device=DEVICE)
    W_dec = torch.nn.functional.normalize(random(m, d))
    found = LatentRows(random(n, stride), random(n, stride), random(5, n))
    slot = torch.full((m,), -1, dtype=torch.int32, device=DEVICE)
    slot[[0, 7, 12]] = torch.arange(others, dtype=torch.int32, device=DEVICE)
    rows = Rows(random(others, d), random(others, d), slot, random(m), random(m, 2), (found.W_enc, found.W_dec))
    before = [part.clone() for part in (rows.b_enc, rows.energy)]
    wanted = RowGradients(rows, random(d)).full()
    note_rows_(found, W_dec, latents, rows, others)
    there = latents[:5]
    enc, dec, bias = found.W_enc[:5, :d], found.W_dec[:5, :d], found.b_enc.sum(0)[:5]
    across = dec - (dec * W_dec[there]).sum(1, keepdim=True) * W_dec[there]
    energy = enc.square().sum(1) + across.square().sum(1) + bias.square()
    full = RowGradients(rows, random(d)).full()
    assert torch.equal(full.W_enc, wanted.W_enc.index_copy(0, there, enc))
    assert torch.equal(full.W_dec, wanted.W_dec.index_copy(0, there, dec))
    torch.testing.assert_close(rows.b_enc, before[0].index_copy(0, there, bias))
    before[1][there, 0] = energy
    torch.testing.assert_close(rows.energy, before[1])


def test_room_without_dead_latents_changes_nothing():
    """The room is for those that may be dead until the next look; there may be none of them yet."""
    weights, x = weights_and_batch(16)
    path = FastPath(weights, presets.batchtopk(M, K), 10, torch.Generator(DEVICE).manual_seed(0))
    selection = path.select(x, 0, torch.zeros(M, dtype=torch.bool, device=DEVICE))
    nobody = torch.zeros(M, dtype=torch.bool, device=DEVICE)
    with_room, without = path.gradients(selection, list_latents(nobody, 16)), path.gradients(selection, None)
    assert float(with_room.auxk) == 0 and torch.equal(with_room.loss, without.loss)
    for a, b in zip(with_room.gradients.full(), without.gradients.full(), strict=True):
        assert torch.equal(a, b)


def test_nothing_fires_and_all_are_dead():
    weights, x = weights_and_batch(37)
    weights.b_enc.fill_(-50)
    config = presets.batchtopk(M, K, auxk=AuxKConfig(alpha=0.5))
    fast, plain = (kind(weights, config, 10, torch.Generator(DEVICE)) for kind in (FastPath, PlainPath))
    nobody = torch.zeros(M, dtype=torch.bool, device=DEVICE)
    everybody = torch.arange(M, device=DEVICE)
    got, wanted = (path.gradients(path.select(x, 0, nobody), everybody) for path in (fast, plain))
    assert distance(got.auxk, wanted.auxk) < 0.01 and distance(got.loss, wanted.loss) < 0.01
    *rest, b_dec = got.gradients.full()
    assert not any(bool(g.any()) for g in rest) and distance(b_dec, wanted.gradients.b_dec) < 0.01


def test_there_is_always_room_for_the_dead():
    """Looks are rare, because each waits for the GPU: the number that was seen must hold until the next one."""
    config = presets.topk(M, 1, auxk=AuxKConfig(dead_after=5 * B))
    learner = Learner(config, 16, 100, 0, DEVICE, torch.float32)
    seen = []
    given = learner.path.update

    def update(selection, dead: Dead | None, lr):
        truly = int(learner.dead().sum())
        assert truly == 0 if dead is None else truly <= dead.most
        seen.append((truly, dead and dead.most))
        return given(selection, dead, lr)

    learner.path.update = update
    for step in range(3 * LOOK_EVERY):
        learner.step(weights_and_batch(16, seed=step % 7)[1], step, measure=False)
    assert max(truly for truly, _ in seen) > 0 and len({most for _, most in seen if most}) < 8
    again = Learner(config, 16, 100, 0, DEVICE, torch.float32)
    again.load_state(learner.state())
    assert again.most_dead == learner.most_dead


@pytest.mark.parametrize(("path", "value"), [(FastPath, torch.nan), (PlainPath, torch.nan), (PlainPath, torch.inf)])
def test_a_dead_latent_that_is_not_finite_stops_the_run(path, value, monkeypatch):
    """The cut compares floats and drops NaN, so that AuxK's loss stays finite; then the weights are what is noticed."""

    class Poison(Callback):
        def on_step(self, run, learner, step, stats):
            assert isinstance(learner.path, path)
            if step == 0:
                learner.tokens_since_fired[5] = 10**9
                learner.weights.W_enc[5] = value
                learner.path.load_state(learner.path.state())

    monkeypatch.setattr(kernels, "usable", lambda *where: path is FastPath)
    config = presets.sampled(M, K, "uniform", 5, auxk=AuxKConfig(dead_after=4, k=3))
    x = torch.randn(60, 16, generator=torch.Generator().manual_seed(0))
    common = {"batch_size": 4, "heldout_tokens": 6, "device": DEVICE, "callbacks": [Poison()], "progress": False}
    with pytest.raises(UserError, match=r"(loss became nan|weights are no longer finite) by step [12]: try a lower lr"):
        ss.train(x, config, steps=2, **common)
