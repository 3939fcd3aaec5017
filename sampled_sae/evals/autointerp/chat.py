"""A client of any OpenAI-compatible chat endpoint: many questions at once, retries, and answers kept on disk.

`Chat.ask` sends what was never answered before and gives the answers in the order of the questions. A question that
stays without an answer is told so, with the reason; an endpoint that answers nothing at all is one line for the user.
"""

from __future__ import annotations

import email.utils
import hashlib
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from sampled_sae.config import Bound, Config, NonNegative, Positive, PositiveNumber, at_least, require
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder, writing

LOCAL = ("localhost", "127.0.0.1", "::1")
PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Refusals that may pass if one waits."""
REFUSING = (401, 403, 404, 405)
"""Refusals of everything: the key, the model or the address is wrong."""


@dataclass(frozen=True, slots=True)
class ChatConfig(Config):
    """Which endpoint answers, and how it is asked."""

    base_url: str = "https://api.openai.com/v1"
    """Address of the endpoint, up to but without /chat/completions."""
    model: str = "gpt-4o-mini"
    """The model that is asked, by the endpoint's own name."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; an endpoint on this machine may go without."""
    temperature: Annotated[float, Bound("must be from 0 to 2", lambda value: 0 <= value <= 2)] | None = 0.0
    """Of the answers; none leaves it to the endpoint, for models that allow no other."""
    limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the endpoint calls the most tokens of an answer; newer models of OpenAI take the second."""
    limit_factor: Annotated[float, at_least(1)] = 1.0
    """Times the usual most tokens of an answer: more for models that think aloud before they answer."""
    concurrency: Positive = 8
    """Questions that are under way at once."""
    timeout: PositiveNumber = 60.0
    """Seconds until a question counts as not answered."""
    attempts: Positive = 6
    """Times that a question is sent at most."""
    wait: NonNegative = 1.0
    """Seconds before the second attempt; they double each time, up to `longest_wait`."""
    longest_wait: NonNegative = 60.0
    """Most seconds between two attempts, also where the endpoint asks for more."""
    cache: str | None = "~/.cache/sampled-sae/chat"
    """Folder in which answers are kept, so that no question is paid for twice; none keeps them nowhere."""

    def check(self) -> None:
        url = urllib.parse.urlsplit(self.base_url)
        right = "must be an address such as http://localhost:8000/v1"
        require(url.scheme in ("http", "https") and bool(url.hostname), "base_url", self.base_url, right)
        require(bool(self.model), "model", self.model, "must name a model of the endpoint")

    @property
    def local(self) -> bool:
        """Whether the endpoint is on this machine."""
        return urllib.parse.urlsplit(self.base_url).hostname in LOCAL


class Question(NamedTuple):
    """One call."""

    system: str
    """What the model is told to do."""
    user: str
    """What it is given."""
    most: int
    """Tokens of the answer at most."""


class Answer(NamedTuple):
    """What came back."""

    text: str | None
    """The answer; none if there is none."""
    reason: str = ""
    """Why there is none."""
    cached: bool = False
    """Whether it was on disk already."""
    prompt_tokens: int = 0
    """Tokens of the question, as the endpoint counts them; 0 if it does not say."""
    answer_tokens: int = 0
    """Tokens of the answer."""


STOPPED = Answer(None, "stopped")


class Chat:
    """Asks one model; safe to share between threads."""

    def __init__(self, config: ChatConfig):
        """The key is looked up here, so that a missing one is known before anything is computed."""
        self.config = config
        self.cache = AnswerCache(None if config.cache is None else Path(config.cache).expanduser())
        key = os.environ.get(config.key_variable, "")
        if not key and not config.local:
            raise UserError(f"{config.key_variable} is not set: {config.base_url} needs a key in that variable")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        # A proxy is not asked for what is on this machine, and a redirect would carry the key elsewhere.
        proxy = [urllib.request.ProxyHandler({})] if config.local else []
        self._opener = urllib.request.build_opener(*proxy, _NoRedirect)
        self._gate = _Gate()
        self._random = random.Random(0)

    def ask(self, questions: Sequence[Question], done: Callable[[int], None] | None = None) -> list[Answer]:
        """An answer to each question, in their order; `done(n)` is called after each with how many are through."""
        found: dict[int, Answer] = {}
        asked: list[int] = []
        for number, question in enumerate(questions):
            kept = self.cache.find(self._body(question), self.config.base_url)
            if kept is None:
                asked.append(number)
            else:
                found[number] = Answer(kept, cached=True)
        if done is not None:
            done(len(found))
        if asked:
            self._ask_all(questions, asked, found, done)
        return [found[number] for number in range(len(questions))]

    def _ask_all(
        self,
        questions: Sequence[Question],
        asked: list[int],
        found: dict[int, Answer],
        done: Callable[[int], None] | None,
    ) -> None:
        """Fill `found` with the answers to the questions of these numbers."""
        pool = ThreadPoolExecutor(self.config.concurrency)
        stop = threading.Event()
        pending: dict[Future[Answer], int] = {}
        answered, lost = 0, 0
        try:
            pending.update({pool.submit(self._ask, questions[number], stop): number for number in asked})
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    answer = future.result()
                    if answer is STOPPED:  # the error that stopped it comes with another future
                        del pending[future]
                        continue
                    found[pending.pop(future)] = answer
                    answered, lost = answered + (answer.text is not None), lost + (answer.text is None)
                    # Do not wait through all retries of all questions where nothing ever comes back.
                    if not answered and lost >= min(len(asked), self.config.concurrency):
                        raise UserError(
                            f"base_url = {self.config.base_url!r}: no answer to {lost} calls: {answer.reason}"
                        )
                    if done is not None:
                        done(len(found))
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, question: Question, stop: threading.Event) -> Answer:
        """One question with its retries."""
        config, body, reason = self.config, self._body(question), ""
        for attempt in range(config.attempts):
            self._gate.wait(stop)
            if stop.is_set():
                return STOPPED
            try:
                answer = _read(self._send(body))
            except _Again as again:
                reason = str(again)
                # Spread, so that the questions which were refused together do not come back together.
                pause = config.wait * 2**attempt * self._random.uniform(0.75, 1.25)
                pause = min(max(pause, again.after or 0.0), config.longest_wait)
                if again.after is not None:
                    self._gate.close(pause)
                if attempt + 1 < config.attempts:
                    stop.wait(pause)
                continue
            except _No as no:
                return Answer(None, str(no))
            except UserError:
                stop.set()
                raise
            self.cache.keep(body, config.base_url, str(answer.text))
            return answer
        return Answer(None, f"{reason} ({config.attempts} attempts)")

    def _body(self, question: Question) -> dict[str, Any]:
        config = self.config
        messages = [{"role": "system", "content": question.system}, {"role": "user", "content": question.user}]
        most = round(question.most * config.limit_factor)
        body = {"model": config.model, "messages": messages, config.limit_name: most, "stream": False}
        return body if config.temperature is None else body | {"temperature": config.temperature}

    def _send(self, body: dict[str, Any]) -> bytes:
        url = self.config.base_url.rstrip("/") + "/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.config.timeout) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except TimeoutError:
            raise _Again(f"no answer within {self.config.timeout:g} s") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _Again(f"no answer within {self.config.timeout:g} s") from None
            raise _Again(f"cannot be reached ({_short(error.reason)})") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Again(f"the connection broke ({_short(error) or type(error).__name__})") from None

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        try:
            said = _short(error.read(2000).decode(errors="replace"))
        except (OSError, http.client.HTTPException):
            said = ""
        line = f"HTTP {error.code} {error.reason}: {said}".rstrip(": ")
        if error.code in PASSING:
            return _Again(line, _retry_after(error.headers.get("Retry-After")))
        if error.code in REFUSING or 300 <= error.code < 400:
            config = self.config
            return UserError(f"base_url = {config.base_url!r}, model = {config.model!r}: refused with {line}")
        return _No(line)


class _Again(Exception):
    """An attempt that failed, and may not fail again; `after`: seconds that the endpoint asks to wait."""

    def __init__(self, line: str, after: float | None = None):
        super().__init__(line)
        self.after = after


class _No(Exception):
    """A question that the endpoint refuses."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Gate:
    """Holds every thread back for a while after the endpoint has asked to wait."""

    def __init__(self) -> None:
        self._until = 0.0
        self._lock = threading.Lock()

    def close(self, seconds: float) -> None:
        with self._lock:
            self._until = max(self._until, time.monotonic() + seconds)

    def wait(self, stop: threading.Event) -> None:
        while (left := self._until - time.monotonic()) > 0 and not stop.is_set():
            stop.wait(left)


def _read(content: bytes) -> Answer:
    """The answer in a response; whatever is none is worth another attempt."""
    try:
        plain = json.loads(content)
        text = plain["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        raise _Again(
            f"answers something else than a chat completion: {_short(content.decode(errors='replace'))!r}"
        ) from None
    if not isinstance(text, str) or not text.strip():
        raise _Again("answers with an empty text")
    usage = plain.get("usage")
    used = [usage.get(name) if isinstance(usage, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
    prompt, answer = (count if isinstance(count, int) else 0 for count in used)
    return Answer(text, prompt_tokens=prompt, answer_tokens=answer)


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number of them or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _short(value: object) -> str:
    return " ".join(str(value).split())[:200]


NAME = "answers.jsonl"


class AnswerCache:
    """What was asked of which endpoint -> what it answered. Several processes may add to one folder."""

    def __init__(self, folder: Path | None):
        """Without a folder, answers are kept in memory alone."""
        self._answers: dict[str, str] = {}
        self._lock = threading.Lock()
        self._path = None if folder is None else make_folder(folder) / NAME
        if self._path is not None and self._path.exists():
            self._answers.update(_read_answers(self._path))

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, body: dict[str, Any], url: str) -> str | None:
        """The answer to a request's body, if it was ever given."""
        return self._answers.get(_key(body, url))

    def keep(self, body: dict[str, Any], url: str, text: str) -> None:
        """Add an answer, at once."""
        key = _key(body, url)
        with self._lock:
            self._answers[key] = text
            if self._path is not None:
                line = json.dumps({"key": key, "model": body["model"], "answer": text})
                # The newline comes first too: a line that a crash cut short then spoils no other.
                with writing(self._path), self._path.open("a", encoding="utf-8") as file:
                    file.write(f"\n{line}\n")


def _key(body: dict[str, Any], url: str) -> str:
    asked = json.dumps([url.rstrip("/"), body], sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()


def _read_answers(path: Path) -> dict[str, str]:
    """All whole lines; one that was cut short is an answer that has to be asked for again."""
    answers: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            plain = json.loads(line)
            answers[str(plain["key"])] = str(plain["answer"])
        except (ValueError, LookupError, TypeError):
            continue
    return answers
