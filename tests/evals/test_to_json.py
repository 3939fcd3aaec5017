import json
from dataclasses import dataclass
from typing import NamedTuple

from sampled_sae.config import Config, plain


class Named(NamedTuple):
    numbers: tuple[int, ...]
    inner: object


@dataclass(frozen=True)
class Settings(Config):
    pair: tuple[int, int] = (1, 2)
    limit: float = float("inf")


def test_plain_is_what_json_gives_back():
    value = [Named((1, 2), Named((), None)), Settings(), {3: Settings()}, "text", 1.5]
    found = plain(value)
    settings = {"pair": [1, 2], "limit": "inf"}
    named = {"numbers": [1, 2], "inner": {"numbers": [], "inner": None}}
    assert found == json.loads(json.dumps(found)) == [named, settings, {"3": settings}, "text", 1.5]
