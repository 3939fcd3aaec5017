"""One SAE's step on a GPU: the step path of `training.step`, with weights in float32 and products in bfloat16.

A step is about a hundred launches, and a host needs as long for them as an H200 needs for the work. So parts of a step
are recorded as CUDA graphs when their shape is first seen: a recording replays with one launch. It reads and writes the
same memory each time, so what it returns is valid until the next replay.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sampled_sae.kernels.adam import FusedAdam
from sampled_sae.kernels.auxk import Copies, list_latents, slots
from sampled_sae.kernels.encoder import FastEncoder
from sampled_sae.kernels.gradients import KeptCodes, PoolCodes, loss_and_gradients
from sampled_sae.kernels.masked import counts
from sampled_sae.kernels.select import Cut, Kept, cut_batch, cut_into_blocks, cut_rows
from sampled_sae.kernels.sparse import cut_segments, group_by_latent
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.parameters import Weights
from sampled_sae.method.pools import Candidates, PoolState, candidates
from sampled_sae.method.scores import get_score
from sampled_sae.method.selection import Dead, Moved, Outcome, Selection

DENSE_BELOW = 128
"""Pools of up to so many times K latents are multiplied whole: cheaper there than going from value to value."""
WARM_UP = 2
"""Times that a part runs as it is before it is recorded: kernels are compiled then, and libraries set up."""


class _Memory:
    """Memory that recordings share: they never run at the same time. It is given back with the last of them."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


_memories: weakref.WeakValueDictionary[torch.device, _Memory] = weakref.WeakValueDictionary()


class Recorder:
    """Runs parts of a step, and records those that it may."""

    def __init__(self, device: torch.device, generator: torch.Generator):
        self.device, self.generator = device, generator
        self.enabled = device.type == "cuda"
        self.seen: dict[Hashable, int] = {}
        self.graphs: dict[Hashable, tuple[Any, Any]] = {}
        self.memory: _Memory | None = None

    def run(self, name: str, key: Hashable | None, part: Callable[[], Any]) -> Any:
        """What `part()` returns. For one name and key it must do the same work each time, on the same memory
        (a part that reads another's results comes after it), and never wait for the device. No key: as it is.
        """
        if not self.enabled or key is None:
            return part()
        key = (name, key)
        if key in self.graphs:
            graph, result = self.graphs[key]
            graph.replay()
            return result
        self.seen[key] = self.seen.get(key, 0) + 1
        return part() if self.seen[key] <= WARM_UP else self._record(key, part)

    def _record(self, key: Hashable, part: Callable[[], Any]) -> Any:
        torch.cuda.synchronize(self.device)
        # What the warm-up held is needed for the recording's own memory. Later ones share that of the first, and others
        # on this GPU, such as a harvest, would have to ask for theirs anew.
        if not self.graphs or torch.cuda.mem_get_info(self.device)[0] < torch.cuda.memory_reserved(self.device):
            torch.cuda.empty_cache()
        if self.memory is None:
            self.memory = _memories.setdefault(self.device, _Memory())
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        # Another thread may be harvesting activations meanwhile.
        with _nothing_collected(), torch.cuda.graph(graph, pool=self.memory.handle, capture_error_mode="thread_local"):
            result = part()
        self.graphs[key] = (graph, result)
        graph.replay()
        return result


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Pause the garbage collector: a recording breaks if the graphs of a finished SAE are freed meanwhile."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


class FastPath:
    """A training step in Triton kernels, recorded as two CUDA graphs."""

    name = "fast"

    def __init__(self, weights: Weights, config: SAEConfig, steps: int, generator: torch.Generator):
        self.weights, self.config, self.steps, self.generator = weights, config, steps, generator
        self.optimizer = FusedAdam(weights, config.optimizer)
        self.state, self.load_state = self.optimizer.state, self.optimizer.load_state
        self.recorder = Recorder(weights.b_dec.device, generator)
        self.pool_state = PoolState.empty(config.d_sae, weights.b_dec.device)
        self.key: tuple[int, ...] | None = None
        self.edges: Tensor | None = None
        if config.prefixes is not None:
            self.edges = torch.tensor(config.prefixes, dtype=torch.int32, device=weights.b_dec.device)
        # What the recorded halves read stays at one address: the batch, the last cuts, the dead latents.
        self.x = weights.b_dec
        self.cuts: dict[int, Tensor] = {}
        self.dead = torch.zeros(len(weights.b_enc), dtype=torch.bool, device=weights.b_dec.device)

    def select(self, x: Tensor, step: int, pool: Tensor) -> Selection:
        """x [batch, d_in] and the last pool [d_sae] -> the kept activations."""
        self._take(x, step)
        with self._here():
            return self.recorder.run("select", self.key, lambda: self._select(step, pool))

    def _take(self, x: Tensor, step: int) -> None:
        """Put the batch where the recorded halves read it."""
        if self.x.shape != x.shape:
            self.x = torch.empty_like(x)
        self.x.copy_(x)
        self.key = self._shape_at(step)

    def _here(self) -> AbstractContextManager[Any]:
        """Kernels are launched on the current device, which need not be the weights'."""
        device = self.weights.b_dec.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _shape_at(self, step: int) -> tuple[int, ...] | None:
        """What decides a step's launches: sizes of group, pool and batch. None if its draw cannot be recorded."""
        pool = self.config.pool
        size = self.config.pool_size_at(step, self.steps)
        group = pool.scope.group_at(len(self.x), step, self.steps)
        if size < self.config.d_sae:
            score = get_score(pool.score)
            recordable = score.builtin and score.reads != "activations" and pool.schedule.steady
            if not recordable or pool.pick != "top" or pool.refresh > 1 or group < len(self.x):
                return None
        return group, size, *self.x.shape

    def _select(self, step: int, pool: Tensor) -> Selection:
        config, m = self.config, len(self.weights.b_enc)
        encoder = FastEncoder(self.x, self.weights, self.optimizer.W_enc)
        found = candidates(encoder, config, step, self.steps, self.generator, pool, self.pool_state)
        size = found.z.shape[1] if found.columns is None else len(found.columns)
        # A matrix of codes cannot be cut at the prefixes: which of its columns these are changes from pool to pool.
        dense = size <= DENSE_BELOW * config.k and found.columns is not None and self.edges is None
        cut = self._cut(found, dense)
        if cut.kept is None:
            assert found.columns is not None
            fired = torch.zeros_like(found.pool).index_copy_(0, found.columns, counts(found.z)[:size] > 0)
            codes = PoolCodes(encoder.x16, found.z, found.columns)
            return Selection(found.pool, fired, cut.smallest, lambda: int((found.z > 0).sum()), codes)
        latent = cut.kept.column
        if found.columns is not None:
            latent = whose(found.columns, found.z.shape[1], m)[latent]
        sparse = self._listed(encoder.x16, cut.kept, latent)
        fired = sparse.groups.stop > sparse.groups.start
        return Selection(found.pool, fired, cut.smallest, lambda: int((latent < m).sum()), sparse)

    def _cut(self, found: Candidates, dense: bool) -> Cut:
        """The largest of each token, or of each group of tokens."""
        k, blocks = self.config.k, cut_into_blocks(found.z, self.config.k)
        if found.group == 1 or self.config.cut == "token":
            return cut_rows(blocks, k, dense)
        number = len(self.x) // found.group
        if number not in self.cuts:
            self.cuts[number] = torch.full((number,), -1, dtype=torch.int32, device=self.x.device)
        last = self.cuts[number]
        cut = cut_batch(blocks, k * found.group, found.group, last, dense)
        last.copy_(cut.lowest)
        return cut

    def _listed(self, x16: Tensor, kept: Kept, latent: Tensor) -> KeptCodes:
        """Kept values by token and by latent; `latent` [n] int32 says whose they are."""
        segments = cut_segments(kept, latent, self.edges)
        return KeptCodes(x16, kept, latent, segments, group_by_latent(kept, latent, segments, len(self.weights.b_enc)))

    def update(self, selection: Selection, dead: Dead | None, lr: float) -> Moved:
        """Kept activations and dead latents -> one update of the weights."""
        self.optimizer.set_rate(lr)
        room = 0 if dead is None else slots(dead.most, self.config.d_sae)
        if dead is not None:
            self.dead.copy_(dead.mask)
        key = None if self.key is None else (*self.key, room)
        with self._here():
            return self.recorder.run("update", key, lambda: self._update(selection, room))

    def _update(self, selection: Selection, room: int) -> Moved:
        outcome = self.gradients(selection, list_latents(self.dead, room) if room else None)
        norm = self.optimizer.update(*outcome.gradients)
        return Moved(outcome.loss, outcome.error, outcome.auxk, norm)

    def gradients(self, selection: Selection, dead: Tensor | None) -> Outcome:
        """Kept activations and dead latents [n] (m: an empty slot) -> loss and gradients on the last batch."""
        copies = Copies(selection.codes.x16, self.optimizer.W_enc, self.optimizer.W_dec)
        return loss_and_gradients(self.x, self.weights, copies, selection.codes, dead, self.config.auxk)


def whose(columns: Tensor, width: int, m: int) -> Tensor:
    """Columns of Z -> latents [width + 1] int32, m behind the last."""
    latents = torch.full((width + 1,), m, dtype=torch.int32, device=columns.device)
    latents[: len(columns)] = columns
    return latents
