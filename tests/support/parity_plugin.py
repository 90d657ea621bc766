"""Collects which features the tests showed to work, and holds ``tests/PARITY.md`` against that.

Only a run of the whole suite compares, or writes with ``--write-parity``; any other says nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from .parity import Record, read, render, with_skipped_from
from .variants import asks_for_everything, is_variant

ROWS = "parity"  # the property of a test's report that has its rows
RENEW = "run `python -m pytest --write-parity` and commit the file"


class ParityPlugin:
    """One session's results.

    Args:
        config: of the session.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._path = config.rootpath / "tests" / "PARITY.md"
        self._rows: dict[str, list[tuple[str, str]]] = {}  # of each marked test: (row, mode)
        self._results: dict[str, str] = {}  # of every test
        self._left_out: set[str] = set()  # files skipped as a whole
        self._whole = asks_for_everything(config)
        self._expected = 0
        self._message = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._whole &= not report.failed
        if report.skipped:
            self._left_out.add(report.nodeid)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._whole &= not items

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        rows = [] if is_variant(item) else rows_of(item)
        item.user_properties.append((ROWS, rows))  # which go with the reports, also from xdist's processes

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expected = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._expected = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._results.get(report.nodeid, "passed")
        self._results[report.nodeid] = max(before, report.outcome, key=["passed", "skipped", "failed"].index)
        self._rows[report.nodeid] = [(name, mode) for name, mode in dict(report.user_properties).get(ROWS, ())]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workerinput"):
            return  # one of xdist's processes, which has run a part
        writes = self._config.getoption("write_parity")
        if not self._whole or not self._expected or len(self._results) < self._expected:
            if writes:
                self._fail(session, "PARITY.md was not written: that takes a finished run of the whole suite")
            return
        committed = self._path.read_text() if self._path.exists() else ""
        text = render(with_skipped_from(self._records(), read(committed), self._left_out))
        if writes:
            self._path.write_text(text)
            self._message = f"{self._path} written"
        elif text != committed and "failed" not in self._results.values():
            self._fail(session, f"tests/PARITY.md is stale: {difference(committed, text)}; {RENEW}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._message:
            terminalreporter.section("parity")
            terminalreporter.write_line(self._message)

    def _records(self) -> list[Record]:
        return [
            Record(name, mode, test, self._results[test]) for test, rows in self._rows.items() for name, mode in rows
        ]

    def _fail(self, session: pytest.Session, message: str) -> None:
        self._message = message
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def rows_of(item: pytest.Item) -> list[tuple[str, str]]:
    """Return (row, mode) of everything a test shows.

    Raises:
        pytest.UsageError: its mode is neither marked nor a parameter.
    """
    found = []
    for mark in item.iter_markers("row"):
        callspec = getattr(item, "callspec", None)
        modes = mark.kwargs["mode"] or (callspec and "mode" in callspec.params and (callspec.params["mode"],))
        if not modes:
            raise pytest.UsageError(f"{item.nodeid}: expected a parameter 'mode', found none; use row(..., mode=...)")
        found += [(name, mode) for name in mark.args for mode in modes]
    return found


def difference(committed: str, text: str) -> str:
    """Say what changed, shortly."""
    if not committed:
        return "there is none"
    before, after = read(committed), read(text)
    if before == after:
        return "its text changed"
    some = [f"{r.row}, {r.mode}, {r.result}: {r.test}" for r in sorted(before ^ after)[:3]]
    return f"{len(after - before)} results are new, {len(before - after)} are gone, such as {'; '.join(some)}"
