"""Hints how to install what is missing."""

import json

from sampled_sae.utils import third_party


def test_the_hint_names_where_the_package_came_from(tmp_path, monkeypatch):
    clone, wheel = tmp_path / "a clone", tmp_path / "sampled_sae-1.whl"
    (clone / "sampled_sae" / "utils").mkdir(parents=True)
    monkeypatch.setattr(third_party, "__file__", str(clone / "sampled_sae" / "utils" / "third_party.py"))
    origins = {}

    class Distribution:
        def read_text(self, name):
            return origins.get(name)

    monkeypatch.setattr(third_party.importlib.metadata, "distribution", lambda name: Distribution())
    assert third_party.install("lm") == "pip install 'sampled-sae[lm]'"  # from an index
    wheel.touch()
    origins["direct_url.json"] = json.dumps({"url": wheel.as_uri(), "archive_info": {}})
    assert third_party.install("lm") == f"pip install '{wheel}[lm]'"
    wheel.unlink()
    assert third_party.install("lm") == "pip install 'sampled-sae[lm]'"
    (clone / "pyproject.toml").touch()
    assert third_party.install("lm") == f"pip install -e '{clone}[lm]'"
