"""Take the screenshots of the docs: `make screenshots` makes the pages first. Needs playwright and a Chromium.

python benchmarks/screenshots.py --demo demo --browser demo-lm/saes/topk-then-batch-at5-s0/browser
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from sampled_sae.evals import get_evaluation
from sampled_sae.experiments.design import load_study
from sampled_sae.experiments.results import RESULTS
from sampled_sae.method.presets import parse_methods
from sampled_sae.reporting.study import Results, Row, read_rows
from sampled_sae.reporting.synthetic import write_page
from sampled_sae.reporting.write import write_report

DOCS = Path(__file__).parent.parent / "docs"
IMAGES = DOCS / "images"
CHROME = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
SHOWN = ("core", "probing", "absorption")
BESIDE = """
#results { display: grid; grid-template-columns: 1fr 1fr; gap: 0 2rem; border: 0; margin: 0; padding: 0.5rem; }
#results > h2, #results > .pair, #results > .key ~ .key { display: none; }
#results > .key { grid-column: 1 / -1; }
#results > figure { display: flex; flex-direction: column; margin-top: 0; }
#results .plot { margin-top: auto; }
#training > h2, #training > .note, #training figure:nth-child(n + 3) { display: none; }
main { max-width: none !important; }
"""
STILL = "nav { position: static !important; }"


def study(folder: Path) -> Path:
    """Write the SAEs of the study's primary setting, of methods with several seeds, as folders with results, and their
    report; return its page."""
    declared = load_study(DOCS / "results" / "design.json")
    place, rows = declared.settings["primary"], read_rows(DOCS / "results" / RESULTS, declared.settings)
    models = {name: setting.model for name, setting in declared.settings.items()}
    results = Results(rows, models, rate_of={name: method.rate_of for name, method in declared.methods.items()})
    best = {method: results.best("primary", method) for method in results.repeated("primary")}
    for row in rows:
        if row.run.setting != "primary" or row.measure not in SHOWN or row.run.factor != best.get(row.run.method):
            continue
        spec = declared.methods[row.run.method].spec
        (config,) = parse_methods([spec], d_sae=place.d_sae, k=place.k, seeds=(row.run.seed,))
        config = replace(config, name=f"{row.run.method}-s{row.run.seed}")
        sae = folder / "saes" / f"{row.run.method}-s{row.run.seed}"
        (sae / "evals").mkdir(parents=True, exist_ok=True)
        metadata = {"model_name": "SmolLM2-135M", "layer": place.layer}
        (sae / "sampled_sae.json").write_text(json.dumps({"config": config.to_dict(), "metadata": metadata}))
        result = {"result": result_of(row), "sae": config.to_dict()}
        (sae / "evals" / f"{row.measure}.json").write_text(json.dumps(result))
    return write_report([folder / "saes"], folder / "out", figures=False).page


def result_of(row: Row) -> dict[str, Any]:
    """The result of an evaluation, as far as the study keeps it: each metric where the evaluation has it."""
    result: dict[str, Any] = {}
    for metric in get_evaluation(row.measure).metrics:
        if metric.name in row.values:
            inner = result
            for part in metric.path[:-1]:
                inner = inner.setdefault(part, {})
            inner[metric.path[-1]] = row.values[metric.name]
    return result


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
        page = opened(browser, study(Path(folder)), 1120, 900)
        page.add_style_tag(content=STILL)
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
