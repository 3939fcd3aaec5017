"""Short runs on the CPU, and whether two of them gave the same."""

import torch

import sampled_sae as ss

QUIET = {"progress": False, "batch_size": 200, "device": "cpu"}


def same_weights(a: ss.SAE, b: ss.SAE) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return all(torch.equal(mine[name].nan_to_num(-1), other[name].nan_to_num(-1)) for name in mine)
