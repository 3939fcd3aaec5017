import subprocess
import sys

from sampled_sae.utils.third_party import install

BLOCK = """
import sys
for name in {blocked}:
    sys.modules[name] = None
"""
EXTRAS = ["scipy", "plotly", "rich", "tyro", "tensorboard", "wandb", "pandas", "sklearn", "transformers"]
TRAIN = """
import torch, sampled_sae as ss
[sae] = ss.train(torch.randn(500, 8), [ss.sampled(32, 2)], steps=5, batch_size=50, device="cpu")
assert sae(torch.randn(3, 8)).shape == (3, 8)
assert "torch._dynamo" not in sys.modules  # torch's compiler: seconds
"""


def run(code: str, blocked: list[str]) -> subprocess.CompletedProcess:
    code = BLOCK.format(blocked=set(blocked)) + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_training_needs_only_torch_numpy_and_safetensors():
    done = run(TRAIN, EXTRAS)
    assert done.returncode == 0, done.stderr


def test_a_missing_extra_is_named(tmp_path):
    words = ["synthetic", "--steps", "2", "--out", str(tmp_path / "run")]
    done = run(f"from sampled_sae.cli import main\nmain({words})", ["plotly"])
    assert done.returncode == 2
    assert done.stderr.strip() == f"error: plotly is missing; {install('experiments')}"
    assert not (tmp_path / "run").exists()


TIMES = """
import time, torch, numpy, safetensors.torch
begin = time.process_time()
import sampled_sae
print(time.process_time() - begin)
print(*(name for name in sys.modules if name.startswith("sampled_sae.")))
"""


def test_importing_the_package_adds_little_to_importing_torch():
    done = [run(TIMES, EXTRAS) for _ in range(3)]
    assert done[0].returncode == 0, done[0].stderr
    # The fastest of three: other processes may slow one down.
    assert min(float(one.stdout.splitlines()[0]) for one in done) <= 0.1
    loaded = done[0].stdout.splitlines()[1].split()
    heavy = ("evals", "reporting", "browser", "cli", "experiments", "kernels", "models")
    assert not [name for name in loaded if name.split(".")[1] in heavy]
