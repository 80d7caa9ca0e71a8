"""Checks as table rows, GitHub annotations and JUnit XML.

Names are written as one line without control and direction characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from classwise.reporting.formatting import plain, printable
from classwise.reporting.gate import Check

COLUMNS = ["what", "measured [95%]", "required", "verdict"]


def summary(checks: Sequence[Check]) -> str:
    """Return how many checks passed or failed."""
    failed = sum(not check.passed for check in checks)
    return f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"


def rows(checks: Sequence[Check]) -> list[list[str]]:
    """Return a table row per check, under ``COLUMNS``."""
    return [
        [plain(check.what), plain(check.measured), check.wanted, "ok" if check.passed else "FAILED"] for check in checks
    ]


def workflow_commands(checks: Sequence[Check]) -> list[str]:
    """Return workflow commands of GitHub Actions: an error per failed check, then a summary."""
    failed = [
        f"::error title={_property(f'classwise: {plain(check.what)}')}::{_data(plain(check.text))}"
        for check in checks
        if not check.passed
    ]
    return [*failed, f"::notice title=classwise::{_data(summary(checks))}"]


def junit(checks: Sequence[Check]) -> str:
    """Return a JUnit report with a test case per check."""
    counts = {"tests": str(len(checks)), "failures": str(sum(not check.passed for check in checks))}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "classwise check", **counts, "errors": "0"})
    for check in checks:
        case = ElementTree.SubElement(suite, "testcase", classname="classwise.check", name=_xml(check.what))
        if not check.passed:
            message = f"{check.measured} (required: {check.wanted})"
            failure = ElementTree.SubElement(case, "failure", type="check", message=_xml(message))
            failure.text = _xml(check.text)
    ElementTree.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(suites, encoding="unicode")}\n'


def _xml(text: str) -> str:
    return printable(plain(text))


def _data(text: str) -> str:
    """Escape the message of a workflow command.

    >>> _data("5% done")
    '5%25 done'
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape a property of a workflow command, in which two more characters are special.

    >>> _property("pgd: a, b")
    'pgd%3A a%2C b'
    """
    return _data(text).replace(":", "%3A").replace(",", "%2C")
