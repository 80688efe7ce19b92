"""Imports run one way, and modules and functions stay of a size that can be read."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "genpipe"
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

NOT_IN_CORE = {
    "asyncio", "concurrent", "logging", "multiprocessing", "os", "pathlib", "random", "selectors", "socket",
    "subprocess", "threading", "time",
}  # fmt: skip
"""Parts of the standard library that would bring a clock, chance, or the world into the core."""

MAY_IMPORT = {
    "core": {"core"},
    "edges": {"core", "edges"},
    "driver.py": {"core"},
    "ui": {"core", "ui"},
    "sim": {"core", "sim"},
}
"""Of genpipe itself; what is not named here (cli, compose, config, status) puts the parts together."""

LINES_MAX, FUNCTION_LINES_MAX = 400, 60


def tree_of(module):
    return ast.parse((ROOT / module).read_text(encoding="utf-8"))


def imports(module):
    """Full names of what a module imports, wherever in it."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            if node.module == "genpipe":
                yield from (f"genpipe.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def room_of(module):
    return module.split("/")[0]


def rooms_that(module):
    """The parts of genpipe that a module imports; ``genpipe`` itself holds the version alone."""
    names = [name.split(".") for name in imports(module)]
    return {
        name[1] if len(name) > 1 and (ROOT / name[1]).is_dir() else f"{name[1]}.py"
        for name in names
        if name[0] == "genpipe" and len(name) > 1 and name[1] != "__version__"
    }


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) in MAY_IMPORT])
def test_imports_run_one_way(module):
    assert rooms_that(module) <= MAY_IMPORT[room_of(module)]


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) == "core"])
def test_the_core_needs_the_standard_library_alone_and_no_clock_no_chance_and_no_world(module):
    tops = {name.split(".")[0] for name in imports(module)} - {"genpipe"}

    assert tops <= sys.stdlib_module_names
    assert not tops & NOT_IN_CORE


@pytest.mark.parametrize(
    "module", [module for module in MODULES if room_of(module) in ("driver.py", "edges", "ui")]
)
def test_what_runs_a_job_does_not_know_the_simulator(module):
    assert "sim" not in rooms_that(module)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_can_be_read_in_one_go(module):
    lines = len((ROOT / module).read_text(encoding="utf-8").splitlines())

    assert lines <= LINES_MAX


def length_of(function):
    """Lines of what a function does: its arguments and its docstring left out."""
    begin = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
    return function.end_lineno - begin.lineno + 1


@pytest.mark.parametrize("module", MODULES)
def test_functions_are_short(module):
    functions = [
        node for node in ast.walk(tree_of(module)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {node.name: length_of(node) for node in functions if length_of(node) > FUNCTION_LINES_MAX}

    assert long == {}


def test_this_test_sees_imports():
    assert rooms_that("driver.py") == {"core"}
    assert {"core", "edges", "config.py"} <= rooms_that("compose.py")


def test_who_has_no_s3_pays_nothing_for_it():
    modules = "genpipe.cli, genpipe.compose, genpipe.folder_commands, genpipe.inputs, genpipe.status"
    look = (
        f"import sys, {modules}; print([n for n in ('boto3', 'zstandard', 'tenacity') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60)

    assert (done.stdout.strip(), done.stderr) == ("[]", "")
