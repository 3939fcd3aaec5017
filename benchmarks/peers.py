"""The peers' own training steps, for benchmarks/step.py.

`PEERS` maps a name to a function `(d, m, k, batch, device) -> step`; `step(x, i)` does training step number i
on x, fp32 [batch, d] on the device: the peer's own loss, backward pass, gradient projection and clipping,
optimizer, schedules and dead-latent counters, called as its own training loop calls them. Weights are fp32.
Data loading, logging and checkpoints are left out. A peer is imported only when its function is called.

`benchmarks/carry_peers.sh` fetches the peers for a machine without internet.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

Step = Callable[[Tensor, int], None]

STEPS = 10**6  # length of the run for the learning rate schedules

# Packages that the peers import and their training steps do not use: language models, datasets, logging.
# Where one is missing, a stand-in takes its place while the peer is imported. Of transformer_lens the step
# does use HookPoint and HookedRootModule: those two are the real ones, from transformer_lens's own files.
STAND_INS = {"datasets", "nnsight", "pandas", "transformer_lens", "wandb"}


class _StandIn(ModuleType):
    """A module each of whose attributes is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        self.__dict__[name] = made
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        # import binds each submodule in its package; a class of the same name (HookedTransformer) goes first
        if not isinstance(value, ModuleType):
            super().__setattr__(name, value)


class _StandInFinder(MetaPathFinder, Loader):
    """Last on sys.meta_path, so that it only handles packages that are not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in STAND_INS:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "transformer_lens.HookedTransformer":  # SAELens imports it from there
            from transformer_lens.HookedRootModule import HookedRootModule

            module.HookedRootModule = HookedRootModule  # type: ignore[attr-defined]


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Import a peer: stand-ins for the packages that are not there, and its messages on stderr."""
    # These check which packages are installed, so they are imported before the stand-ins.
    import accelerate.utils  # noqa: F401
    from transformers import (  # noqa: F401
        AutoModelForCausalLM,
        AutoTokenizer,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        get_linear_schedule_with_warmup,
    )

    finder = _StandInFinder()
    sys.meta_path.append(finder)
    spec = importlib.util.find_spec("transformer_lens")
    if "transformer_lens" not in sys.modules and spec and spec.origin is None:  # not installed
        package = _StandIn("transformer_lens")
        package.__path__ = list(spec.submodule_search_locations or [])  # the carried files, where there are
        sys.modules["transformer_lens"] = package
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]


def saelens(d: int, m: int, k: int, batch: int, device: str, autocast: bool) -> Step:
    """SAELens, BatchTopK: SAETrainer.step, in fp32 (its default) or under its bf16 autocast."""
    with _importing():
        from sae_lens import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
        from sae_lens.config import SAETrainerConfig
        from sae_lens.training.sae_trainer import SAETrainer

    torch.manual_seed(0)
    sae = BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(d_in=d, d_sae=m, k=k, dtype="float32", device=device))
    config = SAETrainerConfig(
        total_training_samples=STEPS * batch,
        train_batch_size_samples=batch,
        lr_end=3e-5,  # must be given, and the default constant schedule does not use it
        device=device,
        autocast=autocast,
    )
    trainer = SAETrainer(config, sae, data_provider=iter(()))
    sae.to(device)

    def step(x: Tensor, i: int) -> None:  # SAETrainer.fit, one turn of its loop
        trainer.step(x)
        trainer.n_training_steps += 1

    return step


def dictionary_learning(d: int, m: int, k: int, batch: int, device: str, dtype: torch.dtype) -> Step:
    """dictionary_learning, BatchTopK: BatchTopKTrainer.update, with trainSAE's `autocast_dtype`."""
    with _importing():
        from dictionary_learning.trainers.batch_top_k import BatchTopKTrainer

    trainer = BatchTopKTrainer(
        steps=STEPS, activation_dim=d, dict_size=m, k=k, layer=0, lm_name="", device=device, seed=0
    )
    # As in trainSAE: the batch in the autocast dtype, the whole update under autocast, and none on a CPU.
    autocast: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if "cuda" in device:
        autocast = torch.autocast("cuda", dtype=dtype)

    def step(x: Tensor, i: int) -> None:
        x = x.to(dtype=dtype)
        with autocast:
            trainer.update(i, x)

    return step


class _OneLayer(nn.Module):
    """The interface of a language model that sparsify's Trainer uses: one hookpoint of width d."""

    def __init__(self, d: int, device: str):
        super().__init__()
        self.layer = nn.Identity()
        self.device = torch.device(device)
        self.dummy_inputs = {"x": torch.zeros(1, 1, d)}

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def sparsify(d: int, m: int, k: int, batch: int, device: str, fused: bool) -> Step:
    """sparsify, TopK: the step of Trainer.fit with `optimizer="adam"`; SparseCoder.forward is bf16 on CUDA.

    The Trainer has no setting for a fused Adam. With `fused`, the Adam that it makes is torch's fused one.
    """
    if "cuda" not in device:
        os.environ["SPARSIFY_DISABLE_TRITON"] = "1"  # its own switch, read at import: the eager decoder
    with _importing():
        from sparsify import SparseCoderConfig, TrainConfig, Trainer
        from sparsify import utils as sparsify_utils

    if "cuda" in device and sparsify_utils.decoder_impl is not sparsify_utils.triton_decode:
        raise RuntimeError("sparsify does not use its Triton decoder: is triton installed?")

    config = TrainConfig(
        SparseCoderConfig(num_latents=m, k=k), batch_size=1, optimizer="adam", hookpoints=["layer"], log_to_wandb=False
    )
    adam = partial(torch.optim.Adam, fused=True) if fused else torch.optim.Adam
    with contextlib.redirect_stdout(sys.stderr), mock.patch("torch.optim.Adam", adam):
        trainer = Trainer(config, dataset=range(STEPS), model=_OneLayer(d, device))
    sae, since_fired = trainer.saes["layer"], trainer.num_tokens_since_fired["layer"]
    did_fire = torch.zeros(m, device=device, dtype=torch.bool)

    def step(x: Tensor, i: int) -> None:
        # Trainer.fit has its step inline, inside a hook on the language model. These are its calls in its
        # order, for its default loss_fn="fvu" and auxk_alpha=0; only the masking of tokens is left out.
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")  # as in fit; put back below for the others in this process
        if i == 0:
            sae.b_dec.data = x.mean(0).to(sae.dtype)
        sae.set_decoder_norm_to_unit_norm()
        total_variance = (x - x.mean(0)).pow(2).sum()
        out = sae(x=x, y=x, dead_mask=None, total_variance=total_variance)
        did_fire[out.latent_indices.flatten()] = True
        float(out.fvu.detach())  # fit reads it after every step, for its running mean
        loss = out.fvu + config.auxk_alpha * out.auxk_loss + out.multi_topk_fvu / 8
        loss.div(1).backward()
        sae.remove_gradient_parallel_to_decoder_directions()
        for optimizer in trainer.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in trainer.lr_schedulers:
            scheduler.step()
        with torch.no_grad():
            since_fired.add_(len(x))
            since_fired[did_fire] = 0
            did_fire.zero_()
        trainer.global_step += 1
        torch.set_float32_matmul_precision(precision)

    return step


PEERS: dict[str, Callable[[int, int, int, int, str], Step]] = {
    "SAELens BatchTopK, autocast": partial(saelens, autocast=True),
    "SAELens BatchTopK, fp32": partial(saelens, autocast=False),
    "dictionary_learning BatchTopK, bf16 autocast": partial(dictionary_learning, dtype=torch.bfloat16),
    "dictionary_learning BatchTopK, fp32": partial(dictionary_learning, dtype=torch.float32),
    "sparsify TopK, bf16": partial(sparsify, fused=False),
    "sparsify TopK, bf16, fused Adam": partial(sparsify, fused=True),
}
