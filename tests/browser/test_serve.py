"""The local server, over real connections and in a real browser."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sampled_sae as ss
from sampled_sae.browser.serve import MOST_BYTES, MOST_TOKENS, TextReader, server
from sampled_sae.browser.write import html_page, read_record
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from tests.cli.test_browse import make_sae
from tests.models.tiny_models import make_model, make_tokenizer

TEXT = "the cat <b>sat</b> on 🦀 the mat"


class Served:
    """A server in a thread."""

    def __init__(self, folder: Path):
        tokenizer = make_tokenizer()
        self.model = LanguageModel(make_model("llama"), tokenizer, "tiny")
        self.sae = SAE.load(make_sae(0, threshold=1.0, model="tiny").save(folder / "sae"))
        text = " ".join(f"the{n * n % 97} cat <b>" for n in range(400))
        settings: dict[str, Any] = {"tokens": 640, "context": 16, "device": "cpu"}
        self.page = ss.browse(self.sae, self.model, [text], **settings).page
        record = read_record(self.page.parent, folder / "sae")
        page = html_page(record.title, record.summary, record.data, served=True)
        self.server = server(page, self.page.parent, TextReader(self.sae, self.model, 1), 0)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert answer.getheader("Access-Control-Allow-Origin") is None
        return answer.status, answer.read()

    def read(self, text: Any, **headers: str) -> tuple[int, Any]:
        body = json.dumps({"text": text}).encode()
        status, content = self.ask("POST", "/read", body, **{"Content_Type": "application/json", **headers})
        return status, json.loads(content)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"))
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_the_page_lies_in_the_saes_own_folder(served: Served) -> None:
    assert served.sae.folder is not None
    assert served.page == served.sae.folder / "browser" / "index.html"
    assert "connect-src" not in served.page.read_text()


def test_files(served: Served) -> None:
    status, page = served.ask("GET", "/")
    assert status == 200 and b"data-served" in page and b"connect-src 'self'" in page
    (data,) = served.page.parent.glob("data-*")
    assert served.ask("GET", f"/{data.name}/words.js") == (200, (data / "words.js").read_bytes())
    inside = [f"/{data.name}/{name}" for name in ("../browser.json", "x.js", "words.js?", "words.js/")]
    for path in ("/../cfg.json", "/browser.json", "//etc/passwd", *inside):
        assert served.ask("GET", path)[0] == 404
    assert served.ask("POST", "/other", b"{}")[0] == 404


def test_a_text_is_read_as_the_sae_encodes_it(served: Served) -> None:
    status, found = served.read(TEXT)
    ids = served.model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert status == 200 and len(found["text"]) == len(found["latents"]) == len(ids)
    before = [served.model.tokenizer.bos_token_id] if served.model.bos else []
    stream = served.model.activations(torch.tensor([before + ids]), [1])[1][0, len(before) :]
    codes = served.sae.encode(stream)
    assert int((codes > 0).sum()) > 0
    for own, latents, values in zip(codes, found["latents"], found["values"], strict=True):
        best = own.topk(min(16, int((own > 0).sum())))
        assert latents == best.indices.tolist()
        torch.testing.assert_close(torch.tensor(values), best.values)


def test_high_norm_tokens_are_left_out(served: Served) -> None:
    ids = served.model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    before = [served.model.tokenizer.bos_token_id] if served.model.bos else []
    norms = served.model.activations(torch.tensor([before + ids]), [1])[1][0, len(before) :].norm(dim=1)
    found = TextReader(served.sae, served.model, 1, float(norms.median())).read(TEXT)
    assert found["leftOut"] == (norms > norms.median()).tolist() and any(found["leftOut"])
    assert not any(own for own, out in zip(found["latents"], found["leftOut"], strict=True) if out)
    assert json.loads((served.page.parent / "browser.json").read_text())["limit"] > 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{}", "127.0.0.1", ""])
def test_other_hosts_are_refused(served: Served, host: str) -> None:
    status, content = served.ask("GET", "/", Host=host.format(served.port))
    assert status == 403 and json.loads(content)["error"] == f"Host: must be localhost:{served.port}"


def test_other_requests_are_refused_in_one_line(served: Served) -> None:
    assert served.ask("GET", "/", Host=f"localhost:{served.port}")[0] == 200
    assert served.read("x", Origin="http://evil.example")[0] == 403
    assert served.ask("POST", "/read", b"text=1", Content_Type="application/x-www-form-urlencoded")[0] == 415
    assert served.read("x" * MOST_BYTES)[0] == 413
    for body in (b"[", b"[]", b"{}", b'{"text": 1}', b"[" * 9000):
        status, content = served.ask("POST", "/read", body, Content_Type="application/json")
        assert status == 400 and "\n" not in json.loads(content)["error"]
    assert served.read(" \n")[1]["error"] == "text: must hold a word"
    status, found = served.read("a b " * MOST_TOKENS)
    assert status == 400 and found["error"].endswith(f"must have 1 to {min(MOST_TOKENS, served.model.context or 512)}")


def test_another_saes_page_is_not_served(served: Served, tmp_path: Path) -> None:
    other = make_sae(5).save(tmp_path / "other")
    with pytest.raises(UserError, match=r"holds the page of another SAE, sae"):
        read_record(served.page.parent, other)
    with pytest.raises(UserError, match=r"holds no page of latents; name a text with --text"):
        read_record(tmp_path, other)
    whole = json.loads((served.page.parent / "browser.json").read_text())
    damaged = {"data = '../..': must be": {"data": "../.."}, "limit = 'x': must be": {"limit": "x"}}
    damaged |= {"title = 3: must be text": {"title": 3}, rf"{whole['data']}: no such folder": {}}
    for message, damage in damaged.items():
        (tmp_path / "browser.json").write_text(json.dumps(whole | damage))
        with pytest.raises(UserError, match=message):
            read_record(tmp_path, other)
    with pytest.raises(UserError, match=rf"port = {served.port}: cannot be used"):
        server("", tmp_path, None, served.port)  # type: ignore[arg-type]


def test_typing_a_text(browser: Any, served: Served) -> None:
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda line: said.append(line.text) if line.type in ("error", "warning") else None)
    page.goto(f"http://localhost:{served.port}/#text")
    page.locator(".own textarea").fill(TEXT)
    page.locator(".own button").click()
    page.wait_for_selector("#view h3:text-is('Your text')")
    words = page.locator(".words button")
    found = served.read(TEXT)[1]
    assert words.all_inner_texts() == found["text"]
    at = next(i for i, own in enumerate(found["latents"]) if own)
    words.nth(at).click()
    rows = page.locator("#view .neighbors li")
    assert rows.locator(".number").all_inner_texts() == [f"#{latent}" for latent in found["latents"][at]]
    rows.first.locator(".shade").click()
    fires = [i for i, own in enumerate(found["latents"]) if found["latents"][at][0] in own]
    assert words.evaluate_all("all => all.flatMap((one, i) => one.classList.contains('hot') ? [i] : [])") == fires
    assert said == []
    page.locator(".own textarea").fill(" ")
    page.locator(".own button").click()
    page.wait_for_selector("[role=alert]:text-is('text: must hold a word')")
    page.close()
