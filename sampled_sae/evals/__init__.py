"""Evaluations as plug-ins: what each one declares, and the registry that finds them.

An evaluation is a subclass of `Evaluation` with the decorator `register_evaluation`, in a folder here, in a module of
another package that its pyproject.toml names, or in a Python file of the user (`--evals my_evaluation.py`):

    [project.entry-points."sampled_sae.evals"]
    norms = "my_package.norms"

The command line, reports, tables in the terminal and `reproduce` read the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from sampled_sae.config import Config, plain
from sampled_sae.utils.cost import Cost, Workload
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.measures import Column, Metric, Table, find
from sampled_sae.utils.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from sampled_sae.method.architectures import InferenceConfig
    from sampled_sae.models.language_model import LanguageModel
    from sampled_sae.sae import SAE

Progress = Callable[[int, int], None]  # called with the number of finished parts and of all parts


E = TypeVar("E", bound="Evaluation")


class Job(NamedTuple):
    """SAEs of one hook point that are measured together."""

    saes: Sequence[SAE]
    model: LanguageModel
    layer: int | str  # the SAEs read the residual stream after this block, counted from 0, or a hook point by name
    contexts: Tensor | None = None  # [n, L] token ids; None unless `needs.text`
    progress: Progress = lambda done, total: None


class Contexts(NamedTuple):
    """The contexts of the text that an evaluation reads: the first ones."""

    number: int | None = None  # how many; None: 64, or fewer if fewer were held out from training on the same text
    length: int | None = None  # tokens per context; None: as in training
    heldout: bool = True  # whether contexts that the SAE was trained on are refused
    all: bool = True  # whether a text with fewer contexts is refused; otherwise all of them are read


class Needs(NamedTuple):
    """What an evaluation needs beside SAEs and a language model."""

    text: bool = False  # whether it reads contexts of a text
    extras: Mapping[str, str] = {}  # packages to import, each with the extra of this package that installs it
    saes_at_once: int | None = None  # most SAEs that are measured together; None: as many as memory holds


class Evaluation(ABC):
    """One evaluation. A subclass sets the attributes, implements `run`, and overrides what differs from the default."""

    name: ClassVar[str]  # name on the command line and of the result file, evals/NAME.json in an SAE's folder
    title: ClassVar[str]  # heading of tables
    note: ClassVar[str] = ""  # how its numbers were measured, one line below a table
    config: ClassVar[type[Config]]  # class of its settings; all fields have defaults
    metrics: ClassVar[tuple[Metric, ...]] = ()
    columns: ClassVar[tuple[str, ...]] = ()  # names of the metrics in its terminal table; empty: all of them
    needs: ClassVar[Needs] = Needs()
    unit: ClassVar[str] = "parts"  # what `Job.progress` counts
    order: ClassVar[int] = 100  # position among the evaluations, lowest first
    one_by_one: ClassVar[bool] = False  # whether `run` yields each result as soon as it is measured
    definition: ClassVar[int] = 1  # raise it when the same settings give other numbers: results are measured again

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.metrics = tuple(metric._replace(evaluation=cls.name) for metric in cls.metrics)

    @abstractmethod
    def run(self, job: Job, config: Any) -> Iterator[Any]:
        """One result per SAE, in order."""

    def settings_for(self, config: Any, sae: InferenceConfig, model: LanguageModel) -> Any:
        """The settings with the values that follow from the SAE; SAEs with equal ones are measured together."""
        return config

    def contexts(self, config: Any) -> Contexts:
        """The contexts that are read with these settings."""
        return Contexts()

    def check(self, config: Any) -> None:
        """Raise the errors that need no language model; called before it is loaded."""
        return

    def files(self, config: Any) -> Sequence[str]:
        """Paths read besides the text; if their content changes, results are measured again."""
        return ()

    def cost(self, config: Any, work: Workload) -> Cost:
        """Estimated seconds and bytes on disk, before anything is loaded."""
        return Cost(self.name, work.speed.load, 200_000 * work.saes, 0)

    def to_dict(self, result: Any) -> dict[str, Any]:
        """The result as plain JSON; by default the fields of a named tuple or a dataclass."""
        return dict(plain(result))

    def to_saebench(self, result: Any, config: Any) -> dict[str, Any] | None:
        """The result in SAEBench's layout, if it has one for this evaluation."""
        return None

    def save_extras(self, result: Any, folder: Path) -> None:
        """Write further files into the SAE's folder."""
        return

    def table(self, results: Mapping[str, Any]) -> Table:
        """Results as plain JSON by the SAEs' names -> one row per SAE and one column per metric that some SAE has."""
        wanted = [metric for metric in self.metrics if not self.columns or metric.name in self.columns]
        shown = [metric for metric in wanted if any(find(metric, result) for result in results.values())]
        columns = [Column(m.title, m.digits, m.better, name=m.name, brief=m.brief or m.title) for m in shown]
        rows = [[name, *(find(metric, result) for metric in shown)] for name, result in results.items()]
        reasons = {str(r["not_evaluable"]) for r in results.values() if isinstance(r, dict) and r.get("not_evaluable")}
        note = "\n".join([*filter(None, [self.note]), *(f"Not evaluable: {reason}" for reason in sorted(reasons))])
        return Table([Column(self.title), *columns], rows, self.name, self.title, note)


EVALUATIONS: Registry[Evaluation] = Registry("evaluation", __name__, "sampled_sae.evals", folders=True)


def register_evaluation(cls: type[E]) -> type[E]:
    """Class decorator: make an evaluation known by its name."""
    EVALUATIONS.register(cls.name, cls(), cls.__module__)
    return cls


def registry() -> dict[str, Evaluation]:
    """All evaluations by name, in the order of reports."""
    return dict(sorted(EVALUATIONS.items(), key=lambda item: (item[1].order, item[0])))


def get_evaluation(name: str) -> Evaluation:
    """The evaluation of that name, or the one that a .py file registers."""
    if name.endswith(".py"):
        before = set(EVALUATIONS.values())
        EVALUATIONS.load_file(Path(name))
        new = [evaluation for evaluation in EVALUATIONS.values() if evaluation not in before]
        if len(new) != 1:
            raise UserError(f"evals = {name!r}: registers {len(new)} evaluations; must register one")
        return new[0]
    if name not in EVALUATIONS:
        why = EVALUATIONS.failed.get(name) or f"must be among {', '.join(registry())}, or a .py file"
        raise UserError(f"evals = {name!r}: {why}")
    return EVALUATIONS[name]


def chosen(names: Sequence[str]) -> list[Evaluation]:
    """Names, one by one or separated by commas -> evaluations, each once, in the order given."""
    wanted = dict.fromkeys(name.strip() for item in names for name in item.split(",") if name.strip())
    if not wanted:
        raise UserError(f"evals: must name at least one of {', '.join(registry())}")
    return [get_evaluation(name) for name in wanted]
