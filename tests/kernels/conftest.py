"""Without Triton there are no kernels to test. tests/conftest.py switches its interpreter on where there is no GPU."""

import importlib.util

if importlib.util.find_spec("triton") is None:  # there is none for this platform
    collect_ignore_glob = ["test_*.py"]
