"""What report, table and model card promise: only measured numbers, a page that stands alone, text left intact."""

import ast
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from foredraft.heads.hub.card import aligned, duration, measured, model_card, number, percent
from foredraft.inference.evaluation.plots import DEPTHS, MAX_POINTS, Bar, Series, bar_chart, line_chart
from foredraft.inference.evaluation.report import Report, write_report
from foredraft.inference.evaluation.results import Results, Sample, Spread

METRICS: dict = {
    "acceptance_length": 4.541,
    "acceptance_length_sampled": 2.972,
    "acceptance_length_all": 4.873,
    "accepted_per_depth": [0.871, 0.742, 0.613],
    "tokens_per_second": 312.4,
    "baseline_tokens_per_second": 138.2,
    "preempted_share": 0.061,
    "speedup": 2.2605,
    "identical_greedy": True,
    "identical_sampled": 1.0,
    "prompts": 57,
    "repetitive_prompts": 9,
    "step_seconds": {"draft": 0.0041, "forward": 0.0078, "verify": 0.0004, "keep": 0.0003, "host": 0.0009},
    "train_tokens_per_second": 6543.2,
    "train_seconds": 214.3,
    "peak_memory_bytes": 2.71e9,
    "parameters": 3_412_000,
    "device": "cpu, test machine",
    "dtype": "bfloat16",
    "date": "2025-11-20",
    "command": "python train/run.py seed=0",
    "versions": {"torch": "2.13.0"},
}
# What a reader sees of each number; the page shows it if and only if the metrics have it.
SHOWN = {
    "acceptance_length": "4.54",
    "acceptance_length_sampled": "2.97",
    "acceptance_length_all": "4.87",
    "accepted_per_depth": "74.2 %",
    "tokens_per_second": "312",
    "baseline_tokens_per_second": "138",
    "preempted_share": "6.1 %",
    "speedup": "2.26",
    "prompts": "57",
    "repetitive_prompts": "9",
    "step_seconds": "7.8 ms",
    "train_tokens_per_second": "6,543",
    "train_seconds": "3 min 34 s",
    "peak_memory_bytes": "2.71 GB",
    "parameters": "3.41 M",
    "device": "cpu, test machine",
    "dtype": "bfloat16",
    "date": "2025-11-20",
}
FLOATS = {key for key, value in METRICS.items() if isinstance(value, float)}
PAGE_ONLY = {"command": "python train/run.py seed=0", "versions": "2.13.0"}
HISTORY = [{"step": s, "loss": 9 / s, "acc_1": 1 - 1 / s, "acc_2": 1 - 2 / s} for s in range(10, 310, 10)]
EVALS = [{"step": s, "acceptance_length": 1 + s / 100} for s in (100, 200, 300)]
TEXTS = ["\n", "    if", " a<b", " & ", '"\t"', "\r\n", "\r", "  ", "\n\n", "\u00e9"]
PIECES = list(zip(TEXTS, (0, 1, 2, 3, 0, 1, 12, 0, 1, 0), strict=True))
SAMPLE = Sample("\nx = '&lt;'\r\n", PIECES)
ROW = {
    "drafter": "head",
    "temperature": 0.0,
    "category": "all",
    "texts": 57,
    "timed_texts": 8,
    "acceptance_length": 4.541,
    "acceptance_error": 0.119,
    "chain_acceptance_length": None,
    "accepted_per_depth": [0.871, 0.742, 0.613],
    "tokens_per_second": Spread(312.4, 300.1, 325.6),
    "speedup": Spread(2.31, 2.31, 2.31),
}
RESULTS = Results(
    metadata={"preempted_share": 0.061},
    rows=[
        ROW,
        ROW | {"drafter": "rival", "acceptance_length": None, "acceptance_error": None, "accepted_per_depth": []},
    ],
    rivals=["rival"],
    identity=[{"drafter": "head", "temperature": 0.0, "texts": 8, "identical": 8, "rounding": 0, "wrong": 0}],
    stages=[{"drafter": "head", "temperature": 0.0, "seconds": METRICS["step_seconds"]}],
    alignment={},
    errors={},
)
RUN = Report("eagle3 for a/target", METRICS, RESULTS, [SAMPLE, SAMPLE], HISTORY + EVALS, "head:\n  depth: 3\n")
EMPTY = Report("empty", {}, None, [])
HEAD = {"kind": "eagle3", "target": "org/target", "parameters": 3_412_000, "depth": 3, "license": "apache-2.0"}


class Page:
    """Read a page as XML: it fails if a tag is not closed in order."""

    def __init__(self, source: str):
        root = ET.fromstring(re.sub("<meta ([^>]*)>", r"<meta \1/>", source.removeprefix("<!doctype html>")))
        self.tags = [node.tag for node in root.iter()]
        self.attributes = [pair for node in root.iter() for pair in node.items()]
        # Per <pre>: (class, title, text) of each <span>.
        self.tokens = [
            [(span.get("class", ""), span.get("title", ""), span.text or "") for span in pre.iter("span")]
            for pre in root.iter("pre")
        ]
        for style in root.iter("style"):
            style.text = ""
        self.text = "".join(root.itertext())


def table(metrics: dict) -> str:
    return aligned(measured(metrics))


def read(path: Path, run: Report) -> Page:
    write_report(path, run)
    return Page((path / "report.html").read_bytes().decode("utf-8"))


HALVES = RUN._replace(samples=[Sample("\ud800", [("\udcff", 1)])])  # of a character, which UTF-8 cannot encode


def test_the_standard_error_is_next_to_an_acceptance_length(tmp_path):
    assert "4.54 ± 0.12" in read(tmp_path, RUN).text


@pytest.mark.parametrize("run", [RUN, EMPTY, HALVES, RUN._replace(samples=[Sample("", [])])])
def test_page_is_well_formed_and_needs_nothing_else(tmp_path, run):
    page = read(tmp_path, run)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset") or name.startswith("on")]
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\(|@import", source)
    assert "prefers-color-scheme:dark" in source and 'name="viewport"' in source
    assert "default-src 'none'" in source


def test_page_shows_every_measured_number_and_a_chart_of_each(tmp_path):
    page = read(tmp_path, RUN)
    figures = ["312.4 (300.1 to 325.6)", "2.31\u00d7", "identical", "forward 58%", "13.5 ms"]
    for shown in [*SHOWN.values(), *PAGE_ONLY.values(), *figures, "yes", "head:\n  depth: 3\n"]:
        assert shown in page.text, shown
    assert page.tags.count("svg") == 4 and page.attributes.count(("class", "bars")) == 1
    assert "nan" not in page.text.lower() and "None" not in page.text


ABSENT = [(key, gone) for key in {**SHOWN, **PAGE_ONLY} for gone in (None, math.nan) if gone is None or key in FLOATS]


@pytest.mark.parametrize(("key", "gone"), [*((key, "left out") for key in {**SHOWN, **PAGE_ONLY}), *ABSENT])
def test_what_was_not_measured_is_left_out(tmp_path, key, gone):
    left = {name: value for name, value in METRICS.items() if name != key}
    metrics = left if gone == "left out" else {**METRICS, key: gone}
    page = read(tmp_path, EMPTY._replace(metrics=metrics))
    shown = {**SHOWN, **PAGE_ONLY}[key]
    for text in (page.text, table(metrics), model_card(metrics, {"kind": "k", "target": "t"}, None)):
        assert not re.search(rf"(?<![\w.]){re.escape(shown)}(?![\w.])", text), shown
        assert "nan" not in text.lower() and "None" not in text


def test_text_from_outside_stays_text(tmp_path):
    evil = "<script>alert(1)</script>\"'&amp;</pre></style>"
    metrics = {**METRICS, "device": evil, "command": evil, "versions": {evil: evil}, "step_seconds": {evil: 0.1}}
    rows = [{**ROW, "drafter": evil, "category": category} for category in ("all", evil, "code")]
    results = RESULTS._replace(rows=rows, alignment={evil: [evil]}, stages=[{**RESULTS.stages[0], "drafter": evil}])
    page = read(tmp_path, Report(evil, metrics, results, [Sample(evil, [(evil, 1)])], HISTORY, evil))
    assert "script" not in page.tags and page.tags.count("style") == 1
    assert page.text.count(evil) >= 14
    assert [text for _, _, text in page.tokens[0]] == [evil, evil]


def test_sample_keeps_its_text_and_says_how_each_token_came(tmp_path):
    page = read(tmp_path, RUN)
    for (_, _, prompt), *tokens in page.tokens[:2]:
        assert prompt == SAMPLE.prompt
        assert [text for _, _, text in tokens] == [piece for piece, _ in PIECES]
        for (kind, title, _), (_, depth) in zip(tokens, PIECES, strict=True):
            assert title == ("the target's own" if depth == 0 else f"drafted, accepted at depth {depth}")
            assert kind.split()[0] == ("own" if depth == 0 else "depth")
    styled = (tmp_path / "report.html").read_text(encoding="utf-8").split("</style>")[0]
    used = {name for kind, _, _ in page.tokens[0] for name in kind.split() if re.fullmatch(r"d\d+", name)}
    assert used == {"d1", "d2", "d3", f"d{len(DEPTHS)}"}  # depth 12 has the last color, not none
    assert all(f".{name}{{" in styled for name in used)
    drafted = sum(depth > 0 for _, depth in PIECES)
    assert f"{drafted} of {len(PIECES)} tokens were drafted" in page.text


@pytest.mark.parametrize(
    ("greedy", "sampled", "values"),
    [
        (True, True, ["yes", "yes"]),
        (True, False, ["yes", "no"]),
        (1.0, 0.984, ["yes", "on 98.4 % of the prompts"]),
        (0.99999, True, ["on 99.9 % of the prompts", "yes"]),
        (False, None, ["no"]),
    ],
)
def test_identity_is_never_overstated(tmp_path, greedy, sampled, values):
    metrics = {**METRICS, "identical_greedy": greedy, "identical_sampled": sampled}
    write_report(tmp_path, RUN._replace(metrics=metrics, history=[]))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall("<h3>identical to the baseline in float32, .*?</h3><b>(.*?)</b>", page) == values
    card = model_card(metrics, HEAD, None)
    assert card.count("on every prompt measured") == (greedy in (True, 1.0)) + (sampled in (True, 1.0))
    assert card.count("was not measured") == (sampled is None)
    assert card.count("**not**") == sum(share is not None and share < 1 for share in (greedy, sampled))


def test_table_is_plain_and_complete():
    text = table(METRICS)
    assert text.isascii()
    assert all(shown in text for shown in SHOWN.values())
    column = text.splitlines()[0].index("4.54")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in text.splitlines())
    assert table({}) == ""


# Numbers


def test_digits_and_units():
    assert [number(x) for x in (0.01234, 4.213, 5, 79.64, 99.96, 187.2, 999.6, 12345)] == [
        "0.0123", "4.21", "5", "79.6", "100", "187", "1,000", "12,345",
    ]  # fmt: skip
    assert [percent(x) for x in (0, 0.0001, 0.5, 0.9999, 1)] == ["0 %", "0.1 %", "50.0 %", "99.9 %", "100 %"]
    assert [duration(x) for x in (0.0004, 0.0123, 2.5, 59.9, 60, 3599.7, 3725)] == [
        "0.4 ms", "12.3 ms", "2.5 s", "59.9 s", "1 min 00 s", "1 h 00 min", "1 h 02 min",
    ]  # fmt: skip


# Charts


def parse(chart: str) -> ET.Element:
    """Return the chart as XML: named, without its own colors, every coordinate a finite number inside the picture."""
    root = ET.fromstring(chart)
    assert root.attrib["role"] == "img" and root.attrib["aria-label"]
    assert not re.search(r"#[0-9a-f]{6}|NaN|nan|inf", chart)
    for spots in [*lines(root), *lines(root, "dot")]:
        assert all(0 <= x <= 100 and 0 <= y <= 100 for x, y in spots)
    return root


def lines(root: ET.Element, kind: str | None = None) -> list[list[tuple[float, float]]]:
    """Return the stretches of the curves, which are drawn without a break. kind: "dot" returns the points."""
    curves = [node.attrib["d"] for node in root.iter("path") if node.get("class") == kind]
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", one)] for one in curves]


def titles(root: ET.Element) -> list[str]:
    return [node.text or "" for node in root.iter("title")]


YS = ([1.0], [0.0], [2.0] * 3, [-1.0, 1.0], [1e-9, 2e-9], [1e30, 1.0], [math.nan, 3.0, math.inf], [1.0, 1.0 + 1e-15])


@pytest.mark.parametrize("ys", YS)
@pytest.mark.filterwarnings("error")
def test_line_chart_of_any_values(ys):
    root = parse(line_chart("loss", [Series("", [(i, y) for i, y in enumerate(ys)], "d1")], " s"))
    finite = [y for y in ys if math.isfinite(y)]
    assert titles(root) == [f"step {i}: {y:.2f} s" for i, y in enumerate(ys) if math.isfinite(y)]
    assert [node.text for node in root.iter("li")] == [f"{finite[-1]:.2f} s"]
    assert [node.text for node in root.iter("b")] == [f"{end:.3g} s" for end in (max(finite), min(finite))]


def test_nothing_to_draw_is_no_chart():
    assert line_chart("n", []) == line_chart("n", [Series("a", [], "d1")]) == ""
    assert line_chart("n", [Series("a", [(1, math.nan)], "d1")]) == ""
    assert bar_chart("n", []) == bar_chart("n", [Bar("1", math.nan, "d1", "-"), Bar("2", 0.0, "d1", "0 %")]) == ""


def test_line_breaks_where_the_loss_was_not_a_number():
    points = [(i, math.nan if i in (2, 5) else 1.0 + i) for i in range(7)]
    root = parse(line_chart("loss", [Series("", points, "d1")]))
    assert [len(stretch) for stretch in lines(root)] == [2, 2, 1]
    assert len(titles(root)) == 5
    points = [(i, math.nan if i == 60 else 1.0 + i) for i in range(62)]  # too many for a dot each
    alone = line_chart("loss", [Series("", points, "d1")])
    assert titles(parse(alone)) == ["step 61: 62.00"]  # or it would not be seen


def test_a_long_run_makes_a_small_chart_and_says_so():
    chart = line_chart("loss", [Series("", [(i, 1 / (i + 1)) for i in range(100_000)], "d1")])
    (line,) = lines(parse(chart))
    assert 100 < len(line) <= MAX_POINTS
    assert "each point the mean of 334 log entries" in chart


@pytest.mark.parametrize("values", [[100.0], [87.1, math.nan, 43.55, 0.0], [1e-6], [1e308, 1e307], [50.0] * 40])
@pytest.mark.filterwarnings("error")
def test_bars_are_as_long_as_their_values(values):
    root = ET.fromstring(bar_chart("accepted", [Bar(str(v), v, "d1", f"of {v} <") for v in values]))
    assert root.attrib["aria-label"] == "accepted"
    assert [node.text for node in root.iter("dt")] == [str(v) for v in values]
    bars = list(root.iter("i"))
    assert [bar.tail for bar in bars] == [f"of {value} <" for value in values]
    widths = [float(re.search(r"width:([\d.]+)%", bar.attrib["style"])[1]) for bar in bars]
    for width, value in zip(widths, values, strict=True):
        assert width / widths[0] == pytest.approx(value / values[0] if math.isfinite(value) else 0, abs=0.01)


def test_a_line_follows_its_values_from_its_floor():
    for floor, low in ((None, 100), (0, 50)):  # up is more
        root = parse(line_chart("accuracy", [Series("", [(0, 42.0), (5, 63.0), (10, 84.0)], "d1")], " %", floor=floor))
        assert [node.text for node in root.iter("b")] == ["84 %", "42 %" if floor is None else "0 %"]
        assert lines(root) == [[(0, low), (50, low / 2), (100, 0)]]


def test_every_color_of_a_chart_is_one_variable_of_its_page(tmp_path):
    write_report(tmp_path, RUN)
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    styles, drawn = source.split("</style>")
    used = set(re.findall(r"var\(--(\w+)\)", drawn))
    assert {"d1", "d2", "grey"} <= used
    assert all(styles.count(f"--{name}:#") == 2 for name in used)  # in light and in dark


# The model card


def numbers(text: str) -> set[str]:
    return {found.rstrip(".,") for found in re.findall(r"(?<![\w/.-])\d[\d.,]*", text)}


def body(card: str) -> str:
    """Return the text of the card without its front matter and its code."""
    return re.sub(r"```.*?```|^    .*?$", "", card.split("---\n", 2)[2], flags=re.DOTALL | re.MULTILINE)


def test_card_is_one_that_the_hub_can_read():
    data, tags = (
        ModelCard(model_card(METRICS, HEAD, None)).data.to_dict(),
        ["speculative-decoding", "draft-head", "eagle3"],
    )
    facts = {"base_model": "org/target", "license": "apache-2.0", "tags": tags}
    assert data == facts | {"library_name": "foredraft", "pipeline_tag": "text-generation"}
    unlicensed = {**HEAD, "license": None, "target": '/home/somebody/target: "x"'}
    data = ModelCard(model_card(METRICS, unlicensed, None)).data.to_dict()
    assert "license" not in data and "base_model" not in data  # the Hub refuses a base model that is not a Hub id


def test_card_has_the_measured_numbers_and_no_others():
    shares = {"87.1", "74.2", "61.3"}
    step = {"4.1", "7.8", "0.4", "0.3", "0.9"}
    measured = {"4.54", "2.97", "4.87", "2.26", "312", "138", "57", "9", "3", "34", "6,543", "2.71", "3.41", "2025"}
    measured |= {"6.1"}
    card = model_card(METRICS, HEAD, {"source": "stdlib", "tokens": 812_345})
    assert numbers(body(card).replace("2.26x", "2.26")) == shares | step | measured | {"812345"}
    assert "python train/run.py seed=0" in card and "cpu, test machine" in card and "bfloat16" in card


def test_card_of_an_unmeasured_head_claims_nothing():
    card = body(model_card({}, {"kind": "eagle3", "target": "org/target"}, None))
    assert numbers(card) == set()
    assert "on every prompt" not in card and card.count("was not measured") == 2
    assert "not recorded" in card and "Nothing was measured" in card


def test_card_survives_what_markdown_would_read_as_a_table(tmp_path):
    card = model_card({**METRICS, "device": "a | b\nc"}, HEAD, {"x|y": "1\n2"})
    assert "| device | a \\| b c |" in card and "| x\\|y | 1 2 |" in card


def test_code_in_the_card_is_python():
    (code,) = re.findall(r"```python\n(.*?)```", model_card({}, {**HEAD, "target": 'a"\\b'}, None), re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert [node.value for node in calls].count('a"\\b') == 1
    assert "FOREDRAFT_HEADS" not in model_card({}, HEAD, None)


def test_the_card_of_a_head_from_a_module_of_the_user_imports_it():
    card = model_card({}, {**HEAD, "module": "users_head"}, None)
    assert "```python\nimport users_head\nfrom foredraft import" in card and "need `FOREDRAFT_HEADS=users_head`" in card
