"""The kernels run in Triton's interpreter where there is no GPU, so it must be switched on before they are made."""

import importlib.util
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("triton") is None:  # there is none for this platform
    collect_ignore_glob = ["test_*.py"]
