"""The documentation names things that exist, and its examples are valid."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import pagebus
from pagebus.actors.commands.cli import COMMANDS, build_parser
from pagebus.actors.settings import flag_of
from pagebus.actors.settings.sources import field_types, from_file
from pagebus.bus import messages
from pagebus.kernels.linear.shapes import LinearKernel
from pagebus.kernels.moe.launch.shapes import ExpertsKernel
from pagebus.web.access.auth import OPERATOR_ROUTES
from pagebus.web.app import ROUTES

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("**/*.md"))
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every code block in a language."""
    return [(page, body) for page, text in TEXTS.items() for lang, body in FENCE.findall(text) if lang == language]


def shell_lines() -> list[list[str]]:
    """Words of every command line in the documentation, without comments and variable assignments."""
    lines = [line for _, body in blocks("sh") for line in body.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [[word for word in line if not re.match(r"^[A-Z_]+=", word)] for line in words if line]


command_line = cache(build_parser)


@pytest.mark.parametrize("line", [line for line in shell_lines() if line[0] == "pagebus"], ids=" ".join)
def test_pagebus_commands_parse(line: list[str]) -> None:
    """Every pagebus command in the documentation is understood by the real one."""
    command_line().parse_args(line[1:])


def test_all_commands_are_listed() -> None:
    """docs/cli.md has a row for every command of `pagebus`, and no other."""
    table = TEXTS["docs/cli.md"].partition("| command |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.M)

    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == set(COMMANDS)


@pytest.mark.parametrize("line", [line for line in shell_lines() if line[0] == "make"], ids=" ".join)
def test_make_targets_exist(line: list[str]) -> None:
    """Every make target in the documentation is in the Makefile, with a description."""
    assert re.search(rf"^{line[1]}:.* ## \w", (ROOT / "Makefile").read_text(), re.M)


def test_the_two_commands_are_documented() -> None:
    """A newcomer finds `make serve` and `make test` in the README."""
    assert {("make", "serve"), ("make", "test")} <= {tuple(line) for line in shell_lines()}


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every option of a command and of those below it."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from flags_of(command)


@pytest.mark.parametrize("page", TEXTS)
def test_flags_exist(page: str) -> None:
    """Every --flag in running text is an option of ours, or belongs to another program named here."""
    prose = FENCE.sub("", TEXTS[page])
    others = {"--build-context", "--scale", "--profile", "--strict", "--shapes"}
    known = {flag_of(name) for name in field_types()} | others | set(flags_of(command_line()))
    known |= {"--no-" + flag_of(name)[2:] for name, (kind, _) in field_types().items() if kind is bool}
    found = set(re.findall(r"`(?:pagebus serve )?(--[a-z][a-z0-9-]+)", prose))
    assert found - known == set()


@pytest.mark.parametrize("page", TEXTS)
def test_variables_exist(page: str) -> None:
    """Every PAGEBUS_ variable is a setting."""
    found = set(re.findall(r"PAGEBUS_([A-Z_]+[A-Z])", TEXTS[page]))
    assert {name.lower() for name in found if not name.startswith("TEST_")} - set(field_types()) == set()


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    """Relative links point to files of the repository."""
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", TEXTS[page])
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


def test_paths_in_the_architecture_exist() -> None:
    """Folders and files named on the architecture page are there."""
    found = re.findall(r"`((?:bus|kernels|actors|web|tests)/[\w/.]*)`", TEXTS["docs/architecture.md"])
    assert found
    assert [path for path in found if not (ROOT / path).exists()] == []


def test_messages_on_the_architecture_page_exist() -> None:
    """Each message that the life of a request names is a message."""
    life = TEXTS["docs/architecture.md"].partition("## The life of a request")[2].partition("\n## ")[0]
    found = set(re.findall(r"`([A-Z]\w+)`", life))
    assert {"GenerateRequest", "StepPlan", "ReplyBatch"} <= found
    assert [name for name in found if not hasattr(messages, name)] == []


@pytest.mark.parametrize(("page", "body"), blocks("python"))
def test_python_examples_compile(page: str, body: str) -> None:
    """Python in the documentation is valid, and imports what exists."""
    tree = ast.parse(body)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = __import__(str(node.module), fromlist=[alias.name for alias in node.names])
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize(("page", "body"), blocks("toml"))
def test_toml_examples_are_settings(page: str, body: str, tmp_path: Path) -> None:
    """Configuration files in the documentation are accepted."""
    file = tmp_path / "example.toml"
    file.write_text(body)
    assert set(from_file(str(file))) == set(tomllib.loads(body))


def test_metrics_of_our_own_are_documented() -> None:
    """Every metric that begins with `pagebus:` has a row in docs/observability.md, and every such row a metric."""
    rows = [line for line in TEXTS["docs/observability.md"].splitlines() if line.startswith("| `pagebus:")]
    told = {name for row in rows for name in re.findall(r"`(pagebus:\w+?)(?:_total|_bucket)?`", row)}
    sources = [file.read_text() for package in ("actors", "web") for file in (ROOT / package).rglob("*.py")]

    assert told == {name for text in sources for name in re.findall(r'"(pagebus:\w+?)(?:_total)?"', text)}


def test_routes_of_operators_are_documented() -> None:
    """docs/security.md names every route that needs an operator's key: those of the page and of support as a whole."""
    keys = TEXTS["docs/security.md"].partition("\n## Keys\n")[2].partition("\n## ")[0]
    told = set(re.findall(r"`(/[\w/]+)`", keys))

    paths = {route.path for route in ROUTES if route.name in OPERATOR_ROUTES}
    assert {path for path in paths if path not in told and not path.startswith(("/api/", "/debug/"))} == set()
    assert {"/api", "/debug"} < told


def test_kernels_that_explain_names_are_described() -> None:
    """Every kernel that `pagebus explain` may print for a product has a row in docs/explain.md, and no other has."""
    table = TEXTS["docs/explain.md"].partition("| kernel |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.M)

    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*LinearKernel, *ExpertsKernel}


def test_tests_named_in_the_documentation_exist() -> None:
    """A case that a page says is tested is: by a function of that name, or by that file."""
    sources = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    functions = {name for source in sources for name in re.findall(r"def (test_\w+)\(", source)}
    named = {name for text in TEXTS.values() for name in re.findall(r"`(test_\w+)`", text)}
    files = {name for text in TEXTS.values() for name in re.findall(r"`(tests/\S+\.py)`", text)}

    assert named - functions == set()
    assert {name for name in files if not (ROOT / name).exists()} == set()
    assert named


SCRIPTS = sorted({name for text in TEXTS.values() for name in re.findall(r"python3? -m (tests(?:\.\w+)+)", text)})


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_named_in_the_documentation_find_what_they_import(script: str) -> None:
    """A script that a page says prints its figures is there, and what it takes from Pagebus is, too."""
    path = ROOT / script.replace(".", "/")
    tree = ast.parse((path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    wanted = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in wanted if str(node.module).startswith("pagebus.")]
    names = [(str(node.module), alias.name) for node in ours for alias in node.names]

    assert [name for module, name in names if not hasattr(__import__(module, fromlist=[name]), name)] == []


def test_the_readmes_figures_are_those_that_were_measured() -> None:
    """Each figure of its table is, rounded, one of the tables of docs/performance.md or docs/models.md."""
    numbers = re.compile(r"\d+(?: \d{3})*(?:\.\d+)?")
    tables = TEXTS["docs/performance.md"].partition("<!-- tables -->")[2].partition("<!-- end of tables -->")[0]
    tables += TEXTS["docs/models.md"].partition("## How fast they are")[2].partition("## What is refused")[0]
    measured = {float(each.replace(" ", "")) for each in numbers.findall(tables)}
    table = TEXTS["README.md"].partition("## Measured")[2].partition("## More")[0]
    rows = re.findall(r"^\| (?:Llama|Qwen|vLLM)[^|]*\|(.*)$", table, re.M)
    told = [each.replace(" ", "") for row in rows for each in numbers.findall(row)]
    assert len(told) == 6 * 5
    unknown = [each for each in told if float(each) not in {round(m, len(each.partition(".")[2])) for m in measured}]
    assert unknown == []


@pytest.fixture(scope="module")
def pages_read(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Sphinx keeps the pages that it has read: the second builder need not read them again."""
    return tmp_path_factory.mktemp("pages")


def sphinx(builder: str, into: Path, pages_read: Path) -> str:
    """What Sphinx has to complain about."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", builder, "-d", str(pages_read)]
    return subprocess.run([*command, str(ROOT / "docs"), str(into)], capture_output=True, text=True, check=False).stderr


def test_the_site_builds(tmp_path: Path, pages_read: Path) -> None:
    """Sphinx builds the site without a warning: no link is broken, no page is left out of the map."""
    assert sphinx("html", tmp_path, pages_read) == ""
    assert (tmp_path / "searchindex.js").exists()


def test_public_names_are_described(tmp_path: Path, pages_read: Path) -> None:
    """The site describes every public name of the modules behind `LLM`, and each has a docstring."""
    assert sphinx("coverage", tmp_path, pages_read) == ""
    documented = (ROOT / "docs/api.md").read_text()
    assert {module for module in pagebus._MODULES.values() if f"automodule:: {module}\n" not in documented} == set()
