"""The processes of one training: ranks that torchrun starts, what they exchange, how they end together.

A process that torchrun did not start is the only rank; nothing here then imports `torch.distributed`.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sampled_sae.utils.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

LIMIT = timedelta(minutes=30)
"""Time for one exchange. A rank that hangs in training is noticed much earlier (see `watch`)."""


class RankLost(UserError):
    """Another rank has ended, so that this one cannot go on."""


@contextmanager
def _exchanging() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo has no type of its own for a connection that is closed
        reason = str(error).strip().splitlines()[0].rsplit("] ", 1)[-1]
        raise RankLost(f"another rank has ended or does not answer ({reason[:200]})") from error


SMALL = 2**14
"""Up to so many numbers, an ordered sum takes one message from each rank to all, instead of two smaller ones."""


def _added(rows: Tensor) -> Tensor:
    """rows [n, ...] -> their sum, from the first to the last."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


@dataclass(frozen=True, slots=True)
class Group:
    """Some of the ranks, which exchange tensors: every one of them makes the same calls in the same order.

    A group of one rank returns what it was given.
    """

    rank: int = 0
    size: int = 1
    process_group: ProcessGroup | None = None
    over_cpu: bool = False
    """Whether tensors on a GPU are sent from the CPU: gloo sends from there only."""

    def gather(self, x: Tensor) -> Tensor:
        """Each rank's x, of one shape and dtype, -> [size, *x.shape], in the order of the ranks."""
        if self.process_group is None:
            return x[None]
        import torch.distributed as dist

        data = self._sent(x).contiguous().reshape(-1).view(torch.uint8)  # gloo does not know every dtype
        found = data.new_empty(self.size, len(data))
        with _exchanging():
            dist.all_gather(list(found.unbind()), data, group=self.process_group)
        return found.view(-1).view(x.dtype).view(self.size, *x.shape).to(x.device)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of each rank's x, in place: the same bits on all ranks and each time, in an order of torch's own."""
        if self.process_group is None:
            return x
        import torch.distributed as dist

        sent = self._sent(x)
        with _exchanging():
            dist.all_reduce(sent, group=self.process_group)
        return x if sent is x else x.copy_(sent)

    def ordered_sum(self, x: Tensor) -> Tensor:
        """The sum of each rank's x, added in the order of the ranks."""
        if self.process_group is None:
            return x
        if x.numel() <= SMALL:
            return _added(self.gather(x))
        # Each rank adds a part of the elements and sends it to all: as many bytes as in `sum`.
        rows = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % self.size)).view(self.size, -1)
        return self.gather(_added(self._exchanged(rows))).view(-1)[: x.numel()].view(x.shape)

    def _exchanged(self, rows: Tensor) -> Tensor:
        """rows [size, n], one for each rank -> what the ranks had for this one [size, n]."""
        import torch.distributed as dist

        sent = self._sent(rows)
        received = torch.empty_like(sent)
        with _exchanging():
            dist.all_to_all_single(received, sent, group=self.process_group)
        return received.to(rows.device)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """x of rank `source`, in place; on the others x has its shape and dtype."""
        if self.process_group is None:
            return x
        import torch.distributed as dist

        data = self._sent(x).contiguous()
        with _exchanging():
            whose = dist.get_global_rank(self.process_group, source)
            dist.broadcast(data.reshape(-1).view(torch.uint8), whose, group=self.process_group)
        return x.copy_(data) if data is not x else x

    def _sent(self, x: Tensor) -> Tensor:
        return x.cpu() if self.over_cpu else x

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag if self.process_group is None else bool(self.gather(torch.tensor([flag])).any())

    def texts(self, text: str) -> list[str]:
        """Each rank's text."""
        if self.process_group is None:
            return [text]
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        sizes = self.gather(torch.tensor(len(text.encode()))).tolist()
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        padded[: len(data)] = data[: len(padded)]
        return [bytes(row[:size].tolist()).decode() for row, size in zip(self.gather(padded), sizes, strict=True)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Something that each rank does without exchanges: a user error on one of them is raised on all, at the end."""
        failed: UserError | None = None
        try:
            yield
        except UserError as error:
            if self.process_group is None:
                raise
            failed = error
        lines = self.texts(str(failed or ""))
        if failed is not None:
            raise failed
        if line := next(filter(None, lines), None):
            raise UserError(line)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.any(False)


@dataclass(frozen=True, slots=True)
class Ranks:
    """All processes of a training, and the part of this one.

    With `groups` > 1, ranks of different groups train different SAEs; the ranks of one group divide the latents of each
    of its SAEs, `shard` 0 has the first ones.
    """

    rank: int = 0
    world: int = 1
    saes: int = 0
    """Number of this rank's group of SAEs, from 0."""
    groups: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    all: Group = field(default_factory=Group)
    """All ranks; tensors on the CPU, or on `device`."""
    harvest: Group = field(default_factory=Group)
    saving: Group = field(default_factory=Group)
    """All ranks again, for the threads that collect activations and write checkpoints."""
    latents: Group = field(default_factory=Group)
    """The ranks with the latents of the same SAEs."""

    @property
    def first(self) -> bool:
        """Whether this rank writes what is written once, and prints."""
        return self.rank == 0

    @property
    def shard(self) -> int:
        """Number of this rank's part of the latents."""
        return self.latents.rank

    @property
    def shards(self) -> int:
        """Number of parts of the latents."""
        return self.latents.size

    def divided(self, groups: int, shards: int) -> Ranks:
        """The same ranks as `groups` groups of SAEs with their latents in `shards` parts; all ranks call this."""
        if self.world == 1 or shards == 1:
            return replace(self, saes=self.rank if groups > 1 else 0, groups=groups, latents=Group())
        from torch.distributed.device_mesh import init_device_mesh

        assert groups * shards == self.world
        mesh = init_device_mesh(self.device.type, (groups, shards), mesh_dim_names=("saes", "latents"))
        saes, shard = divmod(self.rank, shards)  # ranks of a group are neighbors: on one machine where possible
        latents = Group(shard, shards, mesh.get_group("latents"), self.all.over_cpu)
        return replace(self, saes=saes, groups=groups, latents=latents)


def own_rank() -> int:
    """This process's rank by torchrun's environment; 0 without it."""
    return int(os.environ.get("RANK", 0)) if "WORLD_SIZE" in os.environ else 0


def number_of_ranks() -> int:
    """How many processes torchrun has started for this job."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def gpu_of_rank(device: str | None) -> str | None:
    """The device of a rank that does not join the others: of several GPUs, the one with its number on this machine."""
    if number_of_ranks() == 1 or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"


_joined: list[Any] = []  # the store and the ranks, once joined
_left: list[Any] = []  # the same after leaving: torch may abort a process whose groups end while other ranks use them


def join(device: str | torch.device | None = None) -> Ranks:
    """Join the ranks that torchrun has started; in a process of its own, the only rank.

    `device` is a kind of device: each rank takes the GPU of its own number on its machine. Where there are fewer GPUs
    than ranks, they share them, and exchange over the CPU.
    """
    from sampled_sae.utils.system import usable_device

    if number_of_ranks() == 1:
        return Ranks(device=usable_device(device))
    if not _joined:
        import torch.distributed as dist

        local, neighbors = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if place.index is not None:
            raise UserError(f"device = {str(device)!r}: each rank takes a {place.type} device of its own; leave it out")
        enough = torch.cuda.device_count() >= neighbors
        if place.type == "cuda":
            place = torch.device("cuda", local % max(1, torch.cuda.device_count()))
        place = usable_device(place)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" and enough and dist.is_nccl_available() else "gloo"
        with _exchanging():
            if dist.is_initialized():
                found = dist.distributed_c10d._get_default_store()
            else:
                found = store()
                dist.init_process_group(
                    backend, store=found, rank=own_rank(), world_size=number_of_ranks(), timeout=LIMIT
                )
                atexit.register(leave)  # torch may abort a process that ends with threads of a group
            rank, world = dist.get_rank(), dist.get_world_size()
            over_cpu = place.type == "cuda" and backend == "gloo"
            everyone = [Group(rank, world, dist.new_group(timeout=LIMIT), over_cpu) for _ in range(3)]
        names = ("all", "harvest", "saving")
        _joined.extend((found, Ranks(rank, world, device=place, **dict(zip(names, everyone, strict=True)))))
    return current()


def current() -> Ranks:
    """The ranks that this process has joined; until then, and without torchrun, it is the only one."""
    ranks: Ranks = _joined[1] if _joined else Ranks()
    return ranks


def store(timeout: timedelta = LIMIT) -> Store:
    """The ranks' common store, which torchrun's own process keeps."""
    if _joined:
        found: Store = _joined[0]
        return found
    import torch.distributed as dist

    found = next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
    # After a restart it may still hold what the ranks before have left there.
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", found)


def leave() -> None:
    """Leave the group at the end of a training, so that the process may end in its own time."""
    if _joined:
        import torch.distributed as dist

        _left.extend(_joined)
        _joined.clear()
        dist.destroy_process_group()


def first_to_fail() -> bool:
    """Whether this rank is the first that reports an error: of several ranks, one prints it."""
    if number_of_ranks() == 1:
        return True
    try:
        return store(timedelta(seconds=10)).add("sampled_sae/failed", 1) == 1
    except Exception:  # without a store, every rank prints for itself
        return True
