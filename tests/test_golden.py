"""Files written by version 0.1.0, before any file had a `format_version`, still load and continue.

`golden/version-0.zip` holds, of seven SAEs of 48 latents on the activations below: a run that stopped after step 40
of 60 (`unfinished`), the same run to its end (`finished`), and a cache of the first 1,000 rows.
"""

import zipfile
from pathlib import Path

import pytest
import torch

import sampled_sae as ss
from sampled_sae.config import read_file
from sampled_sae.data.cache import open_cache
from sampled_sae.method.config import SAEConfig

ARCHIVE = Path(__file__).parent / "golden" / "version-0.zip"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    fires = torch.rand(2000, 32, generator=generator) < 0.1
    return fires.float() @ torch.randn(32, 16, generator=generator)


def test_an_old_checkpoint_continues_to_the_old_weights(golden):
    record = read_file(golden / "unfinished" / "run.json", "run")
    configs = [SAEConfig.from_dict(plain) for plain in record["config"]["saes"]]
    settings = {
        "steps": 60,
        "batch_size": 200,
        "device": "cpu",
        "progress": False,
        "input_norm": "one",
    }
    ss.train(rows(), configs, out=golden / "unfinished", resume=True, log_every=10, **settings)
    for config in configs:
        mine, old = (ss.SAE.load(golden / run / "saes" / str(config.name)) for run in ("unfinished", "finished"))
        for name in ("W_enc", "b_enc", "W_dec", "b_dec", "threshold"):
            torch.testing.assert_close(getattr(mine, name), getattr(old, name), rtol=1e-5, atol=1e-6)


def test_a_finished_run_is_returned_as_it_is(golden):
    record = read_file(golden / "finished" / "run.json", "run")
    configs = [SAEConfig.from_dict(plain) for plain in record["config"]["saes"]]
    settings = {"steps": 60, "batch_size": 200, "device": "cpu", "progress": False, "input_norm": "one"}
    saes = ss.train(rows(), configs, out=golden / "finished", resume=True, **settings)
    assert len(saes) == 7 and all(sae.d_sae == 48 and sae.d_in == 16 for sae in saes)


def test_an_old_cache_is_read(golden):
    open_cache(golden / "cache", verify=True)
    cached = open_cache(golden / "cache")
    assert torch.equal(cached.take(torch.arange(1000)), rows()[:1000].to(torch.bfloat16))
