"""SAEs on the Hugging Face hub: download what a format reads, upload a folder with a model card, errors of one line.

A path `hf:OWNER/NAME[/FOLDER][@REVISION]` means a folder, or a file, in a repository there.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from sampled_sae.formats import FORMATS, WEIGHTS, is_sae
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import read_json
from sampled_sae.utils.measures import listed, number, shown
from sampled_sae.utils.third_party import package, reason

PREFIX = "hf:"
CARD = "README.md"


class Place(NamedTuple):
    """A folder in a repository of the hub."""

    repo: str  # OWNER/NAME
    subfolder: str | None = None  # the whole repository if None; may be a file, for formats of one file
    revision: str | None = None  # branch, tag or commit; the main branch if None

    def __str__(self) -> str:
        folder, revision = (f"/{self.subfolder}" if self.subfolder else ""), (f"@{self.revision}" * bool(self.revision))
        return f"{PREFIX}{self.repo}{folder}{revision}"


def parse(path: str | Path) -> Place | None:
    """The place that a path of the form hf:OWNER/NAME[/FOLDER][@REVISION] names; None for other paths."""
    text = path.as_posix() if isinstance(path, Path) else path
    if not text.startswith(PREFIX):
        return None
    name, _, revision = text.removeprefix(PREFIX).partition("@")
    owner, _, rest = name.partition("/")
    repo, _, folder = rest.partition("/")
    if not owner or not repo:
        raise UserError(f"{text}: must be hf:OWNER/NAME, then /FOLDER and @REVISION if needed")
    return Place(f"{owner}/{repo}", folder.strip("/") or None, revision or None)


def local(path: str | Path) -> Path:
    """The path itself, or the folder of the hub's cache to which the SAE of an `hf:` path is downloaded."""
    place = parse(path)
    return Path(path) if place is None else download(place)


def download(place: Place) -> Path:
    """Download the files of one SAE, unless they are in the hub's cache; returns its folder, or file, there.

    The files are those that some format declares (`files`). Only if none of them is an SAE is the whole folder
    downloaded, and only if there are formats that declare nothing.
    """
    hub = package("huggingface_hub", str(place), "hub")
    if place.subfolder and PurePosixPath(place.subfolder).name in WEIGHTS:
        place = place._replace(subfolder=place.subfolder.rpartition("/")[0] or None)
    folder = place.subfolder or "."
    declared = [getattr(one, "files", None) for one in FORMATS.values()]
    patterns = [posixpath.normpath(f"{folder}/{name}") for files in declared for name in files or ()]
    attempts = [[*patterns, folder], *([[f"{folder}/*".removeprefix("./")]] if None in declared else [])]
    with _one_line(place):
        for wanted in attempts:
            root = hub.snapshot_download(place.repo, revision=place.revision, allow_patterns=wanted)
            found = Path(root, *PurePosixPath(place.subfolder or "").parts)
            if is_sae(found):
                return found
        names = hub.HfApi().list_repo_files(place.repo, revision=place.revision)
    raise _refusal(place, names)


def _refusal(place: Place, names: list[str]) -> UserError:
    """The error for a folder without the files of an SAE, with folders that have some."""
    plain = {name for one in FORMATS.values() for name in getattr(one, "files", ()) if "*" not in name}
    ends = {PurePosixPath(name).name for name in plain}
    folders = sorted({str(PurePosixPath(name).parent) for name in names if PurePosixPath(name).name in ends})
    inside = [name for name in names if name.startswith(f"{place.subfolder or ''}".rstrip("/"))]
    what = "no SAE there" if inside else f"the repository has no {place.subfolder!r}"
    others = [name if name != "." else "the repository itself" for name in folders]
    there = f"; there may be SAEs in {listed(others, 4)}" if others else ""
    return UserError(f"{place}: {what}{there}")


def upload(folder: Path, place: Place, card: bool | None, private: bool | None, message: str | None) -> str:
    """Create the repository if there is none, upload the folder and return the address of the commit.

    A README.md that is in the repository stays unless `card`.
    """
    hub = package("huggingface_hub", f"repo = {place.repo!r}", "hub")
    with _one_line(place):
        api = hub.HfApi(library_name="sampled-sae")
        api.create_repo(place.repo, private=private, exist_ok=True)
        if place.revision is not None:
            api.create_branch(place.repo, branch=place.revision, exist_ok=True)
        own = f"{place.subfolder}/{CARD}" if place.subfolder else CARD
        keep = card is False or (card is None and api.file_exists(place.repo, own, revision=place.revision))
        done = api.upload_folder(
            repo_id=place.repo,
            folder_path=folder,
            path_in_repo=place.subfolder,
            revision=place.revision,
            commit_message=message or "Upload an SAE",
            ignore_patterns=[CARD] if keep else None,
        )
    return str(getattr(done, "commit_url", done))


@contextmanager
def _one_line(place: Place) -> Iterator[None]:
    """Turn the hub library's errors into one line."""
    errors: Any = package("huggingface_hub.errors", str(place), "hub")
    try:
        yield
    except UserError:
        raise
    except errors.HFValidationError as error:
        raise UserError(f"{place}: not a name of a repository ({reason(error)})") from None
    except errors.GatedRepoError:
        raise UserError(
            f"{place}: access is restricted; ask for it on the repository's page, then `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"{place}: no such repository on the hub (a private one needs `hf auth login`)") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{place}: the repository has no revision {place.revision!r}") from None
    except errors.LocalTokenNotFoundError:
        raise UserError(f"{place}: needs a token of the hub; `hf auth login` saves one") from None
    except errors.LocalEntryNotFoundError as error:
        why = reason(error.__cause__ if isinstance(error.__cause__, Exception) else error)
        raise UserError(f"{place}: not in the cache, and the hub cannot be reached ({why})") from None
    # Which errors there are depends on the hub library's version.
    except Exception as error:
        code = getattr(getattr(error, "response", None), "status_code", None)
        if code in (401, 403):
            raise UserError(f"{place}: the hub refuses access ({code}); `hf auth login` saves a token") from None
        raise UserError(f"{place}: the request to the hub failed ({reason(error)})") from None


# ---- model card: what the hub reads in its head, settings, metrics, and how to load the SAE -----------

TAGS = ("sparse-autoencoder", "mechanistic-interpretability", "sampled-sae", "saelens")
ORIGIN = {
    "model_name": "Model",
    "hook_name": "Hook point",
    "text": "Text",
    "dataset_path": "Text",
    "context_size": "Context",
    "prepend_bos": "BOS at the start of each context",
}
LOAD_HERE = """\
```python
import sampled_sae as ss

sae = ss.SAE.from_pretrained({arguments})
codes = sae.encode(x)  # activations x [..., {d_in}] -> [..., {d_sae}]
```"""
LOAD_IN_SAELENS = """\
```python
from huggingface_hub import snapshot_download
from sae_lens import SAE

sae = SAE.load_from_disk(snapshot_download({repo}){folder})
```"""


def model_card(cfg: InferenceConfig, place: Place, folder: Path | None, license: str | None = None) -> str:
    """The text of README.md; `folder` holds the evaluations' results, if there are any."""
    method = cfg.training.name if cfg.training is not None else None
    head: dict[str, Any] = {"library_name": "sampled-sae", "license": license, "tags": [*TAGS, cfg.architecture]}
    model = str(cfg.metadata.get("model_name") or "")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) and not Path(model).exists():
        head["base_model"] = model
    title = f"{place.subfolder or place.repo.partition('/')[2]}"
    load = [json.dumps(place.repo)]
    load += [f"subfolder={json.dumps(place.subfolder)}"] * bool(place.subfolder)
    load += [f"revision={json.dumps(place.revision)}"] * bool(place.revision)
    parts = [
        "---\n"
        + "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items() if value is not None)
        + "\n---",
        f"# {shown(title)}",
        f"A sparse autoencoder of {cfg.d_sae:,} latents for activations of width {cfg.d_in:,}, made with sampled-sae.",
        "## Load it",
        LOAD_HERE.format(arguments=", ".join(load), d_in=cfg.d_in, d_sae=cfg.d_sae),
        "The files are a SAELens folder. In SAELens:",
        LOAD_IN_SAELENS.format(
            repo=", ".join([load[0], *load[2 if place.subfolder else 1 :]]),
            folder=" + " + json.dumps(f"/{place.subfolder}") if place.subfolder else "",
        ),
        "## Configuration",
        _table(("setting", "value"), _settings(cfg, method)),
    ]
    if found := metrics(cfg, folder):
        parts += ["## Metrics", _table(("metric", "value", "interval"), found)]
    return "\n\n".join(parts) + "\n"


def _settings(cfg: InferenceConfig, method: str | None) -> list[tuple[str, str]]:
    rows: list[tuple[str, Any]] = [
        ("Architecture", cfg.architecture),
        ("Width of the activations (d_in)", cfg.d_in),
        ("Latents (d_sae)", cfg.d_sae),
        ("K", cfg.k),
        ("Method", method),
        *((title, cfg.metadata.get(name)) for name, title in ORIGIN.items()),
    ]
    training = cfg.metadata.get("training")
    if isinstance(training, Mapping):
        rows += [(f"Training: {name}", training.get(name)) for name in ("steps", "batch_size", "seed")]
    return [(title, str(value)) for title, value in rows if value is not None]


def metrics(cfg: InferenceConfig, folder: Path | None) -> list[tuple[str, str, str]]:
    """Numbers on held-out tokens at the end of training, then those in the folder's results: title, value, interval."""
    training = cfg.metadata.get("training")
    heldout = training.get("heldout") if isinstance(training, Mapping) else None
    values = heldout if isinstance(heldout, Mapping) else {}
    rows = [
        (f"{name.upper()} on held-out tokens", f"{value:.4g}", "")
        for name in ("fvu", "l0")
        if (value := number(values.get(name))) is not None
    ]
    for file in sorted(folder.glob("evals/*.json")) if folder is not None else ():
        try:
            content = read_json(file)
        except UserError:
            continue  # a damaged result is none
        known = content.get("metrics") if isinstance(content, dict) else None
        for title, one in known.items() if isinstance(known, dict) else ():
            value, low, high = (number(one.get(key)) for key in ("value", "low", "high"))
            if value is not None:
                interval = "" if low is None or high is None else f"{low:.4g} to {high:.4g}"
                rows.append((f"{file.stem}: {title}", f"{value:.4g}", interval))
    return rows


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(shown(cell).replace("|", "\\|") for cell in row) + " |" for row in cells)
