import json
import socket
import threading
import time
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sampled_sae.evals.autointerp.chat import NAME, Chat, ChatConfig, Question
from sampled_sae.utils.errors import UserError

# ---- servers that behave badly -----------------------------------------------------------------------


class Script:
    """What a server does: `answer(n, body)` gives status, headers and content for its n-th request."""

    def __init__(self, answer):
        self.answer, self.lock = answer, threading.Lock()
        self.requests, self.bodies, self.keys, self.times, self.headers = 0, [], [], [], []
        self.now = self.most = 0


def completion(text) -> bytes:
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}).encode()


def fine(n, body):
    return 200, {}, completion("echo " + body["messages"][1]["content"])


@contextmanager
def serving(answer):
    script = Script(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with script.lock:
                number = script.requests
                script.requests += 1
                script.bodies.append((self.path, body))
                script.keys.append(self.headers.get("Authorization"))
                script.headers.append(dict(self.headers))
                script.times.append(time.monotonic())
                script.now += 1
                script.most = max(script.most, script.now)
            status, headers, content = script.answer(number, body)
            with script.lock:
                script.now -= 1
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has given up

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def client(url, cache=None, **options) -> Chat:
    quick = {"wait": 0.01, "attempts": 3, "timeout": 5.0, "concurrency": 4}
    folder = None if cache is None else str(cache)
    return Chat(ChatConfig(base_url=url, model="m", cache=folder, **quick | options))


def questions(n: int) -> list[Question]:
    return [Question("be brief", f"q{number}", 7) for number in range(n)]


# ---- what is sent and kept ---------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_questions(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    def slow_first(n, body):
        time.sleep(0.05 if body["messages"][1]["content"] == "q0" else 0)
        return fine(n, body)

    with serving(slow_first) as (url, script):
        told = []
        answers = client(url).ask(questions(9), told.append)
        assert [answer.text for answer in answers] == [f"echo q{number}" for number in range(9)]
        assert told == list(range(10))
        assert {answer.prompt_tokens for answer in answers} == {11}
        assert 1 < script.most <= 4
        path, body = script.bodies[0]
        assert path == "/v1/chat/completions"
        assert body["messages"][0] == {"role": "system", "content": "be brief"}
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 7, 0.0)
        assert set(script.keys) == {"Bearer secret"}


def test_other_names_of_limits_and_no_temperature():
    with serving(fine) as (url, script):
        chat = client(url, temperature=None, limit_name="max_completion_tokens", limit_factor=10)
        chat.ask(questions(1))
        body = script.bodies[0][1]
        assert body["max_completion_tokens"] == 70
        assert not {"temperature", "max_tokens"} & body.keys()


def test_a_second_run_costs_no_calls(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(fine) as (url, script):
        first = client(url, tmp_path).ask(questions(5))
        again = client(url, tmp_path).ask(questions(6))
        assert script.requests == 6
        assert [answer.text for answer in again[:5]] == [answer.text for answer in first]
        assert [answer.cached for answer in again] == [True] * 5 + [False]
        # Another model, or another temperature, is another question.
        client(url, tmp_path, temperature=1.0).ask(questions(2))
        assert script.requests == 8
    assert "secret" not in (tmp_path / NAME).read_text()


def test_answers_that_were_cut_short_on_disk_are_asked_for_again(tmp_path):
    with serving(fine) as (url, script):
        client(url, tmp_path, concurrency=1).ask(questions(3))
        path = tmp_path / NAME
        path.write_bytes(path.read_bytes()[:-20])
        answers = client(url, tmp_path).ask(questions(3))
        assert script.requests == 4
        assert [answer.text for answer in answers] == ["echo q0", "echo q1", "echo q2"]
        assert all(answer.cached for answer in client(url, tmp_path).ask(questions(3)))


def test_an_endpoint_on_this_machine_gets_no_account_and_no_proxy(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "private")
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(fine) as (url, script):
        assert client(url).ask(questions(1))[0].text == "echo q0"
        assert script.keys == [None] and "private" not in str(script.headers)


def test_a_redirect_does_not_carry_the_key_elsewhere(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with (
        serving(fine) as (elsewhere, other),
        serving(lambda n, body: (302, {"Location": elsewhere}, b"")) as (url, _),
    ):
        with pytest.raises(UserError, match="refused with HTTP 302"):
            client(url).ask(questions(1))
        assert other.requests == 0


# ---- endpoints that are down, slow, busy, or talk nonsense -------------------------------------------


def test_an_endpoint_that_is_down():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    line = (
        r"base_url = 'http://127.0.0.1:\d+/v1': no answer to 4 calls: cannot be reached \(.*refused.*\) \(3 attempts\)"
    )
    with pytest.raises(UserError, match=line):
        client(url).ask(questions(50))


def test_an_endpoint_that_is_slow():
    wake = threading.Event()
    with serving(lambda n, body: (wake.wait(5), fine(n, body))[1]) as (url, script):
        try:
            with pytest.raises(UserError, match=r"no answer to 2 calls: no answer within 0.1 s \(2 attempts\)"):
                client(url, timeout=0.1, attempts=2).ask(questions(2))
        finally:
            wake.set()
        assert script.requests == 4


def test_one_question_that_is_never_answered_is_told_and_not_kept(tmp_path):
    def stubborn(n, body):
        return (500, {}, b"out of luck") if body["messages"][1]["content"] == "q3" else fine(n, body)

    with serving(stubborn) as (url, script):
        answers = client(url, tmp_path, concurrency=1).ask(questions(5))
        assert [answer.text is None for answer in answers] == [False, False, False, True, False]
        assert answers[3].reason == "HTTP 500 Internal Server Error: out of luck (3 attempts)"
        assert script.requests == 4 + 3
        script.answer = fine
        assert client(url, tmp_path).ask(questions(5))[3].text == "echo q3"
        assert script.requests == 8


@pytest.mark.parametrize("kind", ["seconds", "date"])
def test_an_endpoint_that_asks_to_wait_is_left_alone_for_so_long(kind):
    def busy(n, body):
        after = "0.4" if kind == "seconds" else formatdate(time.time() + 2, usegmt=True)
        return (429, {"Retry-After": after}, b"") if n == 0 else fine(n, body)

    with serving(busy) as (url, script):
        assert all(answer.text for answer in client(url, concurrency=1).ask(questions(3)))
        assert script.requests == 4
        assert script.times[1] - script.times[0] > (0.39 if kind == "seconds" else 0.9)


def test_the_wait_holds_for_all_questions_under_way():
    def busy(n, body):
        if n == 0:
            return 429, {"Retry-After": "0.5"}, b""
        time.sleep(0.1)
        return fine(n, body)

    with serving(busy) as (url, script):
        client(url, concurrency=2).ask(questions(8))
        gaps = [later - script.times[0] for later in script.times]
        # The other question that was under way ends; then nobody asks until the time is over.
        assert sum(gap < 0.49 for gap in gaps) <= 2


def test_an_endpoint_that_is_always_busy_is_given_up():
    with serving(lambda n, body: (429, {"Retry-After": "3600"}, b"slow down")) as (url, script):
        start = time.monotonic()
        with pytest.raises(UserError, match=r"no answer to 2 calls: HTTP 429 Too Many Requests: slow down"):
            client(url, longest_wait=0.1).ask(questions(2))
        assert time.monotonic() - start < 3
        assert script.requests == 6


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"<html>gateway</html>", "answers something else than a chat completion: '<html>gateway</html>'"),
        (b"{}", "answers something else"),
        (b"[1, 2]", "answers something else"),
        (b'{"choices": []}', "answers something else"),
        (b"\xff\xfe", "answers something else"),
        (completion(None), "answers with an empty text"),
        (completion("  \n"), "answers with an empty text"),
        (completion(["a", "list"]), "answers with an empty text"),
    ],
)
def test_an_endpoint_that_answers_nonsense(content, line):
    with serving(lambda n, body: (200, {}, content)) as (url, script):
        with pytest.raises(UserError, match=f"no answer to 1 calls: {line}"):
            client(url).ask(questions(1))
        assert script.requests == 3


def test_nonsense_once_is_asked_again():
    with serving(lambda n, body: (200, {}, b"oops") if n == 0 else fine(n, body)) as (url, _):
        assert client(url).ask(questions(1))[0].text == "echo q0"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_is_refused_at_once(status):
    with serving(lambda n, body: (status, {}, b'{"error": "no such thing"}')) as (url, script):
        line = rf"base_url = '{url}', model = 'm': refused with HTTP {status} .*no such thing"
        with pytest.raises(UserError, match=line):
            client(url, concurrency=1).ask(questions(9))
        assert script.requests == 1


def test_a_question_that_is_refused_is_not_sent_again():
    def too_long(n, body):
        return (400, {}, b"too long") if body["messages"][1]["content"] == "q1" else fine(n, body)

    with serving(too_long) as (url, script):
        answers = client(url, concurrency=1).ask(questions(3))
        assert answers[1].reason == "HTTP 400 Bad Request: too long"
        assert script.requests == 3


def test_a_missing_key_is_known_before_anything_is_asked(monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(UserError, match=r"SOME_KEY is not set: https://example.org/v1 needs a key in that variable"):
        Chat(ChatConfig(base_url="https://example.org/v1", key_variable="SOME_KEY", cache=None))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"base_url": "localhost:8000"}, "base_url = 'localhost:8000': must be an address such as"),
        ({"model": ""}, "model = '': must name a model"),
        ({"concurrency": 0}, "concurrency = 0: must be at least 1"),
        ({"attempts": 0}, "attempts = 0: must be at least 1"),
        ({"timeout": 0}, "timeout = 0.0: must be a positive number"),
        ({"wait": -1}, "wait = -1.0: must not be negative"),
        ({"temperature": 3}, "temperature = 3: must be from 0 to 2"),
        ({"limit_factor": 0.5}, "limit_factor = 0.5: must be at least 1"),
    ],
)
def test_bad_settings(given, line):
    with pytest.raises(UserError, match=line):
        ChatConfig(**given)


def test_an_answer_that_is_nested_too_deeply_is_worth_another_attempt():
    from sampled_sae.evals.autointerp.chat import _Again, _read

    with pytest.raises(_Again, match="something else than a chat completion"):
        _read(b"[" * 99_999)
