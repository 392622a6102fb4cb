"""The chat page in headless Chromium, against a real verifier and against canned streams.

Screenshots are left in build/screenshots.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, async_playwright, expect

from cloud_verifier.local import local_verifier
from edge_client.api.server import ServeConfig, serving
from edge_client.options import Options

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HTML = "<b>bold</b> <script>window.hacked = 1</script> <img src=x onerror='window.hacked = 1'>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium with an empty profile."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found, "These tests need Chromium: apt-get install chromium"
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=found, headless=True, args=FLAGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A page on which any script error, and any request to elsewhere, fails the test."""
    context = await browser.new_context(viewport={"width": 1100, "height": 760}, color_scheme="light")
    page = await context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if not _is_own(request.url) else None)
    yield page
    await context.close()
    assert problems == []


def _is_own(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "blob:", "chrome:", "about:"))


def options(address: str, draft: Path, **changes: object) -> Options:
    chosen = Options(
        verifier=address,
        draft=str(draft),
        insecure=True,
        tls_ca=None,
        token="",
        connect_timeout=5,
        patience=1,
        threads=0,
        k="8",
    )
    return replace(chosen, **changes)


class TestRealConversation:
    async def test_talk_stop_and_lose_the_verifier(
        self, page: Page, target_dir: Path, draft_dir: Path
    ) -> None:
        with local_verifier("--target", str(target_dir)) as address:
            async with serving(options(address, draft_dir), ServeConfig(port=0)) as url:
                await page.goto(url)
                await expect(page.locator("#model")).not_to_be_empty()
                await page.get_by_role("switch", name="Origins").check()
                await self._be_greedy(page)
                await self._talk(page)
                await self._stop(page)
                await self._lose(page, address)

    async def _be_greedy(self, page: Page) -> None:
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Temperature").fill("0")
        await page.get_by_label("Longest answer").fill("60")
        await page.get_by_role("button", name="Save").click()

    async def _talk(self, page: Page) -> None:
        """Two turns; the second one knows the first."""
        await page.get_by_label("Message", exact=True).fill("What is the capital of France?")
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn.assistant .text").first).to_contain_text("Paris", timeout=120_000)
        await _finished(page)
        assert await page.locator(".text .accepted").count() > 0
        for figure in ("#f-acceptance", "#f-rtt", "#f-bytes", "#f-plan"):
            await expect(page.locator(figure)).not_to_have_text("–")
        await page.get_by_label("Message", exact=True).fill("Tell me more about it.")
        await page.keyboard.press("Enter")
        await _finished(page, turns=2)
        await page.screenshot(path=SCREENSHOTS / "conversation.png")

    async def _stop(self, page: Page) -> None:
        await page.get_by_label("Message", exact=True).fill("Write a long story about a fox and a river.")
        await page.keyboard.press("Enter")
        await page.locator(".turn.writing .text span").first.wait_for(timeout=120_000)
        await page.screenshot(path=SCREENSHOTS / "writing.png")
        await page.keyboard.press("Escape")
        await expect(page.locator(".turn").last.locator(".note")).to_have_text("Stopped.")
        length = len(await page.locator(".turn").last.locator(".text").inner_text())
        await page.get_by_role("button", name="Regenerate").click()
        await expect(page.locator(".turn.writing")).to_have_count(1)
        await page.get_by_role("button", name="Stop").click()
        await expect(page.locator(".turn.writing")).to_have_count(0)
        assert length > 0

    async def _lose(self, page: Page, address: str) -> None:
        await page.get_by_label("Message", exact=True).fill("Write a long story about a bear.")
        await page.keyboard.press("Enter")
        await page.locator(".turn.writing .text span").first.wait_for(timeout=120_000)
        _process_at(address).kill()
        await expect(page.get_by_role("alert")).to_contain_text("verifier", timeout=30_000)
        await expect(page.locator(".turn").last.locator(".note")).to_have_text("The answer broke off here.")
        await expect(page.locator(".turn").last.locator(".note")).to_be_in_viewport()
        await page.screenshot(path=SCREENSHOTS / "verifier-lost.png")
        # What was written stays, and the page can still be used.
        assert await page.locator(".turn.assistant").last.locator(".text").inner_text()
        await expect(page.get_by_role("button", name="Send")).to_be_enabled()


async def test_what_the_draft_writes_alone_is_marked_without_any_switch(page: Page, tiny_draft: Path) -> None:
    alone = options("127.0.0.1:9", tiny_draft, edge_only_fallback=True)
    async with serving(alone, ServeConfig(port=0)) as url:
        await page.goto(url)
        await expect(page.locator("#model")).not_to_be_empty()
        await _ask(page, "Hi")
        await expect(page.locator(".turn.assistant .warning")).to_contain_text("Not exact")
        await expect(page.locator(".turn.user .warning")).to_be_hidden()
        await expect(page.locator("#f-plan")).to_have_text("edge only")
        decoration = "element => getComputedStyle(element).textDecorationStyle"
        assert await page.locator(".text .edge_only").first.evaluate(decoration) == "dotted"
        await page.set_viewport_size({"width": 360, "height": 740})
        await page.screenshot(path=SCREENSHOTS / "edge-only-phone.png")


class TestPage:
    """No verifier: the stream is a given one."""

    @pytest.fixture
    def asked(self) -> list[dict[str, Any]]:
        """The bodies of the requests that the page makes."""
        return []

    @pytest_asyncio.fixture(loop_scope="module")
    async def canned(self, page: Page, tiny_draft: Path, asked: list[dict[str, Any]]) -> AsyncIterator[Page]:
        async with serving(options("127.0.0.1:9", tiny_draft), ServeConfig(port=0)) as url:
            await page.route("**/v1/chat/completions", functools.partial(_canned, asked))
            await page.goto(url)
            await expect(page.locator("#model")).to_have_text("tiny")
            yield page

    async def test_text_that_looks_like_html_stays_text(self, canned: Page) -> None:
        await _ask(canned, HTML)
        await expect(canned.locator(".turn.user .text")).to_have_text(HTML)
        await expect(canned.locator(".turn.assistant .text")).to_have_text(HTML)
        assert await canned.locator(".text b, .text script, .text img").count() == 0
        await expect(canned.locator(".warning").last).to_be_hidden()
        assert await canned.evaluate("() => window.hacked === undefined")

    async def test_it_asks_for_what_was_set_and_said(self, canned: Page, asked: list[dict[str, Any]]) -> None:
        await _ask(canned, "Hi")
        talk = [{"role": "user", "content": "Hi"}]
        wish = {"temperature": 0.7, "top_p": 1, "max_tokens": 512, "seed": None, "model": "tiny"}
        assert asked[0].items() >= (wish | {"messages": talk, "stream": True}).items()
        await canned.get_by_role("button", name="Settings").click()
        for label, value in (
            ("System message", "Be brief."),
            ("Temperature", "0.25"),
            ("Top-p", "0.9"),
            ("Longest answer", "33"),
            ("Seed", "12"),
        ):
            await canned.get_by_label(label).fill(value)
        await canned.get_by_role("button", name="Save").click()
        await _ask(canned, "More", turns=2)
        talk = [
            {"role": "system", "content": "Be brief."},
            *talk,
            {"role": "assistant", "content": HTML},
            {"role": "user", "content": "More"},
        ]
        wish |= {"temperature": 0.25, "top_p": 0.9, "max_tokens": 33, "seed": 12}
        assert asked[1].items() >= (wish | {"messages": talk}).items()
        assert len(asked) == 2

    async def test_the_figures_are_those_of_the_stream(self, canned: Page) -> None:
        # The page looks at the clock once a round: a quarter of a second lies between the two.
        await canned.evaluate("() => { let now = 0; performance.now = () => (now += 250); }")
        await _ask(canned, "Hi")
        for figure, text in (
            ("speed", "4.0 tok/s"),
            ("acceptance", "75 %"),
            ("rtt", "7 ms"),
            ("bytes", "120 B"),
            ("plan", "4 tokens"),
        ):
            await expect(canned.locator(f"#f-{figure}")).to_have_text(text)
        await expect(canned.locator(".turn.assistant .note")).to_have_text(
            "1.0 tokens a round · first token after 12 ms · seed 5"
        )

    async def test_origins_are_shown_on_the_switch(self, canned: Page) -> None:
        await _ask(canned, "Hi")
        recovered = canned.locator(".text .recovered").first
        colour = "element => getComputedStyle(element).backgroundColor"
        assert await recovered.evaluate(colour) == "rgba(0, 0, 0, 0)"
        await canned.get_by_role("switch", name="Origins").focus()
        await canned.keyboard.press("Space")
        assert await recovered.evaluate(colour) != "rgba(0, 0, 0, 0)"
        await expect(canned.get_by_role("list", name="Where tokens come from")).to_be_visible()
        await canned.reload()
        await expect(canned.get_by_role("switch", name="Origins")).to_be_checked()

    async def test_keyboard_alone(self, canned: Page) -> None:
        """Ask, read, ask again, change a setting, without a mouse."""
        await expect(canned.get_by_label("Message", exact=True)).to_be_focused()
        await canned.keyboard.type("One")
        await canned.keyboard.press("Shift+Enter")
        await canned.keyboard.type("two")
        await canned.keyboard.press("Enter")
        await expect(canned.locator(".turn.user .text")).to_have_text("One\ntwo")
        await _finished(canned)
        await expect(canned.get_by_label("Message", exact=True)).to_be_focused()
        await canned.get_by_role("button", name="Settings").focus()
        await canned.keyboard.press("Enter")
        await expect(canned.get_by_role("dialog", name="Settings")).to_be_visible()
        await canned.get_by_label("Temperature").fill("1.5")
        await canned.keyboard.press("Enter")
        await expect(canned.get_by_role("dialog", name="Settings")).to_be_hidden()
        await canned.get_by_role("button", name="Settings").click()
        await expect(canned.get_by_label("Temperature")).to_have_value("1.5")
        await canned.screenshot(path=SCREENSHOTS / "settings.png")
        await canned.keyboard.press("Escape")
        await expect(canned.get_by_role("dialog", name="Settings")).to_be_hidden()

    async def test_a_screen_reader_hears_the_answer_once(self, canned: Page) -> None:
        await _ask(canned, "Hi")
        await expect(canned.get_by_role("status")).to_have_text(f"Answer: {HTML}")
        log = canned.get_by_role("log", name="Conversation")
        await expect(log).to_have_attribute("aria-live", "off")
        await expect(log.get_by_role("list").get_by_role("listitem")).to_have_count(2)
        await expect(canned.locator("ol[role=log], ul[role=log]")).to_have_count(0)
        unnamed = """() => [...document.querySelectorAll('button, input, textarea, select')]
            .filter((e) => !e.textContent.trim() && !e.labels?.length && !e.ariaLabel).map((e) => e.id)"""
        assert await canned.evaluate(unnamed) == []

    async def test_regenerate_keeps_one_answer(self, canned: Page) -> None:
        await _ask(canned, "Hi")
        await canned.get_by_role("button", name="Regenerate").click()
        await _finished(canned)
        await expect(canned.locator(".turn")).to_have_count(2)

    async def test_copy(self, canned: Page) -> None:
        await canned.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await _ask(canned, "Hi")
        await canned.locator(".turn.assistant").get_by_role("button", name="Copy").click()
        await expect(canned.get_by_role("button", name="Copied")).to_be_visible()
        assert await canned.evaluate("() => navigator.clipboard.readText()") == HTML

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    async def test_narrow_and_both_colours(self, canned: Page, scheme: str) -> None:
        await canned.emulate_media(color_scheme=scheme)
        await canned.set_viewport_size({"width": 320, "height": 640})
        await canned.get_by_role("switch", name="Origins").check()
        await _ask(canned, "x" * 200)
        wide = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await canned.evaluate(wide) == 0
        for name in ("Send", "Settings", "New chat"):
            box = await canned.get_by_role("button", name=name).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 320
        assert await canned.evaluate(_CONTRAST) >= 4.5
        await canned.screenshot(path=SCREENSHOTS / f"phone-{scheme}.png")

    async def test_a_refusal_is_said(self, canned: Page) -> None:
        await canned.unroute("**/v1/chat/completions")
        await _ask(canned, "Hi")
        await expect(canned.get_by_role("alert")).to_contain_text("Nothing answers")
        await expect(canned.locator(".turn.assistant .note")).to_have_text("No answer.")


_CONTRAST = """() => {
  // The smallest contrast (WCAG 2) between the text of a token and its background.
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((c) => {
      c /= 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return Math.min(...[...document.querySelectorAll('.text span, .legend li')].map((element) => {
    const style = getComputedStyle(element);
    const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }));
}"""


async def _ask(page: Page, text: str, turns: int = 1) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")
    await _finished(page, turns)


async def _finished(page: Page, turns: int = 1) -> None:
    await expect(page.locator(".turn.assistant")).to_have_count(turns)
    await expect(page.locator(".turn.writing")).to_have_count(0, timeout=180_000)


async def _canned(asked: list[dict[str, Any]], route: Route) -> None:
    """A stream that says HTML in two rounds; keeps what was asked."""
    asked.append(route.request.post_data_json)
    cut = len(HTML) // 2
    head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "tiny"}
    events = []
    for text, origin in ((HTML[:cut], "accepted"), (HTML[cut:], "recovered")):
        trace = {
            "tokens": [{"id": 1, "text": text, "origin": origin}],
            "round": {
                "drafted": 4,
                "accepted": 3,
                "up_bytes": 100,
                "down_bytes": 20,
                "draft_ms": 1,
                "round_trip_ms": 7,
                "forward_ms": 3,
            },
        }
        events.append({**head, "choices": [{"index": 0, "delta": {"content": text}}], "specwire": trace})
    report = {"rounds": 2, "tokens_per_round": 1.0, "first_token_ms": 12.0, "seeds": [5], "lossy": False}
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    events.append({**head, "choices": [last], "specwire": report})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    await route.fulfill(content_type="text/event-stream", body=body)


def _process_at(address: str) -> psutil.Process:
    port = int(address.rpartition(":")[2])
    for child in psutil.Process().children(recursive=True):
        for connection in child.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return child
    raise LookupError(address)
