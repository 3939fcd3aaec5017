#!/usr/bin/env bash
# Unpack the peers that benchmarks/peers.py times into one folder, for a GPU machine without internet:
#
#   bash benchmarks/carry_peers.sh [FOLDER]        FOLDER is .carry/peers unless given
#
# There, put FOLDER on PYTHONPATH. The wheels are pure Python, so they fit any Python. What the machine has
# already (torch, triton, transformers, accelerate, safetensors, huggingface_hub, ...) is not carried; for
# what the peers import and no training step calls, benchmarks/peers.py has stand-ins.
set -euo pipefail

folder=${1:-.carry/peers}
python=${PYTHON:-python3}

peers=(sae-lens==6.54.12 dictionary-learning==0.1.0 eai-sparsify==1.3.3)
needed=(einops==0.8.2 simple-parsing==0.1.9 docstring-parser==0.18.0 natsort==8.4.0 schedulefree==1.4.1)
# Of transformer-lens only the base classes of SAELens's modules: the whole of it needs much more.
partly=(transformer-lens==3.9.0)

wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$python" -m pip download -qq --no-deps --only-binary :all: --dest "$wheels" \
    "${peers[@]}" "${needed[@]}" "${partly[@]}"

mkdir -p "$folder"
"$python" - "$wheels" "$folder" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

PARTLY = {  # no __init__.py: benchmarks/peers.py stands in for the rest of the package
    "transformer_lens": {
        "transformer_lens/HookedRootModule.py",
        "transformer_lens/hook_points.py",
        "transformer_lens/conversion_utils/conversion_steps/base_tensor_conversion.py",
    }
}
for wheel in sorted(Path(sys.argv[1]).iterdir()):
    if not wheel.name.endswith("-none-any.whl"):
        sys.exit(f"{wheel.name} is not pure Python")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(sys.argv[2], PARTLY.get(wheel.name.split("-")[0]))
PYTHON
echo "$folder: $(du -sh "$folder" | cut -f1)"
