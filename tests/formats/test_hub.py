"""The client of the Hugging Face hub against a server on this machine, in processes of its own: it reads HF_ENDPOINT
when it is imported."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from sampled_sae.evals.results import write_result
from sampled_sae.formats.hub import Place, local, parse
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.formats.hub_server import TOKEN, running

LINES = """
import sys, json
import sampled_sae as ss
for line in json.loads(sys.argv[1]):
    try:
        exec(line)
    except ss.UserError as error:
        print(error)
"""


def client(address: str, home: Path, *lines: str, token: str | None = TOKEN) -> list[str]:
    """Run lines of Python with the hub's client; what they print, an error being one line."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env |= {} if token is None else {"HF_TOKEN": token}
    words = [sys.executable, "-c", LINES, json.dumps(lines)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def hub():
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def sae(tmp_path_factory) -> SAE:
    torch.manual_seed(0)
    made = SAE(InferenceConfig(6, 20, metadata={"model_name": "org/model", "hook_name": "blocks.1.hook_resid_post"}))
    for tensor in (made.W_enc, made.W_dec, made.b_enc, made.b_dec):
        torch.nn.init.normal_(tensor)
    made.threshold.fill_(0.5)
    made.save(tmp_path_factory.mktemp("saved") / "sae")
    metrics = {"FVU": {"value": 0.25, "low": 0.2, "high": 0.3}, "L0": {"value": 8.0, "low": None, "high": None}}
    write_result(made.folder, "core", {"result": {}, "metrics": metrics})
    return made


NAMES = {"README.md", "cfg.json", "sae_weights.safetensors", "sampled_sae.json"}


@pytest.fixture(scope="module")
def pushed(hub, sae, tmp_path_factory):
    """SAEs on the hub; what the pushes printed."""
    hub.repos["me/kept"], hub.repos["me/replaced"] = {"main": {"README.md": b"mine"}}, {"main": {"README.md": b"mine"}}
    return client(
        hub.address,
        tmp_path_factory.mktemp("home"),
        f"sae = ss.SAE.load({str(sae.folder)!r})",
        "print(sae.push_to_hub('me/saes', 'layer-1/a', license='mit'))",
        f"from sampled_sae.cli import main; main(['push', {str(sae.folder)!r}, 'me/one', '--private'])",
        "sae.push_to_hub('me/kept')",
        "sae.push_to_hub('me/branch', revision='v1')",
        "sae.threshold.fill_(2.0); sae.push_to_hub('me/replaced', card=True)",
    )


def test_push_and_load(hub, sae, pushed, tmp_path):
    first, second = pushed
    assert first.startswith(f"{hub.address}/me/saes/commit/") and second.startswith(f"{hub.address}/me/one/commit/")
    assert set(hub.repos["me/one"]["main"]) == NAMES and hub.private == {"me/one"}
    assert set(hub.repos["me/saes"]["main"]) == {f"layer-1/a/{name}" for name in NAMES}
    assert set(hub.repos["me/branch"]["v1"]) == NAMES and not hub.repos["me/branch"]["main"]
    hub.repos["me/saes"]["main"]["layer-1/a/other.bin"] = b"not needed"
    arrays = io.BytesIO()
    shapes = {"W_enc": (6, 9), "W_dec": (9, 6), "b_enc": 9, "b_dec": 6, "threshold": 9}
    np.savez(arrays, **{name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()})
    hub.repos["some/gemma-scope-2b-pt-res"] = {"main": {"layer_3/width_1k/params.npz": arrays.getvalue()}}
    hub.requests.clear()
    out = tmp_path / "out"
    folder, *others = client(
        hub.address,
        tmp_path / "home",
        f"ss.SAE.from_pretrained('me/saes', subfolder='layer-1/a').save({str(out / 'a')!r})",
        "import torch",
        f"ss.SAE.load('hf:me/branch@v1', dtype=torch.bfloat16).save({str(out / 'b')!r})",
        "print(ss.SAE.from_pretrained('me/one').folder)",
        "print(ss.SAE.from_pretrained('some/gemma-scope-2b-pt-res', 'layer_3/width_1k').d_sae)",
        "print(ss.SAE.load('hf:some/gemma-scope-2b-pt-res/layer_3/width_1k/params.npz').d_sae)",
    )
    assert others == ["9", "9"]
    assert {file.name for file in Path(folder).iterdir()} == NAMES - {"README.md"}
    assert not [request for request in hub.requests if "other.bin" in request or "README" in request]
    for name, tensor in SAE.load(out / "a").state_dict().items():
        assert torch.equal(tensor.nan_to_num(), sae.state_dict()[name].nan_to_num())
    half = SAE.load(out / "b")
    assert half.dtype == torch.bfloat16 and torch.equal(half.W_dec, sae.W_dec.bfloat16())
    lines = ("print(ss.SAE.load('hf:me/one').d_sae)", "ss.SAE.load('hf:no/such')")
    cached, missing = client("http://127.0.0.1:9", tmp_path / "home", *lines)
    assert cached == "20"
    assert missing.startswith("hf:no/such: not in the cache, and the hub cannot be reached (")


def test_the_card(hub, pushed):
    card = hub.repos["me/saes"]["main"]["layer-1/a/README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "sampled-sae" and head["base_model"] == "org/model" and head["license"] == "mit"
    assert {"sparse-autoencoder", "saelens", "jumprelu"} <= set(head["tags"])
    assert "| core: FVU | 0.25 | 0.2 to 0.3 |" in card and "| core: L0 | 8 |" in card
    assert 'ss.SAE.from_pretrained("me/saes", subfolder="layer-1/a")' in card
    assert 'SAE.load_from_disk(snapshot_download("me/saes") + "/layer-1/a")' in card
    assert "| Latents (d_sae) | 20 |" in card and "| Hook point | blocks.1.hook_resid_post |" in card
    assert hub.repos["me/kept"]["main"]["README.md"] == b"mine"
    # An SAE that changed since it was saved has none of the metrics.
    replaced = hub.repos["me/replaced"]["main"]["README.md"].decode()
    assert "Metrics" not in replaced and "license" not in replaced and 'from_pretrained("me/replaced")' in replaced


def test_errors_are_one_line(hub, sae, tmp_path):
    hub.repos["some/private"], hub.private = {"main": {"cfg.json": b"{}"}}, {*hub.private, "some/private"}
    hub.repos["some/saes"] = {"main": {"a/cfg.json": b"{}", "b/cfg.json": b"{}", "README.md": b"", "a/x/y": b""}}
    load = "ss.SAE.from_pretrained({})"
    lines = client(
        hub.address,
        tmp_path / "home",
        *(load.format(words) for words in ("'no/such'", "'some/private'", "'some/saes'", "'some/saes', 'c'")),
        *(load.format(words) for words in ("'some/saes', 'a/x'", "'some/saes', revision='v2'", "'not a name'")),
        f"ss.SAE.load({str(sae.folder)!r}).push_to_hub('me/new')",
        token=None,
    )
    assert len(lines) == 8
    where = "there may be SAEs in a and b"
    assert lines[0] == "hf:no/such: no such repository on the hub (a private one needs `hf auth login`)"
    assert lines[1] == "hf:some/private: no such repository on the hub (a private one needs `hf auth login`)"
    assert lines[2] == f"hf:some/saes: no SAE there; {where}"
    assert lines[3] == f"hf:some/saes/c: the repository has no 'c'; {where}"
    assert lines[4] == f"hf:some/saes/a/x: no SAE there; {where}"
    assert lines[5] == "hf:some/saes@v2: the repository has no revision 'v2'"
    assert "not a name of a repository" in lines[6]
    assert "hf auth login" in lines[7] and "me/new" not in hub.repos


def test_paths_on_the_hub(tmp_path):
    assert parse("hf:a/b") == Place("a/b") and str(Place("a/b")) == "hf:a/b"
    assert parse(Path("hf:a/b/c/d@refs/pr/1")) == Place("a/b", "c/d", "refs/pr/1")
    assert parse("a/b") is None and local(tmp_path) == tmp_path
    with pytest.raises(UserError, match="hf:a: must be hf:OWNER/NAME, then /FOLDER and @REVISION if needed"):
        parse("hf:a")


def test_commands_take_paths_on_the_hub(tmp_path, monkeypatch):
    """Results are kept beside the downloaded files."""
    from sampled_sae import api
    from sampled_sae.cli.evaluate import Eval
    from sampled_sae.formats import hub

    asked = []
    monkeypatch.setattr(hub, "download", lambda place: asked.append(place) or tmp_path)
    with api._on_disk(["hf:a/b/c", Path("hf:d/e@v1")]) as folders:
        assert folders == [tmp_path, tmp_path]
    assert asked == [Place("a/b", "c"), Place("d/e", None, "v1")]
    assert Eval((Path("hf:a/b"),))._default_out() == tmp_path / "evals"
