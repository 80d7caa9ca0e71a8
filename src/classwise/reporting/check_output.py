"""The outcome of checks for other programs: cells of a table, annotations of GitHub, and JUnit's XML.

Names in a check come from outside. Each format gets them as one line without control and direction characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from classwise.reporting.formatting import plain
from classwise.reporting.gate import Check

COLUMNS = ["what", "measured [95%]", "wanted", "verdict"]
_NO_XML = re.compile("[\ufffe\uffff]")
"""What XML 1.0 forbids beyond control characters and surrogates."""


def summary(checks: Sequence[Check]) -> str:
    """How many hold, in words."""
    failed = sum(not check.passed for check in checks)
    return f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"


def rows(checks: Sequence[Check]) -> list[list[str]]:
    """The cells of a table, one row a check, under ``COLUMNS``."""
    return [
        [plain(check.what), plain(check.measured), check.wanted, "ok" if check.passed else "FAILED"] for check in checks
    ]


def workflow_commands(checks: Sequence[Check]) -> list[str]:
    """Workflow commands of GitHub Actions: an error for each failed check, then a notice that counts them."""
    failed = [
        f"::error title={_property(f'classwise: {plain(check.what)}')}::{_data(plain(check.text))}"
        for check in checks
        if not check.passed
    ]
    return [*failed, f"::notice title=classwise::{_data(summary(checks))}"]


def junit(checks: Sequence[Check]) -> str:
    """A JUnit report: one test case a check, under the name of what was measured."""
    counts = {"tests": str(len(checks)), "failures": str(sum(not check.passed for check in checks))}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "classwise check", **counts, "errors": "0"})
    for check in checks:
        case = ElementTree.SubElement(suite, "testcase", classname="classwise.check", name=_xml(check.what))
        if not check.passed:
            told = f"{check.measured} (wanted: {check.wanted})"
            failure = ElementTree.SubElement(case, "failure", type="check", message=_xml(told))
            failure.text = _xml(check.text)
    ElementTree.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(suites, encoding="unicode")}\n'


def _xml(text: str) -> str:
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", plain(text))


def _data(text: str) -> str:
    """The message of a workflow command, escaped as the runner undoes it.

    >>> _data("5% done")
    '5%25 done'
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """A value in the head of a workflow command, where two more signs have a meaning.

    >>> _property("pgd: a, b")
    'pgd%3A a%2C b'
    """
    return _data(text).replace(":", "%3A").replace(",", "%2C")
