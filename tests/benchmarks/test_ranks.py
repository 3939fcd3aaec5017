"""benchmarks/ranks.py: its lines have the fields that its head describes."""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import torch

from sampled_sae.utils.ranks import Group

PATH = Path(__file__).parents[2] / "benchmarks" / "ranks.py"
spec = importlib.util.spec_from_file_location("benchmark_ranks", PATH)
assert spec is not None and spec.loader is not None
ranks = importlib.util.module_from_spec(spec)
sys.modules["benchmark_ranks"] = ranks
spec.loader.exec_module(ranks)

SHAPE = Namespace(m=256, d=16, k=4, batch=64, steps=2, method="BatchTopK")


def test_one_rank_of_four_counts_what_it_would_send():
    alone = ranks.measure(SHAPE, Group(), torch.device("cpu"), "none")
    lines = ranks.measure(SHAPE, Group(0, 4), torch.device("cpu"), "simulated")
    assert [line["part"] for line in alone] == ["step"] and alone[0]["gib"] > 0
    by_part = {line["part"]: line for line in lines}
    assert set(by_part) == {"step", "select", "update", "all_reduce", "all_gather", "ordered_sum"}
    for line in lines:
        assert (line["d_sae"], line["shards"], line["batch"]) == (256, 4, 64)
    assert by_part["select"]["ms"] > 0 and by_part["all_reduce"]["ms"] is None
    assert by_part["all_reduce"]["bytes"] == 4 * (2**15 + 2**16)  # 31 bits of a positive float, in two rounds
    assert by_part["ordered_sum"]["bytes"] == 4 * (64 * 16 + 16)  # reconstructions, and b_dec's gradient
