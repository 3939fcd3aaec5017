"""Latents over ranks on GPUs: the step in recorded parts, and what the ranks exchange between them.

Each rank keeps as many of its own largest activations as all of them together may keep, counts them by value, and
drops those below the common cut. The sums that follow then run over what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sampled_sae.kernels.auxk import Copies, DeadPass, list_latents, slots
from sampled_sae.kernels.encoder import FastEncoder
from sampled_sae.kernels.gradients import KeptCodes, Pass, finished, sparse_pass
from sampled_sae.kernels.path import FastPath, whose
from sampled_sae.kernels.select import Kept, cut_into_blocks, cut_rows, empty_kept
from sampled_sae.kernels.sparse import Errors, decode_lists
from sampled_sae.method.codes import SparseCodes, running_sum
from sampled_sae.method.config import SAEConfig
from sampled_sae.method.latents import CommonCut, Shard, exchanged
from sampled_sae.method.parameters import Parameters
from sampled_sae.method.pools import candidates
from sampled_sae.method.selection import Dead, Moved, Selection, smallest_kept

BITS = 15
"""Of a positive bfloat16."""


class Largest(NamedTuple):
    """This rank's own largest values, among which are all that it keeps."""

    kept: Kept
    latent: Tensor
    """[n] int32: whose each is, m where there is none."""
    bits: Tensor
    """[n] long: the values' 15 bits, 0 where there is none ..."""
    token: Tensor
    """[n] long: ... and their tokens."""


def as_largest(kept: Kept, latent: Tensor) -> Largest:
    """With what the search for a common cut reads."""
    return Largest(kept, latent, (kept.value.view(torch.int32) >> 16).long(), kept.token.long())


def only(kept: Kept, latent: Tensor, inside: Tensor, m: int) -> tuple[Kept, Tensor]:
    """The entries that are `inside` [n] bool, one after the other, and their latents [n]; m behind the last."""
    n, tokens = len(inside), len(kept.start)
    to = torch.where(inside, inside.cumsum(0) - 1, n)  # all others behind the end
    left = empty_kept(tokens, n + 1, m, inside.device)
    for target, source in zip(left[2:], (kept.token, latent, kept.value), strict=True):
        target.scatter_(0, to, source)
    counts = torch.zeros(tokens, dtype=torch.int32, device=inside.device)
    counts.index_add_(0, kept.token, inside.to(torch.int32))
    stop = counts.cumsum(0, dtype=torch.int32)
    token, column, value = (entries[:n] for entries in left[2:])
    return Kept(stop - counts, stop, token, column, value), column


class Done(NamedTuple):
    """This rank's gradients."""

    own: Pass
    loss: Tensor
    """Of all latents, as AuxK's."""
    auxk: Tensor
    rest: Tensor
    """[d + 1], to be summed: what b_dec gets through this rank's encoders, and the squared norm of the gradients."""


class DividedDeadPass(DeadPass):
    """AuxK where the dead latents of all ranks compete."""

    by_all: Tensor
    """[B, stride]: what they explain together."""
    first: Tensor
    """[1]: the lowest number of a dead latent on any rank, m if there are none."""

    def _second_stream(self) -> None:
        return None  # its parts are recorded apart

    def _cut(self, keep: int) -> None:
        z = self.both[0]
        kept = cut_rows(cut_into_blocks(z, keep), min(keep, z.shape[1]), dense=False).kept
        assert kept is not None
        self.largest = as_largest(kept, kept.column)

    def choose(self, inside: Tensor) -> None:
        """Keep the codes that are `inside` [n] the common cut."""
        tokens, n = self.both.shape[1:]
        kept = self.largest.kept
        to = torch.where(inside, self.largest.token * n + kept.column, tokens * n)  # the others behind the codes
        self.both.view(-1)[: tokens * n].zero_()
        self.both.view(-1).scatter_(0, to, kept.value.to(self.both.dtype))

    def explained(self) -> Tensor:
        return self.by_all

    def any_dead(self) -> Tensor:
        return self.first


class DividedPath(FastPath):
    """A training step of this rank's latents, in recorded parts."""

    def __init__(self, weights: Parameters, config: SAEConfig, steps: int, generator: torch.Generator, shard: Shard):
        super().__init__(weights, config, steps, generator)
        self.shard = shard
        first, matrices = shard.own(config.d_sae).start, self.optimizer.parameters - len(weights.b_dec)
        self.optimizer.parameters = shard.number * matrices + len(weights.b_dec)
        if self.edges is not None:
            self.edges -= first
        self.homes: dict[tuple[Any, ...], Tensor] = {}
        self.into: tuple[Tensor, Tensor] | None = None  # gradients, of which a recording would keep its own

    def _at_home(self, name: str, value: Tensor) -> Tensor:
        """The same values where a recorded part reads them each time."""
        if not self.recorder.enabled:
            return value
        key = (name, value.dtype, *value.shape)
        if key not in self.homes:
            self.homes[key] = torch.empty_like(value)
        return self.homes[key].copy_(value)

    def _shape_at(self, step: int) -> tuple[int, ...] | None:
        # How many of a pool's latents are here changes from step to step.
        whole = self.config.pool_size_at(step, self.steps) == self.config.d_sae
        return super()._shape_at(step) if whole else None

    def select(self, x: Tensor, step: int, pool: Tensor) -> Selection:
        """x [batch, d_in] and the last pool [d_sae] -> the kept activations of this rank's latents."""
        self._take(x, step)
        with self._here():
            x16, everywhere, group, largest = self._run("largest", self.key, lambda: self._largest(step, pool))
            inside = self._cut_of(largest, len(x) // group, self.config.k * group).kept(self._exchange)
            return self._run("select", self.key, lambda: self._select_of(x16, everywhere, group, largest, inside))

    def _run(self, name: str, key: tuple[int, ...] | None, part: Callable[[], Any]) -> Any:
        return self.recorder.run(name, key, part)

    def _exchange(self, name: str, make: Callable[[], Tensor], over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        return self._at_home(name, over_ranks(self._run(name, self.key, make)))

    def _cut_of(self, largest: Largest, rows: int, keep: int) -> CommonCut:
        return CommonCut(largest.bits, largest.token, len(self.x), rows, keep, BITS, self.shard)

    def _largest(self, step: int, pool: Tensor) -> tuple[Tensor, Tensor, int, Largest]:
        """The batch in 16 bits, the pool, the tokens that share a cut, and this rank's largest of each such group."""
        encoder = FastEncoder(self.x, self.weights, self.optimizer.W_enc, self.shard)
        found = candidates(encoder, self.config, step, self.steps, self.generator, pool, self.pool_state)
        kept, m = self._cut(found, dense=False).kept, len(self.weights.b_enc)
        assert kept is not None
        latent = kept.column
        if found.columns is not None:
            latent = whose(found.columns, found.z.shape[1], m)[latent]
        group = 1 if self.config.cut == "token" else found.group
        return encoder.x16, found.pool, group, as_largest(kept, latent)

    def _select_of(
        self, x16: Tensor, pool: Tensor, group: int, largest: Largest, inside: Callable[[], Tensor]
    ) -> Selection:
        m, shard = len(self.weights.b_enc), self.shard
        kept, latent = only(largest.kept, largest.latent, inside(), m)
        codes = self._listed(x16, kept, latent)

        def smallest() -> Tensor:
            values = torch.where(latent < m, kept.value, torch.inf)
            return smallest_kept(SparseCodes(kept.token.long(), latent, values, len(x16), m), group, shard)

        fired = codes.groups.stop > codes.groups.start
        return Selection(pool, fired, smallest, lambda: int(shard.count((latent < m).sum())), codes)

    def update(self, selection: Selection, dead: Dead | None, lr: float) -> Moved:
        """Kept activations and dead latents -> one update of the weights."""
        self.optimizer.set_rate(lr)
        m, key, beside = len(self.weights.b_enc), self.key, None
        with self._here():
            if dead is not None:
                # Not recorded: each recording would keep what its parts hand on, for every number of dead latents.
                beside, key = self._dead_pass(selection.codes, dead, slots(min(dead.most, m), m)), None
            part = self._run("decode", key, lambda: self._decode(selection.codes, beside))
            decoded = self._at_home("decoded", self.shard.sum(part))
            done = self._run("gradients", key, lambda: self._gradients(selection.codes, beside, decoded))
            rest = self._at_home("rest", self.shard.sum(done.rest))
            return self._run("adam", key, lambda: self._adam(done, rest))

    def _copies(self, codes: KeptCodes) -> Copies:
        return Copies(codes.x16, self.optimizer.W_enc, self.optimizer.W_dec)

    def _dead_pass(self, codes: KeptCodes, dead: Dead, room: int) -> DividedDeadPass:
        numbers, config = list_latents(dead.mask, room), self.config.auxk
        found = DividedDeadPass(self._copies(codes), self.weights, numbers, config)
        keep = config.latents(self.x.shape[1])
        found.choose(self._cut_of(found.largest, len(self.x), keep).kept(exchanged)())
        found.first = self.shard.stack(numbers[:1]).amin(0)
        return found

    def _decode(self, codes: KeptCodes, beside: DividedDeadPass | None) -> Tensor:
        """What this rank's latents add to the reconstructions [B * n * d], and its dead ones to AuxK's [B * stride]."""
        W_dec, d = self.optimizer.W_dec, self.x.shape[1]
        decoded = decode_lists(W_dec, codes.latent, codes.kept.value, codes.segments, d).view(-1)
        return decoded if beside is None else torch.cat([decoded, DeadPass.explained(beside).view(-1)])

    def _gradients(self, codes: KeptCodes, beside: DividedDeadPass | None, decoded: Tensor) -> Done:
        (tokens, d), n, m = self.x.shape, codes.segments.number, len(self.weights.b_enc)
        whole = tokens * n * d
        errors = (self.x - self.weights.b_dec)[:, None] - running_sum(decoded[:whole].view(tokens, n, d))
        energies = errors.square().sum((0, 2))
        out = torch.zeros(tokens * n, codes.x16.shape[1], dtype=codes.x16.dtype, device=self.x.device)
        out[:, :d] = running_sum(errors, backward=True).view(-1, d) * codes.scale
        if beside is not None:
            beside.by_all = decoded[whole:].view(tokens, -1)
        if self.into is None:
            self.into = (torch.empty(m, d, device=self.x.device), torch.empty(m, d, device=self.x.device))
        left = Errors(out, energies[-1], energies.mean())
        done = sparse_pass(self._copies(codes), codes, left, beside, d, self.into)
        dead = None if beside is None else beside.dead
        done, through_encoder, loss, auxiliary = finished(
            done, self.weights, self._copies(codes), dead, beside, tokens, self.config.auxk
        )
        return Done(done, loss, auxiliary, torch.cat([through_encoder, done.rows.energy.view(1)]))

    def _adam(self, done: Done, rest: Tensor) -> Moved:
        own = done.own
        norm = self.optimizer.update(own.rows._replace(energy=rest[-1]), own.on_b_dec - rest[:-1])
        return Moved(done.loss, own.squared_error, done.auxk, norm)
