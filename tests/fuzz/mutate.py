"""Damage to files: what was changed, and whether a reader may accept it with another result."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

Class = Literal["syntax", "type", "field", "value", "bytes"]
"""Kind of damage.

syntax: no longer a file of its format (for JSON also duplicate names, or numbers that are none).
type: a value of another JSON type, or null. field: one is missing, or there is one more.
value: another value of the same type, which may be another valid setting. bytes: binary content changed.
"""


class Damage(NamedTuple):
    """A changed file."""

    content: bytes
    kind: Class
    where: str
    """What was changed, for the report."""
    top: str = ""
    """Name of the outermost JSON field that was changed; empty for the whole file."""


class Raw(str):
    """Text that stands in JSON as it is."""


HUGE = Raw("9" * 5000)
OTHERS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e-320, 1e308, 3),
    *("", "x", "\x1b[31m\n\x00", "é\u202e" * 9, "n" * 300, "../../x", "nan", "inf", "=1+1", "\ud800"),
    *([], {}, [None], [[]], {"a": None}, [1, "x"], {"": {}}, list(range(300)), {"kind": "none"}),
)
SYNTAX: tuple[Raw, ...] = (HUGE, Raw("NaN"), Raw("-Infinity"), Raw("1e999"), Raw("[" * 3000 + "]" * 3000), Raw("tru"))
Path = tuple[Any, ...]


def dumps(value: Any) -> bytes:
    """JSON, with `Raw` text as it is."""
    raw: list[str] = []

    def marked(item: Any) -> Any:
        if isinstance(item, Raw):
            raw.append(item)
            return f"@raw{len(raw) - 1}@"
        if isinstance(item, dict):
            return {name: marked(part) for name, part in item.items()}
        return [marked(part) for part in item] if isinstance(item, list) else item

    text = json.dumps(marked(value))
    for number, part in enumerate(raw):
        text = text.replace(f'"@raw{number}@"', part)
    return text.encode("utf-8", "surrogatepass")


def paths(value: Any, above: Path = ()) -> Iterator[Path]:
    """The path of each value inside, and of the whole."""
    yield above
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        yield from paths(item, (*above, name))


def at(value: Any, path: Path) -> Any:
    for name in path:
        value = value[name]
    return value


def changed(value: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy with the value at a path replaced."""
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], change)
    return copy


def _same_type(a: Any, b: Any) -> bool:
    number = (int, float)
    if isinstance(a, bool) or isinstance(b, bool):
        return isinstance(a, bool) and isinstance(b, bool)
    return (isinstance(a, number) and isinstance(b, number)) or type(a) is type(b)


def unsealed_damage(content: bytes, draw: random.Random) -> Damage:
    """One change to a JSON file without its checksum, so that its fields are read."""
    return json_damage(unsealed(content), draw)


def unsealed(content: bytes) -> bytes:
    """JSON without its checksum."""
    return json.dumps({name: item for name, item in json.loads(content).items() if name != "checksum"}).encode()


def json_damage(content: bytes, draw: random.Random) -> Damage:
    """One change to a JSON file."""
    value = json.loads(content)
    # All depths are equally likely, so that long lists deep inside do not take all inputs.
    by_depth: dict[int, list[Path]] = {}
    for path in paths(value):
        by_depth.setdefault(len(path), []).append(path)
    path = draw.choice(by_depth[draw.choice(list(by_depth))])
    top = str(path[0]) if path else ""
    where = "/".join(map(str, path)) or "the whole"
    what = draw.randrange(12)
    if what < 5:
        new = draw.choice(OTHERS)
        kind: Class = "value" if _same_type(at(value, path), new) else "type"
        return Damage(dumps(changed(value, path, lambda old: new)), kind, f"{where} = {new!r:.60}", top)
    if what == 5:
        bad = draw.choice(SYNTAX)
        return Damage(dumps(changed(value, path, lambda old: bad)), "syntax", f"{where} = {bad!s:.20}", top)
    if what == 6 and path:

        def without(parent: Any) -> Any:
            rest = dict(parent) if isinstance(parent, dict) else list(parent)
            del rest[path[-1]]
            return rest

        return Damage(dumps(changed(value, path[:-1], without)), "field", f"{where} is missing", top)
    if what == 7 and isinstance(at(value, path), dict):
        name = draw.choice(["extra", "", "\x00", "__class__", "n" * 500, "kind"])
        inside = changed(value, path, lambda old: {**old, name: draw.choice(OTHERS)})
        return Damage(dumps(inside), "field", f"{where}: one more field {name!r:.20}", top or name)
    if what == 8 and isinstance(at(value, path), dict) and at(value, path):
        name = draw.choice(list(at(value, path)))
        twice = Raw(dumps(at(value, path)).decode()[:-1] + f", {json.dumps(name)}: null}}")
        return Damage(dumps(changed(value, path, lambda old: twice)), "syntax", f"{where}/{name} is there twice", top)
    return text_damage(content, draw)


def text_damage(content: bytes, draw: random.Random) -> Damage:
    """A change that leaves no valid JSON or UTF-8, unless it only touches white space."""
    what, at_ = draw.randrange(6), draw.randrange(max(1, len(content)))
    if what == 0:
        return Damage(content[:at_], "syntax", f"cut at {at_}")
    if what == 1:
        return Damage(
            content[:at_] + bytes([draw.choice([0xFF, 0xC0, 0x80, 0])]) + content[at_:], "syntax", "not UTF-8"
        )
    if what == 2:
        return Damage(b"\xef\xbb\xbf" + content, "syntax", "a byte order mark")
    if what == 3:
        return Damage(content + draw.choice([b"{}", b"\x00", b"]", b"x"]), "syntax", "more at the end")
    if what == 4:
        return Damage(content.decode("utf-8", "replace").encode("utf-16"), "syntax", "UTF-16")
    new = draw.choice([b"", b"\n", b"null", b"[]", b"{}", b"0", b'"x"', b"\x80\x04N."])
    return Damage(new, "syntax" if new[:1] in (b"", b"\n", b"\x80") else "type", f"replaced by {new!r}")


def lines_damage(content: bytes, draw: random.Random) -> Damage:
    """A change to one line of JSON lines, or to the file's text."""
    lines = [line for line in content.splitlines(keepends=True) if line.strip()]
    if draw.random() < 0.6:
        number = draw.randrange(len(lines))
        damage = json_damage(lines[number], draw)
        lines[number] = damage.content + b"\n"
        return damage._replace(content=b"".join(lines), where=f"line {number + 1}: {damage.where}")
    return text_damage(content, draw)


def binary_damage(content: bytes, draw: random.Random) -> Damage:
    """A change to any file; safetensors headers and zip archives are changed by their structure."""
    what = draw.randrange(8)
    at_ = (
        draw.randrange(max(1, len(content))) if draw.random() < 0.5 else draw.randrange(max(1, min(200, len(content))))
    )
    if what == 0:
        return Damage(content[:at_], "bytes", f"cut at {at_}")
    if what == 1:
        return Damage(content + draw.randbytes(draw.choice([1, 8, 1000])), "bytes", "more at the end")
    if what == 2:
        return Damage(draw.randbytes(len(content)), "bytes", "replaced by random bytes")
    if what == 3:
        size = draw.choice([1, 4, 64])
        return Damage(content[:at_] + bytes(size) + content[at_ + size :], "bytes", f"{size} zeros at {at_}")
    if what in (4, 5) and (changed := _safetensors(content, draw)) is not None:
        return changed
    if what == 6:
        end = min(len(content), at_ + draw.choice([1, 8, 100]))
        return Damage(content[:at_] + content[end:], "bytes", f"bytes {at_} to {end} are missing")
    flipped = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 8])):
        if flipped:
            flipped[draw.randrange(len(flipped)) if draw.random() < 0.5 else at_] ^= 1 << draw.randrange(8)
    return Damage(bytes(flipped), "bytes", f"bits flipped near {at_}")


def _safetensors(content: bytes, draw: random.Random) -> Damage | None:
    """A header that does not tell the truth; none if this is no safetensors file."""
    try:
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
    except (ValueError, struct.error):
        return None
    if draw.random() < 0.2:
        wrong = draw.choice([0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1])
        return Damage(struct.pack("<Q", wrong) + content[8:], "bytes", f"header of {wrong} bytes")
    names = [name for name in header if name != "__metadata__"]
    if len(names) > 1 and draw.random() < 0.3:
        a, b = draw.sample(names, 2)
        header[a], header[b] = header[b], header[a]
        damage = Damage(json.dumps(header).encode(), "bytes", f"{a} and {b} swapped")
    else:
        damage = json_damage(json.dumps(header).encode(), draw)
    text = damage.content + b" " * (-len(damage.content) % 8)
    return Damage(struct.pack("<Q", len(text)) + text + content[8 + size :], "bytes", f"header: {damage.where}")


def odd_arrays(draw: random.Random) -> tuple[bytes, str]:
    """An .npy or .npz file with something else than a matrix of numbers, and what that is."""
    shapes = [(), (0,), (3,), (0, 4), (4, 0), (2, 3, 4, 5)]
    choices: dict[str, Any] = {f"shape {shape}": np.zeros(shape, np.float32) for shape in shapes}
    choices |= {f"dtype {kind}": np.zeros((4, 4), kind) for kind in ("bool", "complex64", "S3", "U3", "M8[s]", "V5")}
    choices |= {"objects": np.array([[object, None]], object), "a record": np.zeros(3, [("a", "f4"), ("b", "i8")])}
    choices |= {f"value {value}": np.full((40, 4), value) for value in (np.nan, np.inf, 1e38, 1e300, -1e39)}
    name = draw.choice(list(choices))
    file = io.BytesIO()
    if draw.random() < 0.3:
        np.savez(file, a=choices[name])
        name += " in an archive"
    else:
        np.save(file, choices[name], allow_pickle=True)
    return file.getvalue(), name


def other_archive(draw: random.Random) -> bytes:
    """A zip archive with entries that no program wrote."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in draw.sample(["data.pkl", "archive/data.pkl", "../x", "a.npy", "archive/version"], 2):
            archive.writestr(
                name, draw.choice([b"", b"\x80\x04cos\nsystem\n(S'true'\ntR.", b"3\n", draw.randbytes(50)])
            )
    return file.getvalue()
