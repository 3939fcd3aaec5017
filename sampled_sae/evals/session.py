"""Many SAEs, in folders or in memory, and evaluations on one language model: settings, text, reuse of results.

The model is loaded once, and only if something is left to measure. SAEs of one layer with equal settings share its
passes, as many at once as memory holds. Results are written to evals/NAME.json in each SAE's folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.config import plain
from sampled_sae.data.contexts import TextConfig, contexts
from sampled_sae.data.text import Text, TextList, TextSource, as_text
from sampled_sae.evals import Evaluation, Job, chosen, registry
from sampled_sae.evals.results import find_saes, fingerprint, read_result, write_result
from sampled_sae.formats import describe
from sampled_sae.hooks import Where, saved_hook
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.models.load import load_model
from sampled_sae.sae import SAE
from sampled_sae.utils import system
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.measures import find
from sampled_sae.utils.progress import show
from sampled_sae.utils.system import git_commit, usable_device, versions

CONTEXTS = 64  # contexts that are read by default
USED = 0.5  # share of the free memory that the SAEs measured at once may take, with what is kept of them
KEPT = 2**14  # bytes per latent that an evaluation keeps of one SAE, at most: the nonzero codes of texts
Load = Callable[[str, torch.device, torch.dtype, Sequence[int]], LanguageModel]


class Subject(NamedTuple):
    """One SAE that is measured: in a folder, or in memory."""

    label: str  # for error messages: the folder, or saes[i]
    cfg: InferenceConfig
    folder: Path | None  # None if it is in memory only
    load: Callable[[torch.device], SAE]


def subjects(saes: Sequence[SAE | Path | str]) -> list[Subject]:
    """SAEs, and those in folders, each once."""
    found: dict[Any, Subject] = {}
    for number, item in enumerate(saes):
        if isinstance(item, SAE):
            saved = item.folder is not None and item.is_saved_in(item.folder)
            folder = item.folder if saved else None
            found[number] = Subject(f"saes[{number}]", item.cfg, folder, partial(lambda sae, _: sae, item))
        else:
            for folder in find_saes([Path(item)]):
                found.setdefault(folder, Subject(str(folder), describe(folder), folder, partial(SAE.load, folder)))
    if not found:
        raise UserError("saes: must name at least one SAE")
    return list(found.values())


def layer_of(sae: InferenceConfig, asked: Where | None, where: object) -> Where:
    """The hook point that an SAE names, or `asked` if it names none, or none that a model knows."""
    own = saved_hook(sae.metadata)
    if asked is not None and isinstance(own, int) and own != asked:
        raise UserError(f"layer = {asked}: {where} is of layer {own}; leave the flag out")
    found = own if asked is None else asked
    if found is None:
        raise UserError(f"{where}: does not name its layer; give --layer, or --hook")
    return found


def named(sae: InferenceConfig, name: str, asked: Any, flag: str, where: object) -> Any:
    """`asked`, or else the entry of the SAE's metadata."""
    value = sae.metadata.get(name) if asked is None else asked
    if value is None:
        raise UserError(f"{where}: does not name its {flag}; give --{flag}")
    return value


class Request(NamedTuple):
    """One evaluation with its settings."""

    evaluation: Evaluation
    config: Any


def requests(evals: Sequence[str | Any]) -> list[Request]:
    """Names of evaluations (default settings), or their settings -> requests, each evaluation once."""
    found: dict[str, Request] = {}
    for item in evals:
        if isinstance(item, Request):
            found[item.evaluation.name] = item
        elif isinstance(item, str):
            for evaluation in chosen([item]):
                found[evaluation.name] = Request(evaluation, evaluation.config())
        else:
            matches = [one for one in registry().values() if type(item) is one.config]
            if not matches:
                raise UserError(f"evals = {item!r}: must be the name or the settings of one of {', '.join(registry())}")
            found[matches[0].name] = Request(matches[0], item)
    if not found:
        raise UserError(f"evals: must name at least one of {', '.join(registry())}")
    return list(found.values())


def evaluate_saes(
    saes: Sequence[SAE | Path | str],
    model: LanguageModel | str | None,
    evals: Sequence[Any] = ("core",),
    *,
    text: Text | None = None,
    layer: Where | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    redo: bool = False,
    load: Load = load_model,
) -> list[dict[str, Any]]:
    """Measure SAEs, or those in these folders; returns for each SAE its results as plain JSON by evaluation.

    `model`: a loaded one, its name, or None for the one that the SAEs name. `evals`: names, settings, or requests.
    `layer`, which may be the name of a hook point, is for SAEs that do not name theirs. Results of SAEs in folders are
    kept there, and not measured again if they were measured in the same way, unless `redo`.
    """
    text = None if text is None else as_text(text)
    asked = requests(evals)
    for request in asked:
        if request.evaluation.needs.text and text is None:
            raise UserError(f"text: is missing; {request.evaluation.name} reads one")
    if isinstance(model, LanguageModel):
        place, precision = model.device, model.dtype
    else:
        place = usable_device(device)
        precision = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    return Session(subjects(saes), model, place, precision, layer, text, load).evaluate(asked, redo)


@dataclass
class Session:
    """SAEs and the language model that they are measured on."""

    saes: list[Subject]
    _model: LanguageModel | str | None
    device: torch.device
    dtype: torch.dtype
    layer: Where | None
    text: TextSource | TextList | None
    _load: Load = load_model
    _layers: list[int] = field(default_factory=list)  # those that are measured
    _results: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # by label and evaluation

    @cached_property
    def model(self) -> LanguageModel:
        """The model, loaded when it is first needed."""
        if isinstance(self._model, LanguageModel):
            return self._model
        names = {str(named(sae.cfg, "model_name", self._model, "model", sae.label)) for sae in self.saes}
        if len(names) > 1:
            raise UserError(f"folders: SAEs of several models ({', '.join(sorted(names))}); evaluate each on its own")
        return self._load(names.pop(), self.device, self.dtype, self._layers)

    def evaluate(self, asked: Sequence[Request], redo: bool = False) -> list[dict[str, Any]]:
        """Measure what is left; for each SAE its results by evaluation."""
        left = {r: [s for s in self.saes if redo or not self._reuse(s, r)] for r in asked}
        todo = {sae.label: sae for saes in left.values() for sae in saes}
        layers = {label: layer_of(sae.cfg, self.layer, label) for label, sae in todo.items()}
        self._layers = sorted({layer for layer in layers.values() if isinstance(layer, int)})
        for request, saes in left.items():  # what is refused is known before the model is loaded
            if saes:
                request.evaluation.check(request.config)
            for sae in saes if request.evaluation.needs.text else ():
                self._count(request, sae)
                if self.text is not None:
                    self.text.documents()
        for label, sae in todo.items():
            own = sae.cfg.metadata.get("model_name")
            if own is not None and Path(str(own)).name.lower() != Path(self.model.name).name.lower():
                print(f"{label} was trained on {own}; it is measured on {self.model.name}", file=sys.stderr)
        for request, saes in left.items():
            self._measure(request, saes, layers)
        return [{r.evaluation.name: self._results[sae.label, r.evaluation.name] for r in asked} for sae in self.saes]

    # ---- reuse -------------------------------------------------------------------------------------------

    def asked(self, request: Request, sae: Subject) -> dict[str, Any]:
        """Everything that decides the numbers, as plain JSON."""
        model = self._model
        if isinstance(model, LanguageModel):
            model = None if model.name == sae.cfg.metadata.get("model_name") else model.name
        about: dict[str, Any] = {"model": model, "layer": self.layer}
        about |= {"model_dtype": str(self.dtype).removeprefix("torch."), "device": self.device.type}
        evaluation = request.evaluation
        if evaluation.needs.text and self.text is not None:
            about["text"] = self.text.name
            if isinstance(self.text, TextSource):
                about |= {"text_field": self.text.field, "split": self.text.split, "subset": self.text.subset}
                about["files"] = stamps([self.text.name])
            else:
                about["part"] = self.text.part
        if files := evaluation.files(request.config):
            about["files"] = about.get("files", []) + stamps(files)
        if evaluation.definition > 1:
            about["definition"] = evaluation.definition
        return about | decisive(request.config.to_dict())

    def _reuse(self, sae: Subject, request: Request) -> bool:
        """Take over the result in the SAE's folder, if it was measured in the same way."""
        name = request.evaluation.name
        content = None if sae.folder is None else read_result(sae.folder, name)
        if content is None or sae.folder is None:
            return False
        # Settings that were added later had their defaults.
        before = decisive(request.evaluation.config().to_dict()) | content["asked"]
        if before != plain(self.asked(request, sae)) or content.get("weights") != fingerprint(sae.folder):
            return False
        self._results[sae.label, name] = content["result"]
        return True

    # ---- text --------------------------------------------------------------------------------------------

    def _count(self, request: Request, sae: Subject) -> int:
        """Contexts that are read: by default, of the text of training, no more than were held out.

        Text that the SAE was trained on is refused, as far as its metadata name it.
        """
        wanted, about = request.evaluation.contexts(request.config), sae.cfg.metadata
        held, size = about.get("heldout_contexts"), about.get("context_size")
        if held is None or size is None or self.text is None or not same_text(self.text.name, about.get("text")):
            return CONTEXTS if wanted.number is None else wanted.number
        length = wanted.length or size
        count = max(1, min(CONTEXTS, held * size // length)) if wanted.number is None else wanted.number
        if wanted.heldout and count * length > held * size:
            raise UserError(
                f"contexts = {count}: {sae.label} was trained on this text but for its first {held} contexts "
                f"of {size} tokens; give {held * size // length} at most, or another text"
            )
        return count

    def _contexts(self, request: Request, sae: Subject) -> Tensor | None:
        """The first contexts [n, L] of the text, cut as in training."""
        if not request.evaluation.needs.text:
            return None
        assert self.text is not None
        wanted = request.evaluation.contexts(request.config)
        count, size = self._count(request, sae), wanted.length or sae.cfg.metadata.get("context_size")
        if size is None:
            raise UserError("an SAE does not name its context; give --core.context")
        bos = sae.cfg.metadata.get("prepend_bos")
        cut = TextConfig(int(size), self.model.bos if bos is None else bool(bos))
        found = list(islice(contexts(self.text.documents(), self.model.tokenizer, cut), count))
        if len(found) < (count if wanted.all else 1):
            raise UserError(f"contexts = {count}: the text holds {len(found)} of {cut.context} tokens")
        if len(found) < count:
            name, tokens = request.evaluation.name, len(found) * cut.context
            print(f"{name} reads the whole text: {tokens:,} of {count * cut.context:,} tokens", file=sys.stderr)
        return torch.stack(found)

    # ---- measuring ---------------------------------------------------------------------------------------

    def _measure(self, request: Request, saes: Sequence[Subject], layers: Mapping[str, Where]) -> None:
        """Measure SAEs with equal settings and text together."""
        groups: dict[Any, list[Subject]] = {}
        reads = request.evaluation.needs.text
        cut_by = ("context_size", "prepend_bos", "skip_first") if reads else ()
        for sae in saes:
            settings = request.evaluation.settings_for(request.config, sae.cfg, self.model)
            text = (*map(sae.cfg.metadata.get, cut_by), self._count(request, sae) if reads else 0)
            groups.setdefault((self.model.where(layers[sae.label]), settings, text), []).append(sae)
        for (layer, settings, _), members in groups.items():
            tokens = self._contexts(request, members[0])
            for part in self._parts(members, request.evaluation.needs.saes_at_once):
                self._measure_together(request, layer, settings, tokens, part)

    def _parts(self, saes: list[Subject], most: int | None) -> Iterator[list[Subject]]:
        """As many SAEs at once as fit, one at least."""
        free, part, size = system.available(self.device), list[Subject](), 0
        for sae in saes:
            need = sae.cfg.d_sae * (8 * sae.cfg.d_in + KEPT)
            full = free is not None and size + need > USED * free
            if part and (full or len(part) == most):
                yield part
                part, size = [], 0
            part.append(sae)
            size += need
        yield part

    def _measure_together(
        self, request: Request, layer: Where, settings: Any, tokens: Tensor | None, subjects: list[Subject]
    ) -> None:
        evaluation = request.evaluation
        try:
            saes = [subject.load(self.device) for subject in subjects]
        except torch.cuda.OutOfMemoryError:
            raise UserError(f"device = {self.device}: {len(subjects)} SAEs do not fit into its memory") from None
        bar = None

        def progress(done: int, total: int) -> None:
            nonlocal bar
            if bar is None:
                what = f"{evaluation.name}, {len(saes)} SAE{'s' * (len(saes) > 1)}"
                bar = show(total, start=done, what=what, unit=evaluation.unit)
            bar.update(done)

        last = time.monotonic()
        try:
            results = evaluation.run(Job(saes, self.model, layer, tokens, progress), settings)
            results = results if evaluation.one_by_one else iter(list(results))
            share = (time.monotonic() - last) / len(saes)
            for subject, result in zip(subjects, results, strict=True):
                # The first one's time includes what is shared.
                seconds = time.monotonic() - last if evaluation.one_by_one else share
                self._finish(request, subject, result, layer, settings, seconds)
                last = time.monotonic()
        finally:
            if bar is not None:
                bar.close()

    def _finish(self, request: Request, sae: Subject, result: Any, layer: Where, settings: Any, seconds: float) -> None:
        evaluation, found = request.evaluation, request.evaluation.to_dict(result)
        self._results[sae.label, evaluation.name] = found
        if sae.folder is None:
            return
        evaluation.save_extras(result, sae.folder)
        content = {
            "result": found,
            "metrics": {m.title: value._asdict() for m in evaluation.metrics if (value := find(m, found)) is not None},
            "sae": None if sae.cfg.training is None else sae.cfg.training.to_dict(),
            "layer": layer,
            "model": self.model.name,
            "seconds": seconds,
            "weights": fingerprint(sae.folder),
            "saebench": evaluation.to_saebench(result, settings),
            "versions": versions(),
            "git_commit": git_commit(),
            "asked": self.asked(request, sae),
        }
        write_result(sae.folder, evaluation.name, content)


def same_text(one: str | None, other: str | None) -> bool:
    """Whether two names mean the same text; paths may be written in several ways."""
    if one is None or other is None or one == other:
        return one == other
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def stamps(names: Sequence[str]) -> list[Any]:
    """Name, size and time of the files among these names, which change with their content."""
    files = [path for name in names for path in sorted([Path(name), *Path(name).rglob("*")]) if path.is_file()]
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def decisive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as plain JSON, without those that do not change the numbers."""
    free = ("keep_gib", "cache", "concurrency", "timeout", "attempts", "wait", "longest_wait", "key_variable")
    kept = {name: value for name, value in settings.items() if name not in free and not name.endswith("_at_once")}
    return plain({name: decisive(value) if isinstance(value, dict) else value for name, value in kept.items()})
