"""What is harvested before the first step: no more than needed, told of, and stopped between two passes."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import sampled_sae as ss
from sampled_sae.data.buffer import enough_buffer
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.utils import progress as waiting
from tests.data.tools import harvest, open_harvest
from tests.models.tiny_models import make_model, make_tokenizer

CONFIG = harvest((1,), buffer_tokens=400, contexts_at_once=3)
SETTINGS = {"batch_size": 30, "heldout_tokens": 40}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(make_model("llama"), make_tokenizer(), "tiny")


def streams(model, config=CONFIG, **options):
    documents = (f"{number:03d} " + " ".join(f"the{number * i % 50}" for i in range(25)) for number in range(60))
    return open_harvest(model, documents, config, **SETTINGS | options)


@pytest.mark.parametrize("skip", [0, 8, 19])
@pytest.mark.parametrize("batch_size", [1, 30, 1000])
@pytest.mark.parametrize("steps", [1, 3, 7, 98, 1000])
def test_the_buffer_holds_all_steps_and_little_more(steps, batch_size, skip, model):
    config = harvest((1,), skip_first=skip, buffer_tokens=10**9)
    buffer = enough_buffer(model, config, batch_size, steps)
    per_context = (20 - skip) * 0.98
    assert buffer % 20 == 0 and int(buffer // 20 * per_context) // batch_size >= steps
    assert buffer // 20 == 1 or int((buffer // 20 - 1) * per_context) // batch_size < steps
    assert enough_buffer(model, harvest((1,), buffer_tokens=40), batch_size, 10**4) == 40


def test_a_short_run_harvests_what_it_needs(model):
    config = harvest((1,), buffer_tokens=2**19)
    stream = streams(model, config, steps=3)["layer-1"]
    rounds = stream.harvest.rounds
    assert enough_buffer(model, config, 30, 3) == 160
    assert (rounds.batches, rounds.contexts, rounds.number) == (3, 8, 1)
    sae = ss.train(stream, ss.batchtopk(64, 4), steps=3, batch_size=30, device="cpu", progress=False)
    assert sae.cfg.metadata["layer"] == 1


def test_a_long_wait_is_told_of(model, capsys, monkeypatch):
    streams(model, progress=True)["layer-1"].batch(0)
    assert capsys.readouterr().err.splitlines() == ["tiny: 0.1 MiB for the model, 0.1 MiB for its activations, on cpu"]
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 0.0)
    stream = streams(model, progress=True)["layer-1"]
    assert "held-out tokens: " in capsys.readouterr().err
    stream.batch(0)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("activations for the buffer, part 1: 36/120 tokens") and "tokens/s" in told[1]
    stream.batch(stream.harvest.rounds.batches)
    assert capsys.readouterr().err == "", "only before the first step"
    streams(model)["layer-1"].batch(0)
    assert capsys.readouterr().err == ""


def interrupt_in_pass(model, monkeypatch, wanted: int) -> list[int]:
    """Send Ctrl-C to this process in pass number `wanted` through the model; returns the list of passes."""
    passes: list[int] = []
    given = type(model).activations

    def activations(self, *arguments):
        passes.append(1)
        if len(passes) == wanted:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # for the main thread to hear of it, where this is another
        return given(self, *arguments)

    monkeypatch.setattr(type(model), "activations", activations)
    return passes


@pytest.mark.parametrize("layers", [(1,), (0, 1)])
@pytest.mark.parametrize("wanted", [2, 10])
def test_ctrl_c_acts_between_two_passes_and_the_run_goes_on(model, layers, wanted, tmp_path, monkeypatch):
    """A block takes 4 passes: the second of the first block, and the second of the third, after 3 steps."""
    config = harvest(layers, buffer_tokens=400, contexts_at_once=3)
    common = {"steps": 12, "batch_size": 30, "progress": False, "device": "cpu"}
    whole = ss.train(streams(model, config), [ss.batchtopk(64, 4)], **common)
    before = signal.getsignal(signal.SIGINT)
    opened = streams(model, config)
    with monkeypatch.context() as patch:
        passes = interrupt_in_pass(model, patch, wanted)
        with pytest.raises(ss.Interrupted, match=f"interrupted at step {0 if wanted == 2 else 3}; saved"):
            ss.train(opened, [ss.batchtopk(64, 4)], out=tmp_path, **common)
        assert len(passes) == wanted
    assert signal.getsignal(signal.SIGINT) is before
    for again in (opened, streams(model, config)):  # with the same streams or new ones; the second time it is finished
        resumed = ss.train(again, [ss.batchtopk(64, 4)], out=tmp_path, resume=True, **common)
        for layer in whole:
            for a, b in zip(whole[layer][0].parameters(), resumed[layer][0].parameters(), strict=True):
                assert torch.equal(a, b)


def test_ctrl_c_reaches_the_thread_that_harvests_for_a_gpu(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    stream, common = streams(model)["layer-1"], {"steps": 12, "batch_size": 30, "progress": False, "device": "cpu"}
    whole = ss.train(streams(model)["layer-1"], ss.batchtopk(64, 4), **common)
    stream.harvest._worker = ThreadPoolExecutor(1)
    with monkeypatch.context() as patch:
        passes = interrupt_in_pass(model, patch, 2)
        with pytest.raises(ss.Interrupted, match="interrupted at step 0"):
            ss.train(stream, ss.batchtopk(64, 4), **common)
        assert len(passes) == 2
    again = ss.train(stream, ss.batchtopk(64, 4), **common)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    stream.close()


def test_without_a_run_ctrl_c_is_what_it_always_was(model, monkeypatch):
    stream = streams(model)["layer-1"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may ignore it
    try:
        with monkeypatch.context() as patch:
            interrupt_in_pass(model, patch, 2)
            with pytest.raises(KeyboardInterrupt):
                stream.batch(0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert torch.equal(stream.batch(0), streams(model)["layer-1"].batch(0))
