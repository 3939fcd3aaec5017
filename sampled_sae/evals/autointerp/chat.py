"""Questions to a chat model behind an OpenAI-compatible endpoint, in parallel, with an answer cache on disk."""

from __future__ import annotations

import email.utils
import hashlib
import json
import os
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from sampled_sae.config import Bound, Config, NonNegative, Positive, PositiveNumber, at_least, require
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder, writing
from sampled_sae.utils.third_party import package

LOCAL = ("localhost", "127.0.0.1", "::1")
PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # HTTP errors that are worth another attempt
REFUSING = (401, 403, 404, 405)  # HTTP errors of every question: the key, the model or the address is wrong


@dataclass(frozen=True, slots=True)
class ChatConfig(Config):
    """The chat endpoint, and how questions are sent."""

    base_url: str = "https://api.openai.com/v1"
    """Address of the endpoint, up to but without /chat/completions."""
    model: str = "gpt-4o-mini"
    """Model, by the endpoint's name for it."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key; not needed for an endpoint on this machine."""
    temperature: Annotated[float, Bound("must be from 0 to 2", lambda value: 0 <= value <= 2)] | None = 0.0
    """Sampling temperature; None in Python leaves it to the endpoint, for models that allow no other."""
    limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The endpoint's name for the maximum length of an answer; newer OpenAI models take the second."""
    limit_factor: Annotated[float, at_least(1)] = 1.0
    """Factor for the maximum length of an answer; use a larger one for reasoning models."""
    concurrency: Positive = 8
    """Questions in parallel."""
    timeout: PositiveNumber = 60.0
    """Seconds after which a question counts as not answered."""
    attempts: Positive = 6
    """Maximum number of attempts per question."""
    wait: NonNegative = 1.0
    """Seconds before the second attempt; doubled each time, up to `longest_wait`."""
    longest_wait: NonNegative = 60.0
    """Maximum number of seconds between two attempts, even if the endpoint demands more."""
    cache: str | None = "~/.cache/sampled-sae/chat"
    """Folder of the answer cache, so that no question is paid for twice; None in Python keeps it in memory."""

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
    user: str
    most: int  # most tokens of the answer


class Answer(NamedTuple):
    """The answer to one question."""

    text: str | None  # None if there is no answer
    reason: str = ""  # why there is none
    cached: bool = False
    prompt_tokens: int = 0  # tokens of the question, as the endpoint counts them; 0 if it does not report them
    answer_tokens: int = 0


STOPPED = Answer(None, "stopped")
Done = Callable[[int], None]  # Called with the number of finished items


class Chat:
    """Sends questions to one model; safe to share between threads."""

    def __init__(self, config: ChatConfig):
        """The key is looked up here, so that a missing one is reported before anything is computed."""
        self.config = config
        self.cache = AnswerCache(config)
        key = os.environ.get(config.key_variable, "")
        if not key and not config.local:
            raise UserError(f"{config.key_variable} is not set: {config.base_url} needs a key in that variable")
        self._openai, self._httpx = (
            package(name, f"base_url = {config.base_url!r}", "evals") for name in ("openai", "httpx")
        )
        # Names of accounts in the environment are not for an endpoint on this machine.
        hidden = [] if key else ["Authorization"]
        hidden += ["OpenAI-Organization", "OpenAI-Project"] if config.local else []
        self._hidden = {name: self._openai.Omit() for name in hidden}
        # A redirect would send the key elsewhere, and a proxy is not used for this machine.
        http = self._httpx.Client(
            follow_redirects=False,
            trust_env=not config.local,
            timeout=config.timeout,
            limits=self._httpx.Limits(max_connections=config.concurrency),
        )
        self._client = self._openai.OpenAI(
            base_url=config.base_url, api_key=key or "none", max_retries=0, http_client=http
        )
        self._gate = _Gate()
        self._random = random.Random(0)
        self.answers: list[Answer] = []  # all answers so far, for the count of calls

    def ask(self, questions: Sequence[Question], done: Done | None = None) -> list[Answer]:
        """An answer to each question, in order; `done` is called after each one."""
        kept = [self.cache.find(self._body(question)) for question in questions]
        found = {number: Answer(text, cached=True) for number, text in enumerate(kept) if text is not None}
        if done is not None:
            done(len(found))
        self._ask_all({number: one for number, one in enumerate(questions) if number not in found}, found, done)
        answers = [found[number] for number in range(len(questions))]
        self.answers += answers
        return answers

    def _ask_all(self, asked: dict[int, Question], found: dict[int, Answer], done: Done | None) -> None:
        """Add the answers to these questions to `found`, by number."""
        pool, stop = ThreadPoolExecutor(self.config.concurrency), threading.Event()
        pending: dict[Future[Answer], int] = {}
        answered, lost = 0, 0
        try:
            pending.update({pool.submit(self._ask, question, stop): number for number, question in asked.items()})
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    answer = future.result()
                    if answer is STOPPED:  # the error that stopped it comes with another future
                        del pending[future]
                        continue
                    found[pending.pop(future)] = answer
                    answered, lost = answered + (answer.text is not None), lost + (answer.text is None)
                    # Give up instead of waiting through all retries of all questions where no answer ever came.
                    if not answered and lost >= min(len(asked), self.config.concurrency):
                        url = self.config.base_url
                        raise UserError(f"base_url = {url!r}: no answer to {lost} calls: {answer.reason}")
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
                answer = self._send(body)
            except _Again as again:
                reason = str(again)
                # Jitter, so that questions refused together do not return together.
                pause = config.wait * 2**attempt * self._random.uniform(0.75, 1.25)
                pause = min(max(pause, again.after or 0.0), config.longest_wait)
                if again.after is not None:
                    self._gate.close(pause)
                if attempt + 1 < config.attempts:
                    stop.wait(pause)
                continue
            except UserError:
                stop.set()
                raise
            if answer.text is not None:
                self.cache.keep(body, answer.text)
            return answer
        return Answer(None, f"{reason} ({config.attempts} attempts)")

    def _body(self, question: Question) -> dict[str, Any]:
        config = self.config
        messages = [{"role": "system", "content": question.system}, {"role": "user", "content": question.user}]
        most = round(question.most * config.limit_factor)
        body = {"model": config.model, "messages": messages, config.limit_name: most, "stream": False}
        return body if config.temperature is None else body | {"temperature": config.temperature}

    def _send(self, body: dict[str, Any]) -> Answer:
        """One attempt; an Answer without text if the endpoint rejects the question itself."""
        try:
            create = self._client.chat.completions.with_raw_response.create
            return _read(create(**body, extra_headers=self._hidden).http_response.content)
        except self._openai.APIStatusError as error:
            code, response = error.status_code, error.response
            line = f"HTTP {code} {response.reason_phrase}: {_short(response.text[:2000])}".rstrip(": ")
            if code in PASSING:
                raise _Again(line, _retry_after(response.headers.get("Retry-After"))) from None
            if code in REFUSING or 300 <= code < 400:
                where = f"base_url = {self.config.base_url!r}, model = {self.config.model!r}"
                raise UserError(f"{where}: refused with {line}") from None
            return Answer(None, line)
        except self._openai.APITimeoutError:
            raise _Again(f"no answer within {self.config.timeout:g} s") from None
        except self._openai.APIConnectionError as error:
            cause = error.__cause__
            down = isinstance(cause, self._httpx.ConnectError)
            what = "cannot be reached" if down else "the connection broke"
            raise _Again(f"{what} ({_short(cause) or type(cause).__name__})") from None


class _Again(Exception):
    """A failed attempt that is worth repeating; `after`: seconds that the endpoint demands."""

    def __init__(self, line: str, after: float | None = None):
        super().__init__(line)
        self.after = after


class _Gate:
    """Holds all threads back while the endpoint demands a pause."""

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
    """The answer in a response; anything else is worth another attempt."""
    try:
        plain = json.loads(content)
        text = plain["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        said = _short(content.decode(errors="replace"))
        raise _Again(f"answers something else than a chat completion: {said!r}") from None
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
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def _short(value: object) -> str:
    return " ".join(str(value).split())[:200]


NAME = "answers.jsonl"


class AnswerCache:
    """Answers by endpoint and request. Several processes may add to one folder."""

    def __init__(self, config: ChatConfig):
        """Without a folder, answers are kept in memory alone."""
        self._url = config.base_url.rstrip("/")
        self._answers: dict[str, str] = {}
        self._lock = threading.Lock()
        self._path = None if config.cache is None else make_folder(Path(config.cache).expanduser()) / NAME
        if self._path is not None and self._path.exists():
            # A line that was cut short is an answer that has to be asked for again.
            for line in self._path.read_text(encoding="utf-8", errors="replace").split("\n"):
                with suppress(ValueError, LookupError, TypeError, RecursionError):
                    plain = json.loads(line)
                    self._answers[str(plain["key"])] = str(plain["answer"])

    def find(self, body: dict[str, Any]) -> str | None:
        """The answer to a request's body, if it was ever given."""
        return self._answers.get(self._key(body))

    def keep(self, body: dict[str, Any], text: str) -> None:
        """Add an answer, at once."""
        key = self._key(body)
        with self._lock:
            self._answers[key] = text
            if self._path is not None:
                line = json.dumps({"key": key, "model": body["model"], "answer": text})
                # The newline comes first too: a line that a crash cut short then spoils no other.
                with writing(self._path), self._path.open("a", encoding="utf-8") as file:
                    file.write(f"\n{line}\n")

    def _key(self, body: dict[str, Any]) -> str:
        return hashlib.sha256(json.dumps([self._url, body], sort_keys=True).encode()).hexdigest()
