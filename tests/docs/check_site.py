"""The built site in a browser: it opens from disk, searches, and loads nothing from the network.

`make test-docs` runs this.
"""

import re
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.chromium import CHROME, Opened

SITE = Path(__file__).parents[2] / "site"


class SitePage(Opened):
    ready = "document.readyState === 'complete'"


def test_search_works_from_disk():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROME, args=["--no-sandbox"])
        opened = SitePage(browser, SITE / "index.html")
        opened.page.wait_for_timeout(500)
        opened.page.keyboard.press("/")
        opened.page.wait_for_timeout(500)
        opened.page.keyboard.type("absorption")
        opened.page.get_by_text(re.compile(r"^\d+ results$")).wait_for(timeout=20_000)
        opened.close()
        browser.close()
