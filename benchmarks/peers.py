"""The peers' own training steps, for benchmarks/step.py and benchmarks/quality.py.

`PEERS` maps a name to a function `(d, m, k, batch, device) -> Peer`; `step(x, i)` of it does training step number i
on x, fp32 [batch, d] on the device: the peer's own loss, backward pass, gradient projection and clipping,
optimizer, schedules and dead-latent counters, called as its own training loop calls them. Weights are fp32.
Data loading, logging and checkpoints are left out. A peer is imported only when its function is called.

`benchmarks/carry_peers.sh` fetches the peers for a machine without internet.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

Step = Callable[[Tensor, int], None]


class Recipe(NamedTuple):
    """Length and learning rate of a run. The defaults are for timing single steps."""

    steps: int = 10**6
    lr: float | None = None  # None: the peer's default
    warmup: int | None = None  # steps of linear warm-up; None: the peer's default
    decay: int = 0  # steps of linear decay to 0 at the end, where the peer lets the user choose
    first: Sequence[Tensor] = ()  # batches that give the scale of the inputs; (): inputs are taken as they are
    seed: int = 0  # of the initial weights


TIMING = Recipe()


class Peer(NamedTuple):
    """A trainer of a peer."""

    step: Step
    finish: Callable[[], dict[str, Tensor]]
    """The trained SAE for raw activations: W_enc [d_in, d_sae], b_enc, W_dec [d_sae, d_in], b_dec and, where the peer
    keeps one, its threshold (). Weights as the peer would save them."""


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


def saelens(
    d: int,
    m: int,
    k: int,
    batch: int,
    device: str,
    recipe: Recipe = TIMING,
    *,
    autocast: bool,
    start: Callable[[nn.Module], None] | None = None,
) -> Peer:
    """SAELens, BatchTopK: SAETrainer.step, in fp32 (its default) or under its bf16 autocast.

    With `recipe.first`, inputs are scaled to a mean norm of sqrt(d), its "expected_average_only_in". `start` may change
    the initial weights.
    """
    with _importing():
        from sae_lens import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
        from sae_lens.config import SAETrainerConfig
        from sae_lens.training.sae_trainer import SAETrainer

    torch.manual_seed(recipe.seed)
    sae = BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(d_in=d, d_sae=m, k=k, dtype="float32", device=device))
    if start is not None:
        start(sae)
    config = SAETrainerConfig(
        total_training_samples=recipe.steps * batch,
        train_batch_size_samples=batch,
        lr=recipe.lr or SAETrainerConfig.lr,
        lr_end=3e-5,  # must be given, and the default constant schedule does not use it
        lr_warm_up_steps=recipe.warmup or 0,
        lr_decay_steps=recipe.decay,
        device=device,
        autocast=autocast,
    )
    trainer = SAETrainer(config, sae, data_provider=iter(()))
    sae.to(device)
    scaler = trainer.activation_scaler
    if recipe.first:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            scaler.estimate_scaling_factor(d, iter(recipe.first), len(recipe.first))

    def step(x: Tensor, i: int) -> None:  # SAETrainer.fit, one turn of its loop
        trainer.step(x)
        trainer.n_training_steps += 1

    def finish() -> dict[str, Tensor]:
        if scaler.scaling_factor is not None:
            sae.fold_activation_norm_scaling_factor(scaler.scaling_factor)
        found = dict(sae.state_dict())
        sae.process_state_dict_for_saving_inference(found)  # folds the decoder's norms, topk_threshold -> threshold
        found["threshold"] = found["threshold"][0]  # the same for all latents
        return {name: tensor.detach() for name, tensor in found.items()}

    return Peer(step, finish)


def dictionary_learning(
    d: int, m: int, k: int, batch: int, device: str, recipe: Recipe = TIMING, *, dtype: torch.dtype
) -> Peer:
    """dictionary_learning, BatchTopK: BatchTopKTrainer.update, with trainSAE's `autocast_dtype`.

    With `recipe.first`, inputs are scaled to a root mean square norm of 1, trainSAE's `normalize_activations`.
    """
    with _importing():
        from dictionary_learning.trainers.batch_top_k import BatchTopKTrainer

    trainer = BatchTopKTrainer(
        steps=recipe.steps,
        activation_dim=d,
        dict_size=m,
        k=k,
        layer=0,
        lm_name="",
        lr=recipe.lr,
        warmup_steps=1000 if recipe.warmup is None else recipe.warmup,
        decay_start=recipe.steps - recipe.decay if recipe.decay else None,
        device=device,
        seed=recipe.seed,
    )
    # As in trainSAE: the batch in the autocast dtype, the whole update under autocast, and none on a CPU.
    autocast: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if "cuda" in device:
        autocast = torch.autocast("cuda", dtype=dtype)
    norm = 1.0
    if recipe.first:  # its get_norm_factor
        norm = float(torch.stack([x.square().sum(1).mean() for x in recipe.first]).mean().sqrt())

    def step(x: Tensor, i: int) -> None:
        x = x.to(dtype=dtype)
        if norm != 1:
            x = x / norm
        with autocast:
            trainer.update(i, x)

    def finish() -> dict[str, Tensor]:
        sae = trainer.ae
        sae.scale_biases(norm)
        encoder, decoder = sae.encoder.weight.detach(), sae.decoder.weight.detach()
        found = {
            "W_enc": encoder.T,
            "b_enc": sae.encoder.bias.detach(),
            "W_dec": decoder.T,
            "b_dec": sae.b_dec.detach(),
        }
        return found | ({"threshold": sae.threshold} if sae.threshold >= 0 else {})

    return Peer(step, finish)


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


def sparsify(
    d: int,
    m: int,
    k: int,
    batch: int,
    device: str,
    recipe: Recipe = TIMING,
    *,
    optimizer: str = "adam",
    fused: bool = False,
) -> Peer:
    """sparsify, TopK: the step of Trainer.fit; SparseCoder.forward is bf16 on CUDA.

    It takes inputs as they are. `signum`, its default, has no schedule; `adam` decays linearly over the whole run.
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
        SparseCoderConfig(num_latents=m, k=k),
        batch_size=1,
        optimizer=optimizer,
        lr=recipe.lr,
        lr_warmup_steps=1000 if recipe.warmup is None else recipe.warmup,
        init_seeds=[recipe.seed],
        hookpoints=["layer"],
        log_to_wandb=False,
    )
    adam = partial(torch.optim.Adam, fused=True) if fused else torch.optim.Adam
    with contextlib.redirect_stdout(sys.stderr), mock.patch("torch.optim.Adam", adam):
        trainer = Trainer(config, dataset=range(recipe.steps), model=_OneLayer(d, device))
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
        for one in trainer.optimizers:
            one.step()
            one.zero_grad()
        for scheduler in trainer.lr_schedulers:
            scheduler.step()
        with torch.no_grad():
            since_fired.add_(len(x))
            since_fired[did_fire] = 0
            did_fire.zero_()
        trainer.global_step += 1
        torch.set_float32_matmul_precision(precision)

    def finish() -> dict[str, Tensor]:
        for one in trainer.optimizers:
            if hasattr(one, "eval"):  # schedule-free: the averaged weights, as in Trainer.save
                one.eval()
        found = {"W_enc": sae.encoder.weight.T, "b_enc": sae.encoder.bias, "W_dec": sae.W_dec, "b_dec": sae.b_dec}
        return {name: tensor.detach() for name, tensor in found.items()}

    return Peer(step, finish)


PEERS: dict[str, Callable[..., Peer]] = {
    "SAELens BatchTopK, autocast": partial(saelens, autocast=True),
    "SAELens BatchTopK, fp32": partial(saelens, autocast=False),
    "dictionary_learning BatchTopK, bf16 autocast": partial(dictionary_learning, dtype=torch.bfloat16),
    "dictionary_learning BatchTopK, fp32": partial(dictionary_learning, dtype=torch.float32),
    "sparsify TopK, bf16": sparsify,
    "sparsify TopK, bf16, fused Adam": partial(sparsify, fused=True),
}
