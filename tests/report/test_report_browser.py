"""The report in a real browser: it asks for nothing, fits, sorts, prints, and shuts nobody out."""

import csv
import json
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright
from run_folder import METHODS, write_run

from preproj.report import write_report

pytestmark = pytest.mark.browser

SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten cells of a model of 24 layers, trained for long."""
    methods = ("none", "pre", "pre+skip", "lora")
    folder = write_run(tmp_path_factory.mktemp("runs") / "big", methods=methods, seeds=(0, 1, 2), steps=4000, layers=24)
    write_report(folder)
    return folder


@pytest.fixture
def show(browser: Browser) -> Iterator:
    """Opens the report of a run folder."""
    contexts = []

    def opened(folder: Path, width: int = 1200, **options) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.goto((folder / "report.html").as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()


def test_the_page_asks_for_nothing_and_reports_no_error(browser, demo):
    context = browser.new_context()
    page = context.new_page()
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto((demo / "report.html").as_uri(), wait_until="networkidle")
    page.get_by_role("button", name="Dark").click()
    context.close()
    assert requests == [(demo / "report.html").as_uri()]
    assert errors == []


@pytest.mark.parametrize("run", ["demo", "big"])
def test_nothing_but_tables_and_figures_scrolls_sideways_on_a_phone(show, run, request):
    page = show(request.getfixturevalue(run), width=360)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("[...document.querySelectorAll('.scroll')].some((box) => box.scrollWidth > box.clientWidth)")


def test_the_biggest_words_name_the_winner_within_the_first_screen(show, demo):
    page = show(demo)
    sizes = "[...document.querySelectorAll('body *')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
    title = page.get_by_role("heading", level=1)
    assert title.inner_text() == "pre+skip scores best in document perplexity"
    assert float(title.evaluate("(e) => parseFloat(getComputedStyle(e).fontSize)")) == max(page.evaluate(sizes))
    box = page.locator(".answers").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 800
    questions = ["Which method won?", "By how much?", "Is it real?", "What did it cost?"]
    assert page.locator(".answers dt").all_inner_texts() == questions


def test_every_figure_is_drawn_and_named(show, demo):
    page = show(demo)
    names = {"headline", "learning-curves", "cost-quality", "skip-norm", "skip-to-attention", "pre-to-input"}
    assert {figure.get_attribute("id") for figure in page.locator("figure").all()} == names
    for figure in page.locator("figure svg").all():
        box = figure.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 150
        assert len(figure.get_attribute("aria-label") or "") > 40


def test_a_table_is_sorted_by_keyboard_with_missing_numbers_last(show, demo):
    page = show(demo)
    table = page.get_by_role("region", name="Results of demo")
    button = table.get_by_role("button", name="document perplexity")
    scores = {
        method["method"]: method["scores"]["document/perplexity"]["value"]
        for method in json.loads((demo / "summary.json").read_text())["methods"]
    }
    rising = sorted(scores, key=scores.__getitem__)
    for order, words in ((rising, "ascending"), (rising[::-1], "descending")):
        button.focus()
        page.keyboard.press("Enter")
        shown = [text.split(" [")[0] for text in table.locator("tbody th").all_inner_texts()]
        assert shown == [*order, "lora-qkv"]
        assert table.locator("th[aria-sort]").get_attribute("aria-sort") == words
        assert table.locator("th[aria-sort]").count() == 1


def test_the_first_key_leads_past_the_navigation(show, demo):
    page = show(demo)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#main"
    box = page.locator(".skip").bounding_box()
    assert box is not None
    assert box["x"] >= 0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("run", ["demo", "big"])
def test_axe_finds_no_serious_fault(show, run, scheme, request):
    found = Axe().run(show(request.getfixturevalue(run), width=360, color_scheme=scheme)).response
    assert [fault["id"] for fault in found["violations"] if fault["impact"] in ("serious", "critical")] == []
    assert {"color-contrast", "scrollable-region-focusable", "svg-img-alt"} <= {rule["id"] for rule in found["passes"]}


def contrast(page: Page, selector: str, colour: str) -> float:
    """The contrast (WCAG 2) of an element's colour with the page behind it."""
    read = f"(e) => [getComputedStyle(e).{colour}, getComputedStyle(document.body).backgroundColor]"
    light = []
    for words in page.locator(selector).first.evaluate(read):
        parts = [int(part) / 255 for part in re.findall(r"\d+", words)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        light.append(sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(light) + 0.05) / (min(light) + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_and_figures_keep_their_contrast_when_the_colours_are_changed_by_keyboard(show, demo, scheme):
    page = show(demo, color_scheme=scheme)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for _ in SCHEMES:
        assert contrast(page, "p", "color") > 4.5
        assert contrast(page, "figure svg text", "fill") > 4.5
        page.locator(".theme").focus()
        page.keyboard.press("Space")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == before


def test_tables_and_data_can_be_saved(show, demo):
    page = show(demo)
    assert page.locator("figure a[download]").count() == page.locator("figure").count()
    assert page.locator(".table a[download]").count() == page.locator("table").count()
    with page.expect_download() as saved:
        page.get_by_role("link", name="Results of demo on pythia-160m: table as CSV").click()
    assert saved.value.suggested_filename == "demo-scores.csv"
    rows = list(csv.DictReader(StringIO(Path(saved.value.path()).read_text())))
    lora = next(row for row in rows if row["method"] == "lora")
    assert [float(lora[f"document perplexity{end}"]) for end in ("", " low", " high")] == pytest.approx(
        [31.9, 31.27, 32.53]
    )


def test_a_figure_is_saved_as_it_is_drawn(show, demo):
    page = show(demo)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Learning curves: figure as SVG").click()
    assert saved.value.suggested_filename == "learning-curves.svg"
    root = ElementTree.parse(saved.value.path()).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "training tokens" in {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}


def test_without_scripts_everything_is_there_to_read(show, demo):
    with_scripts, without = show(demo), show(demo, java_script_enabled=False)
    assert without.locator("button").count() == 0
    assert without.locator("table").all_inner_texts() == with_scripts.locator("table").all_inner_texts()
    assert without.locator("a[download]").count() == with_scripts.locator("a[download]").count()


def test_it_prints_on_white_pages_without_tools_and_cuts_nothing_off(show, big):
    page = show(big, width=690, color_scheme="dark")  # A4 between its margins
    page.locator(".theme").click()
    page.locator(".theme").click()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".bar").is_visible()
    assert not any(tools.is_visible() for tools in page.locator(".tools").all())
    wide = "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > 691).length"
    assert page.evaluate(wide) == 0
    pages = len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4")))
    assert 3 <= pages <= 30


def test_ten_cells_of_24_layers_stay_below_three_megabytes(big):
    assert len(list(big.glob("cells/*/*/metrics.json"))) == 10
    assert (big / "report.html").stat().st_size < 3_000_000


def test_all_known_methods_have_a_colour_of_their_own_beside_their_name(show, build_run):
    folder = build_run(methods=[*METHODS, "full", "dense-qkv"])
    write_report(folder)
    page = show(folder)
    swatches = page.locator("table").first.locator(".swatch")
    colours = [swatch.evaluate("(e) => getComputedStyle(e).backgroundColor") for swatch in swatches.all()]
    assert len(set(colours)) == len(colours) == len(METHODS) + 2
