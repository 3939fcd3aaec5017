"""The page in a real browser, from disk: no error, hostile text as text, and controls that do what they say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sampled_sae.browser.collect import neighbors
from sampled_sae.browser.files import Page
from sampled_sae.browser.write import write_browser
from tests.browser.made_up import HOSTILE, SILENT, WORDS, M, hostile_tokenizer, made_up_page, write_hostile
from tests.chromium import Opened
from tests.models.tiny_models import make_tokenizer

EXPLANATION = "<img src=x onerror=alert(1)>\\u202e\\n</script> chemistry"


INTRUDER = """() => {
  const tag = document.createElement("script"), image = new Image();
  tag.textContent = "window.ran = 1";
  image.src = "https://example.org/x.png";
  document.body.insertAdjacentHTML("beforeend", '<p id="p" onclick="window.ran = 1">x</p>');
  document.body.append(tag, image);
  document.getElementById("p").click();
}"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    folder = tmp_path_factory.mktemp("browse")
    return folder / "index.html", write_hostile(folder)


class Browsed(Opened):
    """A page of latents."""

    ready = "document.body.hasAttribute('data-ready')"
    size = (1300, 800)

    def go(self, latent: int) -> None:
        self.page.evaluate(f"location.hash = '#latent={latent}'")
        self.page.wait_for_selector(f"#view h2:text-is('Latent {latent}')")

    def section(self, title: str) -> Any:
        """A section of the view by its heading."""
        return self.page.locator("#view section", has=self.page.locator(f"h3:text-is({title!r})"))

    def latents(self) -> list[int]:
        """The whole list in its order."""
        order: list[int] = self.page.evaluate("[...state.order]")
        return order

    def search(self, text: str, scope: str = "all") -> list[int]:
        self.page.locator("#scope").select_option(scope)
        self.page.locator("#query").fill(text)
        self.page.locator("#query").press("Enter")
        return self.latents()


@pytest.fixture
def opened(browser: Any, made: tuple[Path, Page]) -> Iterator[Browsed]:
    page = Browsed(browser, made[0])
    yield page
    page.close()


def test_first_view(opened: Browsed, made: tuple[Path, Page]) -> None:
    fired = made[1].browsed.firings.fired
    assert opened.page.locator("#count").inner_text() == f"{int((fired > 0).sum())} of {M} latents"
    assert opened.page.locator("#view h2").inner_text() == "About these latents"
    assert opened.page.locator("h1").inner_text() == "<b>made & up</b>\\u202e"
    assert "<i>none</i>" in opened.page.locator("#view").inner_text()
    assert 20 < opened.page.locator(".row").count() < 80, "only rows in sight are made"
    assert not [name for name in opened.asked if name.startswith(("chunk", "text"))], "chunks are read on demand"
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 1300


def test_every_row_comes_into_sight(opened: Browsed) -> None:
    seen = set()
    for top in range(0, 40 * M, 600):
        opened.page.evaluate(f"list.scrollTop = {top}; showRows()")
        seen |= set(opened.page.locator(".row .latent").all_inner_texts())
    assert seen == {str(latent) for latent in opened.latents()}


def test_sorting(opened: Browsed, made: tuple[Path, Page]) -> None:
    browsed = made[1].browsed
    assert browsed.other is not None
    live = (browsed.firings.fired > 0).nonzero().squeeze(1)
    assert opened.latents()[:2] == [300, 3], "scores first, those without one last"
    by = {"Density": made[1].density.fired, "Unique": -browsed.other.near.nearest}
    for head, values in by.items():
        for down in (True, False):
            opened.page.locator("#heads button", has_text=head).click()
            order = torch.tensor(opened.latents())
            assert sorted(order.tolist()) == live.tolist()
            assert (values[order].diff() * (-1 if down else 1) >= 0).all()
    opened.page.locator("#sort").select_option("near")
    order = torch.tensor(opened.latents())
    assert (browsed.near.nearest[order].diff() <= 0).all()
    opened.page.locator("#turn").click()
    assert (browsed.near.nearest[torch.tensor(opened.latents())].diff() >= 0).all()
    opened.page.locator("#sort").select_option("listed")
    assert opened.latents()[0] == 300
    opened.page.locator("#sort").select_option("score")
    opened.page.locator("#turn").click()
    assert opened.latents()[:2] == [3, 300], "what has no score is last this way round too"
    opened.page.locator("#heads button", has_text="Latent").click()
    assert opened.latents() == live.tolist()
    opened.page.locator("#silent").check()
    assert opened.latents() == list(range(M))


def test_searching(opened: Browsed, made: tuple[Path, Page]) -> None:
    tokens, tokenizer = made[1].browsed.tokens.token, hostile_tokenizer()
    known = [[tokenizer.convert_ids_to_tokens(t).strip().lower() for t in row if t >= 0] for row in tokens.tolist()]

    def having(test: Any) -> set[int]:
        return {latent for latent, words in enumerate(known) if any(test(word) for word in words)}

    assert set(opened.search("w3")) == having(lambda word: word == "w3")
    assert set(opened.search("w3*")) == having(lambda word: word.startswith("w3"))
    assert set(opened.search("THE", "tokens")) == having(lambda word: word == "the")
    assert set(opened.search("w3 w5")) == having(lambda word: word == "w3") & having(lambda word: word == "w5")
    assert set(opened.search("</script>", "tokens")) == having(lambda word: word == "</script>")
    assert set(opened.search("__proto__", "tokens")) == having(lambda word: word == "__proto__")
    assert opened.search("Chemistry") == [300, 3]
    assert opened.search("organic chem") == [300]
    assert opened.search("chemistry", "tokens") == []
    assert opened.page.locator("#none").is_visible()
    assert opened.search("w3", "text") == []
    assert opened.search("#12") == [12]
    assert opened.search("#99999") == []
    opened.page.locator("#query").press("Escape")
    assert len(opened.latents()) == int((made[1].browsed.firings.fired > 0).sum())


def test_keys(opened: Browsed) -> None:
    page = opened.page
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "query"
    page.keyboard.type("chemistry")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#view h2:text-is('Latent 300')")
    assert page.evaluate("document.activeElement.id") == "rows"
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#view h2:text-is('Latent 3')")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector("#view h2:text-is('Latent 300')")
    assert page.locator("[aria-selected=true]").get_attribute("id") == "row-300"
    assert page.locator("#rows").get_attribute("aria-activedescendant") == "row-300"
    page.keyboard.press("Escape")
    page.wait_for_selector("#view h2:text-is('About these latents')")
    page.keyboard.press("/")
    page.keyboard.press("Escape")
    assert page.locator("#query").input_value() == ""
    page.keyboard.press("Escape")
    page.keyboard.press("End")
    last = opened.latents()[-1]
    page.wait_for_selector(f"#view h2:text-is('Latent {last}')")
    assert page.locator(f"#row-{last}").is_visible()


def test_a_latent(opened: Browsed, made: tuple[Path, Page]) -> None:
    browsed = made[1].browsed
    opened.page.locator("#row-300").click()
    opened.page.wait_for_selector("#view h2:text-is('Latent 300')")
    assert opened.page.url.endswith("#latent=300")
    view = opened.page.locator("#view").inner_text()
    for text in (
        "organic chemistry",
        "One of the most unique against </script>other, where no",
        "than 0.35",
        "<b>sea</b>",
    ):
        assert text in view
    values = opened.page.locator(".contexts").first.locator("button").all_inner_texts()
    own = browsed.windows.latent == 300
    top = browsed.firings.value[browsed.windows.center[own & (browsed.windows.band == -1)]]
    assert [float(value) for value in values] == pytest.approx(top.tolist(), rel=5e-3)
    names = opened.section("Nearest latents in this SAE").locator(".number").all_inner_texts()
    assert names == [f"#{latent}" for latent in browsed.near.latent[300].tolist()]
    bars = (
        opened.page.locator("#view svg")
        .first.locator(".bar")
        .evaluate_all("bars => bars.map(bar => +bar.getAttribute('height'))")
    )
    assert [height > 0 for height in bars] == (browsed.histogram[300] > 0).tolist()
    opened.section("Nearest latents in this SAE").locator("a").first.click()
    opened.page.wait_for_selector(f"#view h2:text-is('Latent {names[0][1:]}')")
    opened.page.go_back()
    opened.page.wait_for_selector("#view h2:text-is('Latent 300')")


def test_coactivating_latents(opened: Browsed, made: tuple[Path, Page]) -> None:
    together = made[1].browsed.together
    latent = int((together.latent >= 0).sum(1).argmax())
    opened.go(latent)
    rows = opened.section("Coactivating latents")
    right = [f"#{other}" for other in together.latent[latent].tolist() if other >= 0]
    assert right and rows.locator(".number").all_inner_texts() == right
    assert float(rows.locator("b").first.inner_text()) == pytest.approx(
        float(together.correlation[latent, 0]), abs=5e-3
    )


def test_side_by_side_with_another_sae(opened: Browsed, made: tuple[Path, Page]) -> None:
    browsed = made[1].browsed
    assert browsed.other is not None and browsed.other.pairs is not None
    pairs = browsed.other.pairs
    latent = int(pairs.both.argmax())
    match, both = int(pairs.latent[latent]), int(pairs.both[latent])
    opened.go(latent)
    shown = opened.section(f"Side by side with </script>other #{match}")
    assert f"Both fire at {both} tokens" in shown.inner_text()
    values = shown.locator(".pair > div").nth(1).locator(".contexts button").all_inner_texts()
    own = pairs.windows.latent == match
    right = pairs.firings.value[pairs.windows.center[own]]
    assert [float(value) for value in values] == pytest.approx(right.tolist(), rel=5e-3)
    for button in shown.locator(".contexts button").all():
        button.click()
    counts = [0, 0]
    mine, its = browsed.firings.dense(latent) > 0, pairs.firings.dense(match) > 0
    windows = browsed.windows
    top = windows.center[(windows.latent == latent) & (windows.band == -1)]
    for side, centers, firings in ((0, top, browsed.firings), (1, pairs.windows.center[own], pairs.firings)):
        contexts = firings.position[centers].long() // firings.shape[1]
        counts[side] = int((its if side == 0 else mine)[contexts].sum())
        assert shown.locator(".pair > div").nth(side).locator(".also").count() == counts[side]
    assert sum(counts) > 0


def test_latents_in_a_sample_of_the_text(opened: Browsed, made: tuple[Path, Page]) -> None:
    samples, page = made[1].browsed.samples, opened.page
    page.locator("#to-text").click()
    page.locator("#sample").select_option("2")
    page.wait_for_selector("#view h3:text-is('Sample 3')")
    assert page.locator(".own").count() == 0 and "--serve" in page.locator("#view").inner_text()
    at = int((samples.latent[2] >= 0).sum(1).argmax())
    page.locator(".words button").nth(at).click()
    right = [f"#{latent}" for latent in samples.latent[2, at].tolist() if latent >= 0]
    assert right and page.locator("#view .neighbors .number").all_inner_texts() == right
    page.locator(".shade").first.click()
    latent = int(samples.latent[2, at, 0])
    assert page.locator(".words .hot").count() == int((samples.latent[2] == latent).any(1).sum())


def test_numbers_are_explained_on_hover_focus_and_tap(opened: Browsed) -> None:
    page, tip = opened.page, opened.page.locator("#tip")
    page.locator("#heads button.density").hover()
    assert tip.inner_text() == "Share of 1,440 tokens at which it fires."
    page.mouse.move(5, 5)
    assert not tip.is_visible()
    opened.go(3)
    term = page.locator(".facts dt", has_text="Detection")
    term.focus()
    assert (
        "windows that a judge classifies correctly" in tip.inner_text()
        and term.get_attribute("aria-describedby") == "tip"
    )
    page.locator("#view h2").click()
    assert not tip.is_visible()
    term.click()
    assert tip.is_visible()
    page.keyboard.press("Escape")


def test_shades_and_whole_contexts(opened: Browsed, made: tuple[Path, Page]) -> None:
    browsed, latent = made[1].browsed, int(made[1].browsed.firings.fired.argmax())
    opened.go(latent)
    first = int((browsed.windows.latent == latent).nonzero()[0])
    line = opened.page.locator(".contexts li").first
    line.locator("button").click()
    assert line.locator("button").get_attribute("aria-expanded") == "true"
    part = slice(int(browsed.windows.first[first]), int(browsed.windows.last[first]))
    shades = line.locator(".hot").evaluate_all(
        "nodes => nodes.map(node => +node.style.getPropertyValue('--heat-part'))"
    )
    most = float(browsed.firings.maximum[latent])
    assert shades == pytest.approx((browsed.firings.value[part] / most).tolist(), abs=1e-3)
    mark = line.locator("mark")
    assert mark.count() == 1 and float(mark.evaluate("node => node.style.getPropertyValue('--heat-part')")) == 1
    assert line.locator(".context > span, .context > mark").count() == browsed.contexts.shape[1]
    assert mark.evaluate("node => getComputedStyle(node).backgroundColor") not in ("rgba(0, 0, 0, 0)", "transparent")
    line.locator("button").click()
    assert line.locator("button").get_attribute("aria-expanded") == "false"


def test_hostile_text_is_text(opened: Browsed, made: tuple[Path, Page]) -> None:
    opened.go(3)
    assert opened.page.locator(".said").inner_text() == EXPLANATION
    said = ""
    for latent in (300, 5):
        opened.go(latent)
        for button in opened.page.locator(".contexts button").all():
            button.click()
        said += "".join(opened.page.locator(".context").all_inner_texts())
    for word in ("<script>alert(1)</script>", "</script>", "\"'`&quot;", "\\u202eright", "🦀", "a↵b", "\\u2028", "-->"):
        assert word in said
    assert HOSTILE[3] not in said
    assert opened.page.locator("#view img, #view script, #list script, #list img").count() == 0
    assert opened.page.evaluate("({}).polluted === undefined && Object.getPrototypeOf(book) === Object.prototype")


def test_silent_and_absent_latents(browser: Any, made: tuple[Path, Page]) -> None:
    opened = Browsed(browser, made[0], f"#latent={SILENT}")
    assert "It is dead here" in opened.page.locator("#view").inner_text()
    near = ("Nearest latents in this SAE", "Nearest latents in </script>other")
    assert [opened.section(title).locator("li").count() for title in near] == [5, 5]
    opened.page.evaluate("location.hash = '#latent=99999'")
    opened.page.wait_for_selector("text=There is no latent 99999")
    opened.close()


def test_a_page_without_nearest_latents_says_nothing_about_them(browser: Any, tmp_path: Path) -> None:
    page = made_up_page(len(WORDS), m=30, n=8, other=False)
    page = replace(page, browsed=replace(page.browsed, near=neighbors(torch.randn(30, 12), None, 0)))
    write_browser(page, hostile_tokenizer(), tmp_path)
    opened = Browsed(browser, tmp_path / "index.html", "#latent=0")
    assert opened.section("Activation histogram").count() == 1
    assert opened.section("Nearest latents in this SAE").count() == 0
    opened.close()


def test_parts_of_a_character_are_shown_together(browser: Any, tmp_path: Path) -> None:
    tokenizer, page = make_tokenizer(), made_up_page(200, m=30, n=8, other=False)
    ids = tokenizer("a 🦀 is \u202e é\n <b>x", add_special_tokens=False)["input_ids"]
    page.browsed.contexts[:, : len(ids)] = torch.tensor(ids)
    opened = Browsed(browser, write_browser(page, tokenizer, tmp_path), "#latent=0")
    for button in opened.page.locator(".contexts button").all():
        button.click()
    said = opened.page.locator(".context").first.inner_text()
    assert said.startswith("a 🦀 is \\u202e é↵ <b>x")
    opened.close()


def test_a_page_without_its_data_says_so(browser: Any, made: tuple[Path, Page], tmp_path: Path) -> None:
    shutil.copytree(made[0].parent, tmp_path / "copy")
    [data] = (tmp_path / "copy").glob("data-*")
    (data / "chunk-1.js").unlink()
    opened = Browsed(browser, tmp_path / "copy" / "index.html", "#latent=300")
    assert "chunk-1.js cannot be read" in opened.page.locator("#view [role=alert]").inner_text()
    opened.go(3)
    shutil.rmtree(data)
    opened.page.reload()
    opened.page.wait_for_selector("text=index.js cannot be read")
    assert all("ERR_FILE_NOT_FOUND" in line for line in opened.said) and opened.said
    opened.context.close()


def test_the_policy_holds(opened: Browsed) -> None:
    """Inline scripts and the network are refused by the browser itself."""
    opened.page.evaluate(INTRUDER)
    opened.page.wait_for_timeout(100)
    assert opened.page.evaluate("window.ran === undefined")
    refused = [line for line in opened.said if "Content Security Policy" in line]
    assert len(refused) == 3
    # The wish for the picture is seen before the browser refuses it.
    assert [line for line in opened.said if line not in refused] == ["asked for https://example.org/x.png"]
    opened.said.clear()


BEYOND = "part => part.scrollWidth - part.clientWidth"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(browser: Any, made: tuple[Path, Page], scheme: str) -> None:
    opened = Browsed(browser, made[0], width=390, scheme=scheme)
    page = opened.page
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) > 384) == (scheme == "light")
    assert page.locator("#rows").is_visible() and not page.locator("#view").is_visible()
    heads = page.locator("#heads > :visible").all_inner_texts()
    assert heads == ["Latent", "Density", "Detection", "Fires on"]
    for name in ("density", "score"):
        head, cell = (page.locator(f"{of} .{name}").first.bounding_box() for of in ("#heads", ".row"))
        assert head is not None and cell is not None
        assert head["x"] + head["width"] == pytest.approx(cell["x"] + cell["width"], abs=16)
        assert page.locator(f"#heads .{name}").evaluate(BEYOND) == 0
    page.locator(".row").first.click()
    page.wait_for_selector("#view h2:text-is('Latent 300')")
    assert page.locator("#view").is_visible() and not page.locator("#rows").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("document.getElementById('view').scrollWidth") <= 390
    number = page.locator(".neighbors li > :first-child").first.bounding_box()
    assert number is not None and number["height"] < 30, "in one line"
    page.locator(".back").click()
    page.locator("#rows").wait_for(state="visible")
    page.wait_for_function("document.querySelectorAll('.row').length > 10")
    page.locator("#to-about").click()
    page.wait_for_selector("#view h2:text-is('About these latents')")
    assert page.locator("pre").evaluate(BEYOND) == 0
    opened.close()
