"""Without Triton there are no kernels to test. tests/conftest.py switches its interpreter on where there is no GPU."""

import importlib.util
import inspect
import os
from typing import Any

if importlib.util.find_spec("triton") is None:  # there is none for this platform
    collect_ignore_glob = ["test_*.py"]
elif os.environ.get("TRITON_INTERPRET") == "1":
    from triton import language
    from triton.runtime import interpreter

    done: set[frozenset[int]] = set()
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def patch_once(fn: Any) -> Any:
        """Triton replaces its language at every call of a device function, 40% of the time: once a launch is enough."""
        modules = filter(inspect.ismodule, fn.__globals__.values())
        seen = frozenset(id(module) for module in modules if module in (language, language.core))
        if seen in done:
            return interpreter._LangPatchScope()
        done.add(seen)
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **options: Any) -> Any:
        done.clear()  # what the last launch replaced is restored
        return launch(self, *args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
