"""A local server of the feature browser: its files, and the latents that fire on a text that the reader types.

It listens on this machine only. Requests with another Host are refused, so that no website can reach it through a name
that points here; so are requests of other origins, other paths and long bodies.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from sampled_sae.browser.files import words_of
from sampled_sae.browser.latents import token_latents
from sampled_sae.evals.core.schema import special_tokens
from sampled_sae.evals.reading import Firings
from sampled_sae.hooks import Where
from sampled_sae.method.codes import SparseCodes
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError

HOST = "127.0.0.1"
MOST_BYTES = 20_000  # of a request
MOST_TOKENS = 512  # of a text
LATENTS = 16  # shown of each token
FILES = re.compile(r"/data-[0-9a-f]{12}/[a-z]+(?:-\d+)?\.js")
SAFE = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class TextReader:
    """A model and an SAE that read one text at a time."""

    def __init__(self, sae: SAE, model: LanguageModel, layer: Where, limit: float | None = None):
        self.sae, self.model, self.layer = sae, model, layer
        self.limit = math.inf if limit is None else limit  # norm above which a token is left out
        wanted = sae.cfg.metadata.get("prepend_bos")
        bos = model.tokenizer.bos_token_id if (model.bos if wanted is None else wanted) else None
        self.before = [] if bos is None else [bos]
        self.lock = threading.Lock()

    @torch.no_grad()
    def read(self, text: str) -> dict[str, Any]:
        """The tokens of a text as words, and of each the latents of the largest activations with these.

        Special tokens and those of a high norm are left out, as on the page: most latents fire on them.
        """
        if not text.strip():
            raise UserError("text: must hold a word")
        ids = self.model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        most = min(MOST_TOKENS, (self.model.context or MOST_TOKENS) - len(self.before))
        if not 1 <= len(ids) <= most:
            raise UserError(f"text: has {len(ids):,} tokens: must have 1 to {most}")
        with self.lock:
            stream = self.model.activations(torch.tensor([self.before + ids]), [self.layer])[self.layer]
            own = stream[0, len(self.before) :]
            codes = self.sae.encode_sparse(own)
        left_out = torch.isin(torch.tensor(ids), torch.tensor([-1, *special_tokens(self.model.tokenizer)]))
        left_out |= (own.float().norm(dim=1) > self.limit).cpu()
        kept = ~left_out[codes.token.cpu()]
        parts = (codes.token.cpu()[kept], codes.latent.cpu()[kept], codes.value.float().cpu()[kept])
        firings = Firings.sort(SparseCodes(*parts, len(ids), self.sae.d_sae), (1, len(ids)))
        found, words = token_latents(firings, 1, LATENTS), words_of(ids, self.model.tokenizer)
        latents = [[latent for latent in row if latent >= 0] for row in found.latent[0].tolist()]
        values = [row[: len(own)] for row, own in zip(found.value[0].tolist(), latents, strict=True)]
        return {**words._asdict(), "latents": latents, "values": values, "leftOut": left_out.tolist()}


class Refusal(Exception):
    """What is wrong with a request: a status and one line."""


class Handler(BaseHTTPRequestHandler):
    """One request; `reader`, `page` and `folder` are set by `server`."""

    reader: TextReader
    page: bytes
    folder: Path
    timeout = 30  # seconds without a byte

    def do_GET(self) -> None:
        self._answer(self._file)

    def do_POST(self) -> None:
        self._answer(self._read)

    def _answer(self, work: Callable[[], tuple[str, bytes]]) -> None:
        try:
            self._check_host()
            kind, content = work()
            status = 200
        except Refusal as refused:
            status, kind, content = refused.args[0], "application/json", _error(refused.args[1])
        except UserError as error:
            status, kind, content = 400, "application/json", _error(str(error))
        except Exception:
            traceback.print_exc()
            status, kind, content = 500, "application/json", _error("internal error; the terminal shows it")
        self.send_response(status)
        for name, value in {**SAFE, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _check_host(self) -> None:
        port = self.connection.getsockname()[1]
        host = self.headers.get("Host", "")
        if host not in (f"{HOST}:{port}", f"localhost:{port}"):
            raise Refusal(403, f"Host: must be localhost:{port}")
        if self.headers.get("Origin", f"http://{host}") != f"http://{host}":
            raise Refusal(403, "Origin: must be the page itself")

    def _file(self) -> tuple[str, bytes]:
        if self.path in ("/", "/index.html"):
            return "text/html; charset=utf-8", self.page
        path = self.folder / self.path[1:]
        if not FILES.fullmatch(self.path) or not path.is_file():
            raise Refusal(404, "no such file")
        return "text/javascript; charset=utf-8", path.read_bytes()

    def _read(self) -> tuple[str, bytes]:
        if self.path != "/read":
            raise Refusal(404, "no such address")
        if self.headers.get_content_type() != "application/json":
            raise Refusal(415, "Content-Type: must be application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdecimal() or int(length) > MOST_BYTES:
            raise Refusal(413, f"the text is too long: must be at most {MOST_BYTES:,} bytes")
        try:
            text = json.loads(self.rfile.read(int(length)))["text"]
        except (ValueError, RecursionError, TypeError, KeyError):
            text = None
        if not isinstance(text, str):
            raise Refusal(400, 'must be JSON with a "text"')
        return "application/json", json.dumps(self.reader.read(text)).encode()

    def log_message(self, format: str, *parts: Any) -> None:
        """No line for each request."""


def _error(text: str) -> bytes:
    return json.dumps({"error": text.replace("\n", " ")}).encode()


def check_port(port: int) -> None:
    """Raise a one-line error if the port cannot be used: making the page that is served there takes minutes."""
    _listening(port, Handler).server_close()


def server(page: str, folder: Path, reader: TextReader, port: int) -> ThreadingHTTPServer:
    """A server of a page whose data is in `folder`; port 0 takes any that is free."""
    return _listening(port, type("Handler", (Handler,), {"reader": reader, "page": page.encode(), "folder": folder}))


def _listening(port: int, handler: type[Handler]) -> ThreadingHTTPServer:
    try:
        return ThreadingHTTPServer((HOST, port), handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"port = {port}: cannot be used ({why}); choose another one") from None


def serve(page: str, folder: Path, reader: TextReader, port: int) -> None:
    """Serve until Ctrl-C."""
    with server(page, folder, reader, port) as made:
        print(f"Serving http://localhost:{made.server_address[1]} (Ctrl-C stops)", file=sys.stderr, flush=True)
        try:
            made.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
