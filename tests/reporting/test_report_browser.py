"""The page of a sweep in a real browser: no error, and controls that do what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from sampled_sae.method import presets
from sampled_sae.reporting.collect import collect
from sampled_sae.reporting.figures import axis_title, front
from sampled_sae.reporting.sweep import sweeps
from sampled_sae.reporting.write import write_report
from tests.chromium import Opened
from tests.reporting.made_up_sweep import K, M, core, write_sae, write_sweep

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\n🦀\"'"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep, and another model with a hostile name."""
    folder = tmp_path_factory.mktemp("report")
    write_sweep(folder / "a")
    for seed in (0, 1):
        config = presets.sampled(M, K, HOSTILE, 5, name=f"x{seed}", seed=seed)
        write_sae(folder / "b" / f"x{seed}", config, model=HOSTILE, core=core(0.3 + seed / 10))
    write_report([folder], folder / "out", figures=False)
    return folder


class Explored(Opened):
    """A page of a sweep."""

    ready = "document.querySelector('#s0-pareto')?.data !== undefined"

    def data(self, plot: str) -> list[dict[str, Any]]:
        """The traces of a plot as drawn."""
        traces: list[dict[str, Any]] = self.page.evaluate(f"document.getElementById('{plot}').data")
        return traces


@pytest.fixture(scope="module")
def shared(browser: Any, report: Path) -> Iterator[Explored]:
    opened = Explored(browser, report / "out" / "index.html")
    yield opened
    opened.close()


def test_any_two_numbers_and_their_front(shared: Explored, report: Path) -> None:
    sweep = sweeps(collect([report / "a"]))[0]
    across, up = (shared.page.locator(f"article:not([hidden]) select[data-axis={axis}]") for axis in "xy")
    by_name = {metric.name: metric for metric in sweep.metrics}
    for x, y in (("fvu", "probing_5"), ("absorption", "probing_5"), ("cosine", "fvu"), ("autointerp", "alive")):
        across.select_option(x)
        up.select_option(y)
        points = [(row.mean(("values", x)), row.mean(("values", y))) for row in sweep.rows]
        known = [(a, b) for a, b in points if a is not None and b is not None]
        line, *groups = shared.data("s0-pareto")
        drawn = sorted((a, b) for trace in groups for a, b in zip(trace["x"], trace["y"], strict=True))
        assert drawn == sorted(known)
        best = front(known, by_name[x].better or "low", by_name[y].better or "low")
        assert list(zip(line["x"], line["y"], strict=True)) == [known[i] for i in best]
        said = shared.page.locator("article:not([hidden]) [data-front]").inner_text()
        assert all(sweep.rows[i].label in said for i in best)
        assert shared.page.evaluate("document.getElementById('s0-pareto').layout.xaxis.title.text") == axis_title(
            by_name[x].axis
        )


def test_no_front_without_a_better_end(shared: Explored) -> None:
    across, up = (shared.page.locator(f"article:not([hidden]) select[data-axis={axis}]") for axis in "xy")
    said = shared.page.locator("article:not([hidden]) [data-front]")
    across.select_option("l0")
    up.select_option("fvu")
    assert said.inner_text() == "There is no Pareto front: neither high nor low L0 is better."
    across.select_option("fvu")
    assert said.inner_text() == "There is no Pareto front of a metric with itself."
    assert shared.data("s0-pareto")[0]["x"] == []


def test_every_seed(shared: Explored) -> None:
    box = shared.page.locator("article:not([hidden]) [data-each]")
    before = sum(len(trace["x"]) for trace in shared.data("s0-pareto")[1:])
    box.check()
    after = shared.data("s0-pareto")[1:]
    assert (before, sum(len(trace["x"]) for trace in after)) == (7, 14)
    assert all("error_x" not in trace or trace["error_x"] is None for trace in after)
    box.uncheck()


def test_hover_tells_the_settings(shared: Explored) -> None:
    shared.page.locator("article:not([hidden]) select[data-axis=x]").select_option("fvu")
    (group,) = [trace for trace in shared.data("s0-pareto") if trace.get("name") == "sampled:score=l2"]
    assert all(word in group["hovertext"][0] for word in ("score=l2,l=2", "lr 0.001", "seeds 0, 1", "FVU"))


def test_the_box_of_the_panels(shared: Explored) -> None:
    box = shared.page.locator("article:not([hidden]) select[data-choose='s0-metric']")
    for name in ("absorption", "alive"):
        box.select_option(name)
        visible = shared.page.locator("[data-chosen-by='s0-metric']:not([hidden])")
        assert visible.count() == 1 and visible.get_attribute("data-value") == name
        assert shared.page.locator(f"#s0-{name}-0 .scatterlayer .trace").count() > 0


def test_sorting_by_keyboard(shared: Explored) -> None:
    table = shared.page.locator("article:not([hidden]) .scroll:has(th button)").first
    head = table.locator("th button", has_text="FVU").first
    for direction in ("descending", "ascending"):
        head.focus()
        shared.page.keyboard.press("Enter")
        values = [
            float(cell.get_attribute("data-value") or "nan") for cell in table.locator("tbody td:nth-child(2)").all()
        ]
        assert values == sorted(values, reverse=direction == "descending")
        assert head.locator("..").get_attribute("aria-sort") == direction


def test_picking_a_group_of_curves(shared: Explored) -> None:
    shared.page.locator("article:not([hidden]) .picker label", has_text="uniform").click()
    lines = [trace for trace in shared.data("s0-curve-fve") if not trace["meta"]["band"]]
    assert {trace["opacity"] for trace in lines if trace["name"].startswith("sampled:score=uniform")} == {1}
    assert {trace["opacity"] for trace in lines if trace["name"].startswith("sampled:score=l2")} == {0.12}
    assert shared.page.locator("article:not([hidden]) [data-group]:not([hidden])").count() == 1
    shared.page.locator("article:not([hidden]) .picker label", has_text="all").first.click()


def test_models_are_shown_one_at_a_time(shared: Explored) -> None:
    box = shared.page.locator("select[data-choose=sweep]")
    assert shared.page.locator("article:not([hidden])").count() == 1
    box.select_option("1")
    assert shared.page.locator("article:not([hidden])").get_attribute("data-value") == "1"
    shared.page.wait_for_function("document.querySelector('#s1-pareto')?.data !== undefined")
    # A hostile name is text, with what cannot be seen made visible.
    assert (
        "</script><img src=x onerror=alert(1)>\\u202e\\n🦀\"'"
        in shared.page.locator("article:not([hidden]) h2").first.inner_text()
    )
    assert shared.page.locator("img").count() == 0
    titles = shared.page.locator("article:not([hidden]) figcaption h3").all_inner_texts()
    assert "sampled:score=</script><img src=x onerror=alert(1)>\\u202e\\n🦀\"'" in titles
    box.select_option("0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(browser: Any, report: Path, scheme: str) -> None:
    opened = Explored(browser, report / "out" / "index.html", width=390, scheme=scheme)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    cross = opened.data("s0-pareto")[-1]["marker"]["color"]
    assert cross == {"light": "#000000", "dark": "#ffffff"}[scheme]
    assert opened.page.evaluate("document.getElementById('s0-pareto').layout.dragmode") is False
    wide = opened.page.evaluate(SCROLLED)
    assert {name for name, _ in wide} == {"contents", "scroll", "scroll words"}
    assert all(background == "local, scroll, scroll" for _, background in wide), "a shadow says that there is more"
    opened.page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    assert not {name for name, _ in opened.page.evaluate(SCROLLED)} - {name for name, _ in wide}
    opened.close()


SCROLLED = """() => [...document.querySelectorAll("body *")]
  .filter(part => part.clientWidth && part.scrollWidth > part.clientWidth)
  .filter(part => getComputedStyle(part).overflowX === "auto")
  .map(part => [part.className.trim(), getComputedStyle(part).backgroundAttachment])"""
CUT = """() => [...document.querySelectorAll(".plot text")].filter(text => {
  const inner = text.getBoundingClientRect(), outer = text.closest(".plot").getBoundingClientRect();
  return inner.width && (inner.left < outer.left || inner.top < outer.top - 1 || inner.right > outer.right + 1 ||
    inner.bottom > outer.bottom + 1);
}).map(text => text.textContent)"""


def test_no_title_of_any_metric_is_cut_off_on_a_phone(browser: Any, report: Path) -> None:
    opened = Explored(browser, report / "out" / "index.html", width=390)
    boxes = opened.page.locator("article:not([hidden]) select")
    titles = set()
    for box in boxes.all():
        for name in box.evaluate("box => [...box.options].map(option => option.value)"):
            box.select_option(name)
            assert opened.page.evaluate(CUT) == [], name
            titles |= {*opened.page.locator("#s0-pareto .xtitle").all_text_contents()}
    assert any("shuffled" in title for title in titles)
    opened.close()
