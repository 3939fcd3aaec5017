"""Take the screenshots of the docs: `make screenshots` makes the pages first. Needs playwright and a Chromium.

python benchmarks/screenshots.py --demo demo --browser demo-lm/saes/batchtopk-s0/browser
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from sampled_sae.method import presets
from sampled_sae.method.config import Multiplier, OptimizerConfig, PoolConfig, Released, SAEConfig
from sampled_sae.reporting.synthetic import write_page
from sampled_sae.reporting.write import write_report

DOCS = Path(__file__).parent.parent / "docs"
IMAGES = DOCS / "images"
CHROME = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
BESIDE = """
#results { display: grid; grid-template-columns: 1fr 1fr; gap: 0 2rem; border: 0; margin: 0; padding: 0.5rem; }
#results > h2, #results > .pair, #results > .key ~ .key { display: none; }
#results > .key { grid-column: 1 / -1; }
#results > figure { display: flex; flex-direction: column; margin-top: 0; }
#results .plot { margin-top: auto; }
#training > h2, #training > .note, #training figure:nth-child(n + 3) { display: none; }
main { max-width: none !important; }
"""


def config_of(name: str, d_sae: int, k: int) -> SAEConfig:
    """The settings of an SAE in docs/smollm2 by its name there, such as `l2, l = 30, released at 70%`."""
    if name == "BatchTopK":
        return presets.batchtopk(d_sae, k)
    if name.startswith("TopK"):
        return presets.topk_then_batchtopk(d_sae, k)
    score = re.split(r"[ ,]", name)[0]
    if share := re.search(r"(\d+)%, released", name):
        return presets.released(d_sae, k, score, int(share[1]) / 100)
    size = Multiplier(float(name.split("l = ")[1].split(",")[0]))
    pool = PoolConfig(score, size)
    return SAEConfig(d_sae, k, pool=replace(pool, schedule=Released(0.7)) if "released" in name else pool)


def smollm2(folder: Path) -> Path:
    """Write the results of docs/smollm2 as SAEs' folders, and their report; return its page."""
    for number, sae in enumerate(json.loads((DOCS / "smollm2" / "saes.json").read_text())["saes"]):
        config = replace(config_of(sae["name"], 65_536, 60), seed=sae["seed"], optimizer=OptimizerConfig(lr=sae["lr"]))
        # Each method at one learning rate: SAEs that differ in their seed alone are one row.
        plain = replace(config, optimizer=OptimizerConfig(), name=f"sae-{number}").to_dict()
        place = folder / "saes" / f"sae-{number}"
        (place / "evals").mkdir(parents=True)
        metadata = {"model_name": "SmolLM2-135M", "layer": 12}
        (place / "sampled_sae.json").write_text(json.dumps({"config": plain, "metadata": metadata}))
        for name in ("core", "probing", "absorption"):
            if sae[name]:
                (place / "evals" / f"{name}.json").write_text(json.dumps({"result": sae[name], "sae": plain}))
    return write_report([folder / "saes"], folder / "out", figures=False).page


def synthetic(folder: Path) -> Path:
    """Write the page of the synthetic experiment `paper-table` and return its path."""
    shutil.copy(DOCS / "results" / "synthetic" / "paper-table.json", folder / "results.json")
    return write_page(folder)


def opened(browser: Any, path: Path, width: int, height: int, address: str = "", scheme: str = "light") -> Page:
    """A page from disk, once it is drawn."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(180_000)  # a machine that does other things too
    page: Page = context.new_page()
    page.goto(path.resolve().as_uri() + address)
    page.wait_for_timeout(3000)
    return page


def beside(browser: Any, path: Path) -> Page:
    """The page of a synthetic experiment, its two figures of results side by side."""
    page = opened(browser, path, 1500, 900)
    page.add_style_tag(content=BESIDE)
    page.evaluate("dispatchEvent(new Event('resize'))")
    page.wait_for_timeout(2000)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="folder of `make demo`")
    parser.add_argument("--browser", type=Path, help="folder of a page of `sampled-sae browse`")
    parser.add_argument("--latent", type=int, help="latent to show; by default the first of the list")
    given = parser.parse_args()
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=CHROME, args=["--no-sandbox"])
        page = opened(browser, smollm2(Path(folder)), 1120, 900)
        page.locator("#s0-summary").screenshot(path=IMAGES / "report-summary.png")
        page.locator("#s0-compare").screenshot(path=IMAGES / "report.png")
        page = beside(browser, synthetic(Path(folder)))
        page.locator("#results").screenshot(path=IMAGES / "synthetic-table.png")
        if given.demo:
            page = beside(browser, given.demo / "index.html")
            page.locator("#results").screenshot(path=IMAGES / "demo.png")
            page.locator("#training").screenshot(path=IMAGES / "demo-curves.png")
        if given.browser:
            index = given.browser / "index.html"
            page = opened(browser, index, 1400, 900)
            latent = given.latent if given.latent is not None else page.evaluate("state.order[0]")
            for name, width, address, scheme in (
                ("browse", 1400, f"#latent={latent}", "light"),
                ("browse-text", 1400, "#text", "dark"),
                ("browse-phone", 400, "", "light"),
            ):
                page = opened(browser, index, width, 900, address, scheme)
                page.screenshot(path=IMAGES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
