#!/usr/bin/env bash
# Build wheel and sdist into dist/ and test each in a clean environment: install, help, a training, the page of an SAE.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PIP_CONSTRAINT="$PWD/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf dist
"$python" -m venv "$work/build"
"$work/build/bin/pip" install -q build
# The build itself is not constrained: it needs setuptools alone.
PIP_CONSTRAINT="" "$work/build/bin/python" -m build --outdir dist . >"$work/log" || { cat "$work/log"; exit 1; }

version=$("$python" -c 'import re; print(re.search(r"^version = \"(.*)\"", open("pyproject.toml").read(), re.M)[1])')
for file in dist/*.whl dist/*.tar.gz; do
    echo "testing $file"
    name=$(basename "$file" | tr . -)
    "$python" -m venv "$work/$name"
    "$work/$name/bin/pip" install -q "$file[experiments]"
    mkdir "$work/$name-run"
    (   # from a folder without the sources
        cd "$work/$name-run"
        bin="$work/$name/bin"
        test "$("$bin/sampled-sae" --version)" = "sampled-sae $version"
        "$bin/sampled-sae" train --help >/dev/null
        "$bin/python" -c 'import numpy as np; np.save("acts.npy", np.random.default_rng(0).normal(size=(4000, 16)).astype("f4"))'
        "$bin/sampled-sae" train acts.npy --steps 20 --batch-size 200 --d-sae 64 --k 4 --out run 2>/dev/null
        "$bin/sampled-sae" report run --out report --no-figures
        test -s report/index.html
        # The hint for a missing extra names this file, or the package if the file is gone.
        if hint=$("$bin/sampled-sae" train --model m --text stdlib --layer 0 --steps 1 --out x 2>&1); then exit 1; fi
        echo "$hint" | grep -q "pip install .*\[lm\]"
    )
done
ls -l dist
