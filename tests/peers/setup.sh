#!/usr/bin/env bash
# Create the virtual environments in which this library is compared with its peers:
#
#   .peers/dictionary_learning   dictionary-learning
#   .peers/saelens               sae-lens
#   .peers/sparsify              eai-sparsify
#   .peers/sae_bench             sae-bench
#
# Run from the repository root: bash tests/peers/setup.sh
#
# The peers' requirements are kept out of the development environment, and apart from each other. An
# environment is rebuilt when this script or constraints.txt changes; otherwise a second run does nothing.
set -euo pipefail

if [[ ! -f constraints.txt || ! -f tests/peers/setup.sh ]]; then
    echo "tests/peers/setup.sh: run this from the repository root" >&2
    exit 1
fi

key=$(cat tests/peers/setup.sh constraints.txt | sha256sum | cut -d' ' -f1)

# peer NAME REQUIREMENT: build .peers/NAME with REQUIREMENT, pytest and this repository.
peer() {
    local env=.peers/$1 requirement=$2
    local stamp=$env/.stamp pip=$env/bin/pip

    if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then
        echo "$env: up to date"
        return
    fi

    echo "$env: installing $requirement"
    python3 -m venv --clear "$env"
    "$pip" install -qq -c constraints.txt "$requirement" pytest
    # dictionary-learning pulls in torchvision through nnsight and does not use it. transformers does import
    # it when it is there, and that fails where it was built for another torch than this one.
    "$pip" uninstall -qq -y torchvision
    "$pip" install -qq -c constraints.txt --no-deps -e .
    echo "$key" >"$stamp"
}

peer dictionary_learning dictionary-learning==0.1.0
peer saelens sae-lens==6.54.12
peer sparsify eai-sparsify==1.3.3
peer sae_bench sae-bench==0.6.0
