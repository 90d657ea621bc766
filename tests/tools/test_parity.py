"""The parity table: what is written for given results, and which runs are held against it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.parity import (
    MODES,
    ROWS,
    Record,
    read,
    render,
    row,
    with_skipped_from,
)

pytest_plugins = ["pytester"]

CONFTEST = """
from tests.support.parity_plugin import ParityPlugin
from tests.support.variants import leave_out

def pytest_addoption(parser):
    parser.addoption("--write-parity", action="store_true")
    parser.addoption("--thorough", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "row")
    config.addinivalue_line("markers", "thorough")
    config.pluginmanager.register(ParityPlugin(config))

def pytest_collection_modifyitems(config, items):
    leave_out(config, items)
"""
TESTS = """
import os
import pytest
from tests.support.parity import row

@row("training", "uneven shards")
@pytest.mark.parametrize("mode", ["eager", "regional", "full", "regions"])
def test_many(mode):
    assert os.environ.get("BREAK") != mode

@row("meshes", mode="full")
def test_one():
    if "SKIP" in os.environ:
        pytest.skip("cannot run here")

def test_unmarked():
    pass
"""
OTHER = """
import os
import pytest
from tests.support.parity import row

if "SKIP" in os.environ:
    pytest.skip("nothing here can run", allow_module_level=True)

@row("switching", mode=("eager", "full"))
def test_other():
    pass
"""

VARIED = """
import pytest
from tests.support.parity import row
from tests.support.variants import thorough

@row("copies")
@pytest.mark.parametrize("mode", ["eager", "full"])
@pytest.mark.parametrize("name", ["a", "b"])
@thorough(when=lambda name, mode: mode == "full" and name == "b")
def test_varied(mode, name):
    pass

@thorough()
def test_another():
    pass
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider")
    folder = pytester.mkdir("tests")
    for name, text in {"conftest.py": CONFTEST, "test_it.py": TESTS, "test_other.py": OTHER}.items():
        (folder / name).write_text(text)
    pytester.makeini("[pytest]\ntestpaths = tests\n")
    return Suite(pytester, folder / "PARITY.md")


@dataclass
class Suite:
    pytester: pytest.Pytester
    table: Path

    def run(self, *args: str, **variables: str) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            result = self.pytester.runpytest_inprocess(*args)
        return result.ret, str(result.stdout) + str(result.stderr)


def test_a_whole_run_is_held_against_the_committed_table(suite):
    code, out = suite.run()
    assert code == 1
    assert "tests/PARITY.md is stale: there is none; run `python -m pytest --write-parity`" in out
    code, out = suite.run("--write-parity")
    assert code == 0, out
    text = suite.table.read_text()
    assert "\n| training | 1 passed | 1 passed | 1 passed | 1 passed |\n" in text
    assert "\n| meshes | none | 1 passed | none | none |\n" in text
    assert "\n| tensor parallel | none | none | none | - |\n" in text
    assert "\n- full, passed: `tests/test_it.py::test_many[full]`\n" in text
    assert "unmarked" not in text
    for args in ((), ("tests",), (".",)):
        assert suite.run(*args)[0] == 0
    suite.table.write_text(text.replace("test_one", "test_gone"))
    code, out = suite.run()
    assert code == 1
    assert "1 results are new, 1 are gone, such as meshes, full, passed: tests/test_it.py::test_gone" in out


def test_processes_that_run_a_part_each_give_one_table(suite):
    suite.run("--write-parity")
    text = suite.table.read_text()
    both = ("-p", "xdist", "-n", "2")
    suite.table.unlink()
    assert suite.run(*both, "--write-parity")[0] == 0
    assert suite.table.read_text() == text
    assert suite.run(*both, SKIP="1")[0] == 0
    suite.table.write_text(text.replace("test_one", "test_gone"))
    code, out = suite.run(*both)
    assert (code, "1 results are new, 1 are gone" in out) == (1, True)


@pytest.mark.parametrize(
    "args", [("-k", "many"), ("tests/test_it.py",), ("--ignore", "tests/test_other.py"), ("--collect-only",)]
)
def test_a_part_of_the_suite_neither_compares_nor_writes(suite, args):
    suite.table.write_text("stale")
    code, out = suite.run(*args)
    assert (code, "parity" in out) == (0, False)
    code, out = suite.run(*args, "--write-parity")
    assert code == 1
    assert "PARITY.md was not written: that takes a finished run of the whole suite" in out
    assert suite.table.read_text() == "stale"


def test_failures_are_written_but_not_called_stale(suite):
    suite.run("--write-parity")
    code, out = suite.run(BREAK="eager")
    assert (code, "is stale" in out) == (1, False)
    assert suite.run("--write-parity", BREAK="eager")[0] == 1
    assert "| training | none, 1 failed | 1 passed | 1 passed | 1 passed |" in suite.table.read_text()
    assert "2 results are new, 2 are gone" in suite.run()[1]


def test_an_interrupted_run_says_nothing(suite):
    (suite.table.parent / "test_broken.py").write_text("import no_such_module")
    code, out = suite.run("--continue-on-collection-errors")
    assert (code, "is stale" in out) == (1, False)
    (suite.table.parent / "test_broken.py").unlink()
    assert "is stale" not in suite.run("-x", BREAK="eager")[1]


def test_what_cannot_run_here_keeps_its_result(suite):
    suite.run("--write-parity")
    text = suite.table.read_text()
    code, out = suite.run(SKIP="1")
    assert code == 0, out
    suite.run("--write-parity", SKIP="1")
    assert suite.table.read_text() == text
    suite.table.unlink()
    suite.run("--write-parity", SKIP="1")
    assert "| meshes | none | none, 1 skipped | none | none |" in suite.table.read_text()


def test_a_marked_test_needs_a_mode(suite):
    (suite.table.parent / "test_other.py").write_text(
        "from tests.support.parity import row\n\n@row('meshes')\ndef test_no_mode(): pass\n"
    )
    code, out = suite.run()
    assert code != 0
    assert "test_no_mode: expected a parameter 'mode', found none; use row(..., mode=...)" in out


def test_unknown_rows_and_modes_are_refused():
    for arguments in ((), ("sharding",)):
        with pytest.raises(ValueError, match="row: expected names out of .*'accumulation'"):
            row(*arguments)
    with pytest.raises(
        ValueError, match=r"row: expected modes out of \['eager', 'full', 'regions', 'regional'\], got \('half',"
    ):
        row("meshes", mode="half")


def test_the_text_is_the_same_for_the_same_results_and_can_be_read_back():
    records = [
        Record(feature.name, mode, f"tests/test_x.py::test_{n}[a-{mode}]", result)
        for feature in ROWS
        for mode in MODES
        for n, result in enumerate(("passed", "failed", "skipped", "passed"))
    ]
    text = render(records)
    assert render(reversed(records)) == text == render(records + records)
    assert read(text) == set(records)
    assert "| meshes | 2 passed, 1 failed, 1 skipped | 2 passed, 1 failed, 1 skipped |" in text
    assert all(f"\n| {feature.name} | none | none | " in render([]) for feature in ROWS)


def test_a_skipped_result_that_nobody_knows_stays_skipped():
    known, skipped = Record("meshes", "full", "a.py::x", "passed"), Record("meshes", "full", "a.py::x", "skipped")
    other = Record("meshes", "full", "b.py::y", "skipped")
    assert with_skipped_from([skipped, other], [known], []) == {known, other}
    assert with_skipped_from([], [known], ["a.py"]) == {known}
    assert with_skipped_from([], [known], []) == set()


def test_variants_run_where_asked_for_and_are_not_in_the_table(suite):
    (suite.table.parent / "test_varied.py").write_text(VARIED)
    assert suite.run("--write-parity")[0] == 0
    rows = [line for line in suite.table.read_text().splitlines() if "test_varied.py" in line]
    assert [row.split("::")[1] for row in rows] == [
        "test_varied[a-eager]`",
        "test_varied[b-eager]`",
        "test_varied[a-full]`",
    ]
    for args, passed in (((), 10), (("--thorough",), 12), (("tests/test_varied.py",), 5)):
        code, out = suite.run(*args)
        assert (code, f"{passed} passed" in out) == (0, True), out
