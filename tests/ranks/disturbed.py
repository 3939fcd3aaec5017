"""A training under torchrun in which one rank does something at step 25: OUT WHAT RANK."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import sampled_sae as ss
from sampled_sae import cli
from sampled_sae.training.run import Callback
from sampled_sae.utils.ranks import leave, own_rank
from tests.training.ranks import COMMON, configs, rows


class Disturb(Callback):
    def __init__(self, out: Path, what: str, rank: int):
        self.out, self.what, self.rank = out, what, rank

    def on_batch(self, run: Any, step: int, x: Any) -> None:
        if self.what == "wait" and step >= 25:
            time.sleep(0.1)  # so that the signal comes in the middle of the training
        mark = self.out / "disturbed"
        if step != 25 or own_rank() != self.rank:
            return
        if self.what == "kill-once" and mark.exists():
            return
        mark.write_text(str(time.time()))
        if self.what.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "sleep":
            time.sleep(10_000)
        if self.what == "error":
            raise ss.UserError("enough: of this rank alone")


def main() -> None:
    torch.set_num_threads(1)
    out, what, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    settings = COMMON | {"steps": 40, "device": "cpu"}
    ss.train(rows(), configs(), out=out, progress=False, callbacks=[Disturb(out, what, rank)], **settings)
    leave()


if __name__ == "__main__":
    cli._run = lambda arguments: main()  # errors end as those of the command line
    cli.main()
