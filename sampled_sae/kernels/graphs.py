"""Launching a whole part of a step at once: CUDA graphs, recorded when a part's shape is first seen.

A step is about a hundred launches, and a host needs as long for them as an H200 needs for the work. A recording
replays with one. It reads and writes the same memory each time, so what it returns is valid until the next replay.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
