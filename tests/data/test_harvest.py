import json
import shutil
from collections import Counter

import pytest
import torch

import sampled_sae as ss
from sampled_sae.data import buffer
from sampled_sae.data.buffer import SPARE, bytes_needed
from sampled_sae.data.model_source import HarvestStream, model_activations
from sampled_sae.data.source import open_source
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.training.run import Callback
from sampled_sae.utils.files import read_json
from tests.data.tools import harvest, open_harvest
from tests.models.tiny_models import CONTEXT, LAYERS, WIDTH, make_model, make_tokenizer

CONFIG = harvest((1,), buffer_tokens=400, contexts_at_once=3)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(make_model("llama"), make_tokenizer(), "tiny")


def documents(count: int = 60):
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        words = torch.randint(0, 50, (int(torch.randint(5, 40, (), generator=generator)),), generator=generator)
        yield f"{number:03d} " + " ".join(f"the{int(w)}" for w in words)


def stream(model, config=CONFIG, count=60, **options) -> HarvestStream:
    settings = {"batch_size": 30, "heldout_tokens": 40, "seed": 0} | options
    [found] = open_harvest(model, documents(count), config, **settings).values()
    return found


def rows(x: torch.Tensor) -> Counter[bytes]:
    return Counter(row.numpy().tobytes() for row in x)


def test_batches_are_the_models_activations_without_the_first_positions(model):
    s = stream(model)
    rounds = s.harvest.rounds
    assert s.harvest.held_contexts == 4 and (rounds.contexts, rounds.parts) == (10, 3)
    assert rounds.batches == int(10 * 12 * (1 - SPARE)) // 30
    tokens = s.harvest.bank.take(0, 70, skip=4)
    truth = rows(model.activations(tokens.long(), [1])[1][:, 8:].reshape(-1, WIDTH))
    given = [s.batch(i) for i in range(6 * rounds.batches)]
    assert all(b.shape == (30, WIDTH) for b in given)
    trained = rows(torch.cat(given))
    assert trained <= truth
    assert not rows(s.heldout) & trained


@pytest.mark.parametrize("steps", [1, 6, 7, 8, 11, 30])
def test_every_token_of_the_blocks_is_used_once(model, steps):
    """The last round hands out what is left; no block is harvested of which nothing is used."""
    s = stream(model, count=600, steps=steps)
    rounds = s.harvest.rounds
    assert rounds.number is not None and steps <= rounds.number * rounds.batches < steps + rounds.number
    assert rounds.parts == (1 if steps <= 7 else 3)
    trained = rows(torch.cat([s.batch(i) for i in range(rounds.number * rounds.batches)]))
    tokens = s.harvest.bank.take(0, rounds.number * rounds.contexts, skip=s.harvest.held_contexts)
    truth = rows(model.activations(tokens.long(), [1])[1][:, 8:].reshape(-1, WIDTH))
    assert trained <= truth and sum(trained.values()) == rounds.number * rounds.batches * 30
    assert not s.harvest._held


@pytest.mark.parametrize("at_once", [1, 7, 50])
def test_batches_do_not_depend_on_how_many_contexts_go_through_the_model(model, at_once):
    other = harvest((1,), buffer_tokens=400, contexts_at_once=at_once)
    a, b = stream(model), stream(model, other)
    for index in range(30):
        torch.testing.assert_close(a.batch(index), b.batch(index), rtol=1e-4, atol=1e-4)


def test_a_batch_follows_from_its_number_and_the_seed(model):
    whole, later, other = stream(model), stream(model), stream(model, seed=1)
    batches = [whole.batch(i) for i in range(40)]
    assert torch.equal(later.batch(31), batches[31])
    assert torch.equal(later.batch(39), batches[39])
    assert not torch.equal(other.batch(0), batches[0])
    assert torch.equal(other.heldout, whole.heldout)


@pytest.mark.parametrize(("rolling", "spans"), [(True, [2, 3, 3]), (False, [1, 1, 1])])
def test_a_round_mixes_the_documents_of_three_blocks(model, rolling, spans):
    s = stream(model, harvest((1,), buffer_tokens=400, rolling=rolling), count=600)
    rounds = s.harvest.rounds
    tokens = s.harvest.bank.take(0, 5 * rounds.contexts, skip=s.harvest.held_contexts)
    found = model.activations(tokens.long(), [1])[1][:, 8:]
    where = {row.numpy().tobytes(): n for n, x in enumerate(found) for row in x}
    for number, span in enumerate(spans):
        first = {where[key] for key in rows(s.batch(number * rounds.batches))}
        assert len(first) > 10 and len({context // rounds.contexts for context in first}) == span


def test_a_resumed_run_sends_three_blocks_at_most_through_the_model_again(model, monkeypatch):
    whole, later = stream(model, count=600), stream(model, count=600)
    size = whole.harvest.rounds.batches
    wanted = [whole.batch(i) for i in range(8 * size)]
    read: list[int] = []
    given = type(later.harvest)._harvest_block

    def harvest_block(self, number, first_round):
        read.append(number)
        given(self, number, first_round)

    monkeypatch.setattr(type(later.harvest), "_harvest_block", harvest_block)
    for index in range(5 * size + 1, 8 * size):
        assert torch.equal(later.batch(index), wanted[index])
    assert read == [4, 5, 6, 7, 8]


def test_the_buffers_size_follows_the_free_memory(model, monkeypatch):
    per_token = 2 * WIDTH * 4
    open_ended = harvest((1,))
    monkeypatch.setitem(buffer.LARGEST, "cpu", 2**21)
    for free, size in ((2**40, 2**21), (7 * 2**20 * per_token, 2**20), (0, 2**17), (None, 2**19)):
        monkeypatch.setattr(buffer, "available", lambda device, free=free: free)
        assert buffer.enough_buffer(model, open_ended, 30, None) == size
        assert buffer.enough_buffer(model, open_ended, 30, 10**6) == size
        assert buffer.enough_buffer(model, open_ended, 30, 4) == 220  # no more than these steps take
        assert buffer.enough_buffer(model, harvest((1,), buffer_tokens=400), 30, 10**6) == 400
    monkeypatch.setattr(buffer, "available", lambda device: 0)
    assert buffer.enough_buffer(model, open_ended, 2**16, None) == 5 * 2**16


def test_a_short_text_begins_again_in_another_order(model):
    s = stream(model, count=12, heldout_tokens=400)
    total, size = s.harvest.bank.has(10**6), s.harvest.rounds.batches
    blocks = [torch.cat([s.batch(b * size + i) for i in range(size)]) for b in range(3)]
    assert s.harvest.held_contexts == max(1, total // 10)
    assert len(rows(torch.cat(blocks))) < sum(map(len, blocks))
    assert not torch.equal(blocks[0], blocks[1])
    assert not rows(s.heldout) & rows(torch.cat(blocks))


def test_a_text_that_is_repeated_is_reported_once(model, capsys):
    """Otherwise a low error on training batches next to a high one on held-out tokens would come as a surprise."""
    config = harvest((1,), buffer_tokens=400)

    def said(count: int, progress: bool) -> str:
        opened = open_harvest(model, documents(count), config, heldout_tokens=40, steps=40, progress=progress)[
            "layer-1"
        ]
        for step in range(40):
            opened.batch(step)
        there = len(opened.harvest.bank.read) - opened.harvest.held_contexts
        return capsys.readouterr().err.replace(f"{there:,}", "THERE")

    short = said(12, True)
    assert short.count("text: has THERE contexts of 20 tokens") == 1 and short.endswith(" are wanted: it is repeated\n")
    assert said(12, False) == "" and "repeated" not in said(1000, True)


def test_tokens_of_high_norm_are_left_out(model):
    every = stream(model)
    norms = torch.cat([every.batch(i) for i in range(20)]).norm(dim=1)
    config = harvest((1,), buffer_tokens=400, high_norm_factor=1.05)
    s = stream(model, config)
    assert s.limit < float(norms.max())
    x = torch.cat([s.batch(i) for i in range(20)])
    assert float(x.norm(dim=1).max()) <= s.limit
    assert float(s.heldout.norm(dim=1).max()) <= s.limit
    assert s.metadata["high_norm_limit"] == s.limit


def test_a_layer_is_the_same_alone_and_with_others(model):
    config = harvest((2, 0, 1), buffer_tokens=400, contexts_at_once=3, high_norm_factor=1.05)
    together = open_harvest(model, documents(), config, batch_size=30, heldout_tokens=40)
    assert list(together) == ["layer-2", "layer-0", "layer-1"]
    for layer, found in zip((2, 0, 1), together.values(), strict=True):
        alone = stream(model, harvest((layer,), buffer_tokens=400, contexts_at_once=3, high_norm_factor=1.05))
        assert torch.equal(found.heldout, alone.heldout) and found.limit == alone.limit
        assert found.metadata == alone.metadata
        for index in (0, 5, 9):
            assert torch.equal(found.batch(index), alone.batch(index))


def test_layers_train_together_and_catch_up(model, tmp_path):
    config = harvest((0, 1), buffer_tokens=400)

    def both():
        return open_harvest(model, documents(), config, batch_size=30, heldout_tokens=40)

    common = {"steps": 30, "batch_size": 30, "progress": False, "device": "cpu", "checkpoint_every": 10}
    whole = ss.train(both(), [ss.batchtopk(64, 4)], **common)
    streams = both()
    given = streams["layer-1"].batch
    # Layer 1 breaks down before its second checkpoint is written, when layer 0 has one more step.
    streams["layer-1"].batch = lambda index: given(index) if index < 20 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        ss.train(streams, [ss.batchtopk(64, 4)], out=tmp_path, **common)
    newest = max((tmp_path / "layer-1" / "checkpoints").iterdir())
    shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    resumed = ss.train(both(), [ss.batchtopk(64, 4)], out=tmp_path, resume=True, **common)
    for layer in ("layer-0", "layer-1"):
        for a, b in zip(whole[layer][0].parameters(), resumed[layer][0].parameters(), strict=True):
            assert torch.equal(a, b)


def test_what_it_takes_is_told_beforehand(model):
    small = bytes_needed(model, CONFIG)
    assert small >= 2 * 400 * WIDTH * 4
    assert bytes_needed(model, harvest((0, 1), buffer_tokens=4000, contexts_at_once=3)) > 5 * small
    assert stream(model).memory_estimate() == small


def test_training_on_a_harvest_resumes_to_the_same_weights(model, tmp_path):
    common = {"steps": 30, "batch_size": 30, "progress": False, "device": "cpu", "checkpoint_every": 10}
    config = ss.batchtopk(64, 4)
    whole = ss.train(stream(model), config, **common)
    assert whole.cfg.metadata["hook_name"] == "blocks.1.hook_resid_post"
    assert whole.cfg.metadata["hook_module"] == "model.layers.1"

    class Broken(HarvestStream):
        def batch(self, index):
            if index == 17:
                raise RuntimeError("power cut")
            return super().batch(index)

    broken = Broken((given := stream(model)).harvest, given.hook, given.text)
    with pytest.raises(RuntimeError):
        ss.train(broken, config, out=tmp_path / "run", **common)
    assert read_json(tmp_path / "run" / "run.json")["source"]["model_name"] == "tiny"
    longer = harvest((1,), buffer_tokens=800, contexts_at_once=3)
    other = harvest((0,), buffer_tokens=400, contexts_at_once=3)
    for wrong, name in ((longer, "buffer_tokens"), (other, "layer")):
        with pytest.raises(ss.UserError, match=f"is on other activations: .*{name}"):
            ss.train(stream(model, wrong), config, out=tmp_path / "run", resume=True, **common)
    resumed = ss.train(stream(model), config, out=tmp_path / "run", resume=True, **common)
    with pytest.raises(ss.UserError, match=r"is on other activations: .*layer"):  # also when it is finished
        ss.train(stream(model, other), config, out=tmp_path / "run", resume=True, **common)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    loaded = ss.SAE.load(tmp_path / "run" / "saes" / "batchtopk-s0")
    assert loaded.cfg.metadata["model_name"] == "tiny" and loaded.cfg.metadata["layer"] == 1


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda m: stream(m, harvest((LAYERS,), buffer_tokens=400)), f"layer = {LAYERS}: tiny has {LAYERS} layers"),
        (lambda m: open_harvest(m, iter(["the " * 15]), CONFIG, batch_size=30), "text holds .* two are needed"),
        (lambda m: stream(m, batch_size=5000), "batch_size = 5000: a buffer of 20 contexts with 12 tokens each"),
        (lambda m: harvest((1,), buffer_tokens=10), "buffer_tokens = 10: must hold at least one context"),
        (lambda m: harvest(()), r"hooks = \(\): must name at least one"),
        (lambda m: harvest((1, 1)), r"hooks = \(1, 1\): must name each one once"),
        (lambda m: harvest((1,), high_norm_factor=0), "high_norm_factor = 0: must be positive, or none"),
        (lambda m: harvest((1,), contexts_at_once=0), "contexts_at_once = 0"),
        (
            lambda m: stream(m, harvest((1,), context=CONTEXT + 1, buffer_tokens=400)),
            "tiny reads at most",
        ),
        (
            lambda m: open_source(stream(m)).open(31, 0, 0),
            "batch_size = 31: the stream of activations gives batches of 30",
        ),
    ],
)
def test_bad_settings_are_refused_in_one_line(model, make, line):
    with pytest.raises(ss.UserError, match=line) as error:
        make(model)
    assert "\n" not in str(error.value)


# ---- hook points, BOS, text ----------------------------------------------------------------------------


def test_any_hook_point_can_be_harvested(model):
    hooks = (1, "model.layers.1.mlp", "model.layers.2.input", "model.layers.1.mlp.down_proj.input")
    found = open_harvest(model, documents(), harvest(hooks, buffer_tokens=400), heldout_tokens=40)
    assert list(found) == ["layer-1", *hooks[1:]]
    after, mlp, before, inner = found.values()
    assert torch.equal(after.batch(3), before.batch(3)) and not torch.equal(after.batch(3), mlp.batch(3))
    assert [s.d_in for s in found.values()] == [WIDTH] * 3 + [inner.batch(0).shape[1]] and inner.d_in != WIDTH
    assert mlp.metadata["hook_point"] == mlp.identity["hook_point"] == "model.layers.1.mlp"
    assert "layer" not in mlp.metadata and "hook_point" not in after.metadata
    assert before.metadata["hook_name"] == "blocks.2.hook_resid_pre"


def with_bos(adds: bool | None) -> LanguageModel:
    tokenizer = make_tokenizer()
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(1)
    return LanguageModel(make_model("llama"), tokenizer, "tiny", bos=adds)


@pytest.mark.parametrize(("bos", "adds", "used"), [("auto", True, True), ("auto", False, False), (True, False, True)])
def test_bos_follows_the_model_unless_it_is_set(bos, adds, used):
    found = stream(with_bos(adds), harvest((1,), buffer_tokens=400, bos=bos))
    assert found.metadata["prepend_bos"] is found.identity["bos"] is used
    assert bool((found.harvest.bank.take(0, 5, skip=0)[:, 0] == 1).all()) == used


def test_a_model_that_is_far_better_with_bos_gets_a_warning(capsys, monkeypatch):
    lm = with_bos(False)
    stream(lm)
    assert capsys.readouterr().err == ""
    given = LanguageModel.logits

    def better(self, tokens):
        """The next token is likely where BOS is there."""
        after = torch.nn.functional.one_hot(tokens.roll(-1, dims=1), self.vocabulary)
        return given(self, tokens) + (9.0 if int(tokens[0, 0]) == 1 else 0.0) * after

    monkeypatch.setattr(LanguageModel, "logits", better)
    stream(lm)
    line = capsys.readouterr().err
    assert line.startswith("tiny: the loss on a short sentence is ") and line.endswith("set bos to true\n")
    stream(lm, harvest((1,), buffer_tokens=400, bos=True))
    stream(lm, harvest((1,), buffer_tokens=400, bos="auto"))
    assert line.count("\n") == 1 and capsys.readouterr().err == line


def test_from_a_model_and_a_text_to_a_source(model, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(documents()))
    options = {"context": 20, "skip_first": 8, "buffer_tokens": 400, "progress": False}
    found = model_activations(model, tmp_path / "a.txt", [0, 2], hook="model.layers.1.mlp", **options)
    assert list(found.open(30, 40, 0)) == ["layer-0", "layer-2", "model.layers.1.mlp"]
    one = model_activations(model, list(documents()), 1, **options).open(30, 40, 0, steps=3)["layer-1"]
    assert one.harvest.rounds.batches == 3 and one.metadata["text"] == "60 documents in memory"
    for wrong, line in (
        ({}, "layer: is missing"),
        ({"layer": [1, 1]}, r"layer = \[1, 1\]: must name each one once"),
        ({"hook": ["model.norm"] * 2}, r"hook = \['model.norm', 'model.norm'\]: must name each one once"),
        ({"layer": 1, "lenght": 3}, "lenght: is no setting of activations; must be one of bos, buffer_tokens"),
        ({"layer": 9}, "layer = 9: tiny has"),
        ({"hook": "model.layers.1.mpl"}, "hook = 'model.layers.1.mpl': tiny has no such module"),
        ({"layer": 1, "text": "nowhere.txt"}, "text = 'nowhere.txt': no such file"),
        ({"layer": 1, "text": [1, 2]}, "text = list: must be the name of a text"),
    ):
        with pytest.raises(ss.UserError, match=line):
            model_activations(model, **{"text": list(documents()), **wrong})


def test_a_run_of_version_0_resumes(model, tmp_path):
    """Its record has other names: length, and max_norm for the factor."""
    common = {"steps": 5, "batch_size": 30, "progress": False, "device": "cpu", "out": tmp_path}
    ss.train(stream(model), ss.batchtopk(64, 4), **common)
    record = read_json(tmp_path / "run.json")
    assert record.pop("format_version") >= 1
    source = {"context": "length", "high_norm_factor": "max_norm"}
    record["source"] = {source.get(name, name): value for name, value in record["source"].items()}
    record["config"]["saes"] = [
        {{"d_sae": "latents"}.get(name, name): value for name, value in sae.items()} for sae in record["config"]["saes"]
    ]
    (tmp_path / "run.json").write_text(json.dumps(record))
    ss.train(stream(model), ss.batchtopk(64, 4), resume=True, **common)
    other = stream(model, harvest((1,), buffer_tokens=400, contexts_at_once=3, high_norm_factor=5.0))
    with pytest.raises(ss.UserError, match="other activations: high_norm_factor was None and is now 5"):
        ss.train(other, ss.batchtopk(64, 4), resume=True, **common)


def test_a_run_keeps_the_buffer_that_it_began_with(model, tmp_path, monkeypatch):
    """Size and order are those of the record where the settings leave them open: free memory changes, and runs of
    earlier versions have no rolling buffer."""
    monkeypatch.setattr(buffer, "SMALLEST", 100)
    monkeypatch.setitem(buffer.LARGEST, "cpu", 400)
    common = {"steps": 30, "batch_size": 30, "progress": False, "device": "cpu", "checkpoint_every": 10}
    texts, settings = list(documents(600)), {"context": 20, "skip_first": 8, "progress": False}

    def train(out, free, stop=(), resume=False, **more):
        monkeypatch.setattr(buffer, "available", lambda device: free * 6 * 2 * WIDTH * 4)
        source = model_activations(model, texts, 1, **settings, **more)
        run = {"out": tmp_path / out, "resume": resume, "callbacks": stop, "heldout_tokens": 40}
        return ss.train(source, ss.batchtopk(64, 4), **run, **common)

    class PowerCut(Callback):
        def on_step(self, run, learner, step, stats):
            if step == 17:
                raise RuntimeError("power cut")

    for name, more in (("new", {}), ("old", {"rolling": False})):
        whole = train(f"{name}-whole", 400, **more)
        with pytest.raises(RuntimeError):
            train(name, 400, [PowerCut()], **more)
        record = read_json(tmp_path / name / "run.json")["source"]
        assert record["buffer_tokens"] == 400 and record.get("rolling") == (name == "new" or None)
        resumed = train(name, 200, resume=True)
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    with pytest.raises(ss.UserError, match="buffer_tokens was 400 and is now 200"):
        train("new", 400, resume=True, buffer_tokens=200)
    with pytest.raises(ss.UserError, match="rolling was None and is now True"):
        train("old", 400, resume=True, rolling=True)


def test_a_run_with_a_large_buffer_is_extended(model, tmp_path):
    """Its record has the tokens that its steps needed, an extension has more steps."""
    source = model_activations(model, list(documents(600)), 1, context=20, buffer_tokens=10_000, progress=False)
    common = {"batch_size": 30, "progress": False, "device": "cpu", "out": tmp_path, "heldout_tokens": 40}
    ss.train(source, ss.batchtopk(64, 4), steps=5, **common)
    size = read_json(tmp_path / "run.json")["source"]["buffer_tokens"]
    assert size < 10_000
    ss.train(source, ss.batchtopk(64, 4), steps=12, extends=5, resume=True, **common)
    record = read_json(tmp_path / "run.json")
    assert record["finished"] and record["source"]["buffer_tokens"] == size and record["config"]["train"]["steps"] == 12
