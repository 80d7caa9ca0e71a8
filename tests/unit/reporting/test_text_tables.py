"""Reports and comparisons as Markdown, LaTeX, CSV and parquet: the numbers of report.json, whatever the names are."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from classwise.cli import app
from classwise.core.errors import InputError
from classwise.reporting import ClassReport, Comparison, compare
from classwise.reporting.formatting import plain
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.reporting.text import save
from classwise.storage.verdicts import Verdicts
from each import for_each

HOSTILE = [
    "=1+1",
    "'quoted",
    "-2+3",
    "@SUM(A1)",
    "＝1+1",
    "a|b\\|c\\",
    "`code` **bold** _it_ ~~gone~~ $x$",
    "<script>alert(1)</script>&amp;<!--",
    "[click](javascript:1) ![x](http://x.y/z.png) www.evil.com me@evil.com",
    "\\input{/etc/passwd} 100% & #1 _a_ {b} ~c ^d $e$",
    "[1ex] *",
    "* a -- b --- c '' `` \" < >",
    "two\nlines\r\nand\u2028more\ttabs",
    "\x1b[31mred\x00\x07\x9b",
    "\u202egnitteksab\u2066\u200b",
    'a "quoted", comma; semicolon',
    "é ü ß Ωμέγα 猫 🐱 שלום",
    "# heading",
    "",
    "x" * 300,
]


def make_report(classes: list[str], *, model: str = "net", seed: int = 0, each: int = 4, empty: int = 0) -> ClassReport:
    """A report of random verdicts under two attacks; the last ``empty`` classes have no examples."""
    random = np.random.default_rng(seed)
    label = np.repeat(np.arange(len(classes) - empty), each)

    def predictions(share: float) -> np.ndarray:
        return np.where(random.random(len(label)) < share, label, random.integers(len(classes), size=len(label)))

    verdicts = Verdicts(
        index=np.arange(len(label)),
        label=label,
        natural=predictions(0.9),
        attacks={"pgd": predictions(0.5), "pgd:steps=2,step_size=0.1": predictions(0.4)},
    )
    return ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(name="some", split="test", n=len(label), classes=classes),
        model={"name": model},
        threat=ThreatInfo(norm="Linf", eps=0.03, eps_text="8/255"),
        attacks={},
    )


def make_comparison(classes: list[str], models: tuple[str, str] = ("a", "b")) -> Comparison:
    return compare(make_report(classes), make_report(classes, seed=1), names=list(models))


class _Cells(HTMLParser):
    """The text of every cell, and every tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[tuple[str, ...]] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add((tag, *(f"{name}={value}" for name, value in attributes)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.replace("\n", "")


def read_markdown(text: str) -> list[list[str]]:
    """The cells as rendered by another library, if it finds only a paragraph and a table."""
    parser = _Cells()
    parser.feed(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text))
    parser.close()
    aligned = {(tag, f"style=text-align:{side}") for tag in ("th", "td") for side in ("left", "right")}
    assert parser.tags <= {("p",), ("table",), ("thead",), ("tbody",), ("tr",), ("strong",)} | aligned
    return parser.rows


LATEX_SIGNS = {
    r"\textbackslash{}": "\\",
    r"\textasciitilde{}": "~",
    r"\textasciicircum{}": "^",
    r"\textasciigrave{}": "`",
    r"\textless{}": "<",
    r"\textgreater{}": ">",
    r"\textbar{}": "|",
    r"\textendash{}": "–",
    r"\textemdash{}": "—",
    r"\symbol{34}": '"',
    "$-$": "−",
    "-{}": "-",
    **{f"\\{sign}": sign for sign in "&%$#_{}"},
    **{f"{{{sign}}}": sign for sign in "[]*'"},
}
LATEX_TOKENS = re.compile("|".join(map(re.escape, LATEX_SIGNS)))


def read_latex(text: str) -> list[list[str]]:
    """The cells as parsed by TeX: every command is known and every brace is closed."""
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    begin = re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", lines[0])
    assert begin
    assert (lines[1], lines[-2:]) == (r"\toprule", [r"\bottomrule", r"\end{tabular}"])
    rows = []
    for line in lines[2:-2]:
        if line == r"\midrule":
            continue
        assert line.endswith(r" \\")
        cells, rest = [""], re.sub(r"\\textbf\{([\d.]+)\}", r"\1", line.removesuffix(r" \\"))
        while rest:
            if rest.startswith(" & "):
                cells.append("")
                rest = rest[3:]
            elif token := LATEX_TOKENS.match(rest):
                cells[-1] += LATEX_SIGNS[token.group()]
                rest = rest[token.end() :]
            else:
                assert rest[0] not in "\\&%$#_{}~^[]*'`<>|\"", rest
                assert not rest.startswith("--")
                cells[-1] += rest[0]
                rest = rest[1:]
        assert len(cells) == len(begin.group(1))
        rows.append(cells)
    return rows


def read_csv(text: str) -> list[dict[str, str]]:
    """The rows, with names decoded as documented."""
    found = list(csv.DictReader(io.StringIO(text, newline="")))
    return [row | {name: row[name].removeprefix("'") for name in ("model", "result", "class")} for row in found]


def shown(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def expected_report(report: ClassReport) -> list[list[str]]:
    found = json.loads(report.model_dump_json(by_alias=True))["results"]
    results = list(found.values())
    return [
        ["class", *map(plain, found)],
        *(
            [plain(name), *(shown(result["by_class"][label]["value"]) for result in results)]
            for label, name in enumerate(report.dataset.classes)
        ),
        ["average", *(shown(result["overall"]["value"]) for result in results)],
        ["worst", *(shown(result["worst"]["value"]) for result in results)],
        ["CV", *(shown(result["cv"]) for result in results)],
        ["MCD", *(shown(result["mcd"]) for result in results)],
    ]


def expected_comparison(comparison: Comparison) -> list[list[str]]:
    lines = [["result", "model", "average", "worst class", "worst", "CV", "MCD", "rho"]]
    for key in comparison.results:
        for place, row in enumerate(comparison.table(key)):
            numbers = [shown(row["average"]), plain(row["worst class"]), shown(row["worst"])]
            numbers += [shown(row["cv"]), shown(row["mcd"]), shown(row["rho"], 3)]
            lines.append([key if place == 0 else "", plain(row["model"]), *numbers])
    return lines


@pytest.mark.parametrize("count", [2, 10, 1000])
def test_the_numbers_are_those_of_the_report(count: int, tmp_path: Path) -> None:
    report = make_report([f"class {label}" for label in range(count)], each=2, empty=int(count > 2))
    expected = expected_report(report)
    assert read_markdown(report.table(format="markdown")) == expected
    assert read_latex(report.table(format="latex")) == expected

    long = [
        ("net", key, part.get("class"), part.get("label"), part["value"], part["low"], part["high"], part["n"])
        for key, result in json.loads(report.model_dump_json(by_alias=True))["results"].items()
        for part in [*result["by_class"], result["overall"]]
    ]
    assert [tuple(row.values()) for row in report.table()] == long
    read = pyarrow.csv.read_csv(
        io.BytesIO(report.table(format="csv").encode()),
        convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True),
    )
    assert [tuple(row.values()) for row in read.to_pylist()] == long
    save(report, "parquet", tmp_path / "table.parquet")
    table = pq.read_table(tmp_path / "table.parquet")
    assert [tuple(row.values()) for row in table.to_pylist()] == long
    assert table.schema.field("label").type == pa.int64()
    assert [path.name for path in tmp_path.iterdir()] == ["table.parquet"]


def test_comparisons_have_a_row_for_each_model_and_result() -> None:
    comparison = make_comparison(["ant", "bee", "cat"], ("trades", "wat"))
    expected = expected_comparison(comparison)
    assert len(expected) == 1 + 2 * len(comparison.results)
    assert read_markdown(comparison.table(format="markdown")) == expected
    assert read_latex(comparison.table(format="latex")) == expected
    rows = read_csv(comparison.table(format="csv"))
    assert len(rows) == 2 * len(comparison.results) * 4
    for row in rows:
        part = comparison[row["result"]][["trades", "wat"].index(row["model"])]
        estimate = part.by_class[int(row["label"])] if row["label"] else part.overall
        assert [float(row[name]) for name in ("value", "low", "high", "n")] == [
            estimate.value,
            estimate.low,
            estimate.high,
            estimate.n,
        ]
    one = read_markdown(comparison.table("pgd", format="markdown"))
    assert one[1:] == [line for line in expected if line[0] == "pgd" or line[1:] == one[2][1:]]
    assert {row["result"] for row in read_csv(comparison.table("pgd", format="csv"))} == {"pgd"}


def test_bold_is_the_weakest_class_and_the_strongest_of_the_models() -> None:
    report = make_report(["ant", "bee", "cat"], each=20)
    for line in report.table(format="latex").splitlines():
        name, *cells = line.removesuffix(r" \\").split(" & ")
        bold = [cell.startswith(r"\textbf{") for cell in cells]
        assert bold == [result.worst.name == name for result in report.results.values()][: len(bold)]
    comparison = make_comparison(["ant", "bee", "cat"])
    bold = re.findall(r"\*\*(.*?)\*\*", comparison.table(format="markdown"))
    highest = [max(row.worst.value for row in rows) for rows in comparison.results.values()]
    assert list(dict.fromkeys(bold)) == list(dict.fromkeys(map(shown, highest)))


def test_largest_half_width_of_the_intervals_is_stated() -> None:
    report = make_report(["ant", "bee"], each=50)
    reach = max(
        max(part.value - part.low, part.high - part.value)
        for result in report.results.values()
        for part in [*result.by_class, result.overall]
    )
    said = f"Linf eps = 8/255; 95% intervals within {reach:.1f} points"
    assert report.table(format="markdown").splitlines()[0].endswith(said)
    assert report.table(format="latex").splitlines()[0].endswith(said)


def check_names(classes: list[str], models: tuple[str, str]) -> None:
    report, comparison = make_report(classes, model=models[0], each=2), make_comparison(classes, models)
    for text in (report.table(format="markdown"), report.table(format="latex"), comparison.table(format="latex")):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", text)
    assert read_markdown(report.table(format="markdown")) == expected_report(report)
    assert read_latex(report.table(format="latex")) == expected_report(report)
    assert read_markdown(comparison.table(format="markdown")) == expected_comparison(comparison)
    assert read_latex(comparison.table(format="latex")) == expected_comparison(comparison)
    for subject, names in ((report, models[:1]), (comparison, models)):
        text = subject.table(format="csv")
        assert not re.search(r"(^|,)\"?[=+\-@＝＋－＠]", text, re.MULTILINE)
        rows = read_csv(text)
        assert {row["model"] for row in rows} == {plain(name) for name in names}
        assert [row["class"] for row in rows[: len(classes)]] == [plain(name) for name in classes]
        assert text.count("\n") == len(rows) + 1


@for_each("name", HOSTILE)
def test_hostile_names(name: str) -> None:
    check_names([name, "cat", f"{name} 2"], (name, f"{name} (2)"))


@settings(max_examples=40, deadline=None)
@given(
    names=st.lists(
        st.text(max_size=12) | st.text("\\&%$#_{}~^[]*'`<>|\"-=+@!():/. \n\r\tab", max_size=12), min_size=2, max_size=4
    ),
    models=st.tuples(st.text(max_size=8), st.text("=|\\\n`*_<&", max_size=8)),
)
def test_any_names(names: list[str], models: tuple[str, str]) -> None:
    check_names(names, models)


def test_parquet_keeps_names_as_they_are(tmp_path: Path) -> None:
    save(make_report(HOSTILE), "parquet", tmp_path / "table.parquet")
    names = pq.read_table(tmp_path / "table.parquet")["class"].to_pylist()
    assert names[: len(HOSTILE) + 1] == [*HOSTILE, None]


def test_lone_surrogate_is_replaced() -> None:
    assert plain("a\ud800b") == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not on this machine")
def test_latex_compiles(tmp_path: Path) -> None:
    names = [name.encode("ascii", "ignore").decode() for name in HOSTILE]
    tables = [make_report(names).table(format="latex"), make_comparison(names, ("[a]", "*b")).table(format="latex")]
    body = "\n\n".join(tables)
    (tmp_path / "t.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n" + body + "\n\\end{document}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_unknown_formats_are_one_line() -> None:
    report = make_report(["ant", "bee"])
    with pytest.raises(InputError, match="unknown format 'latx': did you mean 'latex'"):
        report.table(format="latx")
    with pytest.raises(InputError, match="parquet is not a text format"):
        make_comparison(["ant", "bee"]).table(format="parquet")
    with pytest.raises(InputError, match="unknown result 'pdg'"):
        make_comparison(["ant", "bee"]).table("pdg", format="csv")


def test_the_command_prints_or_writes(tmp_path: Path) -> None:
    runs = []
    for seed, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        runs.append(str(tmp_path / name))
        make_report(["ant", "bee"], model=name, seed=seed).to_json(tmp_path / name / "report.json")

    def invoke(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["table", *arguments])
        return result.exit_code, result.stdout, result.stderr

    report, comparison = make_report(["ant", "bee"], model="one"), compare(*runs)
    for format in ("markdown", "latex", "csv"):
        assert invoke(runs[0], "--format", format) == (0, report.table(format=format), "")
        assert invoke(*runs, "--format", format) == (0, comparison.table(format=format), "")
        assert invoke(*runs, "--format", format, "--out", str(tmp_path / "t"))[0] == 0
        assert (tmp_path / "t").read_text(encoding="utf-8") == comparison.table(format=format)
    assert invoke(*runs)[1] == comparison.table(format="markdown")
    assert invoke(*runs, "--format", "parquet", "--out", str(tmp_path / "t"))[0] == 0
    assert pq.read_table(tmp_path / "t").num_rows == 2 * 4 * 3

    before = (tmp_path / "t").read_bytes()
    for arguments, line in [
        ([*runs, "--format", "parquet"], "parquet cannot be printed"),
        ([*runs, "--format", "word", "--out", str(tmp_path / "t")], "unknown format 'word'"),
        ([*runs, "--out", str(tmp_path)], "is a directory"),
        ([str(tmp_path / "nowhere")], "no such run directory"),
    ]:
        code, out, error = invoke(*arguments)
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert line in error
    assert (tmp_path / "t").read_bytes() == before
