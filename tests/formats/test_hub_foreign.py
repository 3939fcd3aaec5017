"""SAEs of other programs from the hub: model, K and layer come from the names of the repository and its folders."""

from pathlib import Path

from tests.formats.foreign import FOREIGN, weights
from tests.formats.hub_server import running
from tests.formats.test_hub import client

PLACES = {
    "gemma_scope": ("google/gemma-scope-2b-pt-res", "layer_1/width_16k/average_l0_71"),
    "gemma_scope_2": ("google/gemma-scope-2-1b-pt", "resid_post_all/layer_1_width_16k_l0_small"),
    "llama_scope": ("fnlp/Llama3_1-8B-Base-LXR-8x", "Llama3_1-8B-Base-L1R-8x"),
    "qwen_scope": ("Qwen/SAE-Res-Qwen3-1.7B-Base-W32K-L0_4", "layer1.sae.pt"),
    "dictionary_learning topk": ("me/saes", "run/trainer_0"),
}


def test_published_saes(tmp_path):
    lines = []
    with running() as hub:
        for name, (repo, folder) in PLACES.items():
            path = FOREIGN[name](tmp_path / name, weights(12, 40)).path
            root = path.parent if path.is_file() else path
            files = {f"{file.relative_to(root)}": file.read_bytes() for file in root.rglob("*") if file.is_file()}
            before = "" if path.is_file() else f"{folder}/"
            hub.repos[repo] = {"main": {before + file: content for file, content in files.items()}}
            lines += [f"sae = ss.SAE.from_pretrained({repo!r}, {folder!r}); about = sae.cfg.metadata"]
            lines += ["print(sae.cfg.architecture, sae.cfg.k, about['model_name'], about['hook_name'])"]
        lines += ["print(ss.SAE.load('hf:Qwen/SAE-Res-Qwen3-1.7B-Base-W32K-L0_4/layer1.sae.pt', k=7).cfg.k)"]
        said = client(hub.address, Path(tmp_path / "home"), *lines)
    hook = "blocks.1.hook_resid_post"
    assert said == [
        f"jumprelu None google/gemma-2-2b {hook}",
        f"jumprelu None google/gemma-3-1b-pt {hook}",
        f"jumprelu 4 meta-llama/Llama-3.1-8B {hook}",
        f"topk 4 Qwen/Qwen3-1.7B-Base {hook}",
        f"topk 4 tiny {hook}",
        "7",
    ]
