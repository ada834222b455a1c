"""Rules that the source files keep: one grep lists all communication, groups of mesh axes have
names, and dimension letters are explained."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

import utils

MODULES = sorted(ROOT.glob("*.py"))
SCRIPTS = sorted(ROOT.glob("scripts/*.py"))

# ---- communication

COMMUNICATION = (
    r"lax\.(psum|psum_scatter|pmax|ppermute|all_gather|all_to_all)\(|multihost_utils\.[a-z_]+\("
)
"""grep -nE with this pattern lists all communication; README and the tour quote it."""
COLLECTIVES = {
    "all_gather", "all_to_all", "pbroadcast", "pmax", "pmean", "pmin", "ppermute", "precv", "psend",
    "pshuffle", "psum", "psum_scatter", "psum_scatter_start", "pswapaxes", "ragged_all_to_all",
}  # fmt: skip
"""The functions of jax.lax, from 0.10 to 0.12, that communicate."""


def communication(tree: ast.AST) -> Counter:
    """{line: how many functions that communicate it names}, called there or not."""
    lines = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module = ast.unparse(node.value).split(".")[-1]
            is_collective = module == "lax" and node.attr in COLLECTIVES
            lines[node.lineno] += is_collective or module == "multihost_utils"
        if isinstance(node, ast.ImportFrom):  # the grep does not find a name without its module
            module = node.module.split(".")[-1]
            is_collective = module == "lax" and any(x.name in COLLECTIVES for x in node.names)
            lines[node.lineno] += is_collective or module == "multihost_utils"
    return +lines


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_one_grep_lists_all_communication_and_nothing_else(path):
    text = path.read_text()
    found = {n: len(re.findall(COMMUNICATION, line)) for n, line in enumerate(text.splitlines(), 1)}
    assert communication(ast.parse(text)) == +Counter(found)


@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_the_docs_quote_the_grep_that_lists_all_communication(page):
    assert f"grep -nE '{COMMUNICATION}' *.py" in (ROOT / page).read_text()


# ---- mesh axes


def axis_tuples(tree: ast.AST) -> list[ast.AST]:
    """Tuples, lists and sets of two or more mesh axes, outside of P(...) and of the definitions of
    AXES, BATCH and STAGE."""
    allowed = set()
    for node in ast.walk(tree):
        is_spec = isinstance(node, ast.Call) and ast.unparse(node.func) in ("P", "PartitionSpec")
        targets = [ast.unparse(x) for x in getattr(node, "targets", [])]
        if is_spec or targets in (["AXES"], ["BATCH"], ["STAGE"]):
            allowed |= set(ast.walk(node))
    found = []
    for node in set(ast.walk(tree)) - allowed:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            constants = [x.value for x in node.elts if isinstance(x, ast.Constant)]
            words = [x for x in constants if isinstance(x, str)]
            # With other words it is something else, such as the headings of a table.
            if len(words) > 1 and set(words) <= set(utils.AXES):
                found.append(node)
    return found


def test_no_tuple_of_mesh_axes_is_written_out():
    found = [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path in [*MODULES, *SCRIPTS]
        for node in axis_tuples(ast.parse(path.read_text()))
    ]
    assert not found
    groups = ["AXES", "BATCH", "STAGE"]
    for path in MODULES:
        body = ast.parse(path.read_text()).body
        names = [ast.unparse(x) for node in body for x in getattr(node, "targets", [])]
        defined = [name for name in names if name in groups]
        assert defined == (groups if path.name == "utils.py" else [])


# ---- dimension letters

COMMON = dict(
    B="sequences", L="sequence length", D="d_model", H="query heads", K="head dim", V="vocabulary",
    N="layers",
)  # fmt: skip
"""Letters that mean the same in every file; a file may add to the words."""
WITH_DIMS = [
    "weights", "layers", "blockwise", "attention", "grouped", "experts", "pipeline", "model",
    "gradient", "generate", "optim", "runstate", "train",
]  # fmt: skip


def dimension_key(path: Path) -> dict[str, str]:
    """{letter: meaning} from a module's docstring, whose lines are "  X  meaning   Y  meaning"."""
    doc = ast.get_docstring(ast.parse(path.read_text()))
    lines = [line.strip() for line in doc.splitlines() if re.match(r"  [A-Z]  \S", line)]
    entries = [entry.split("  ", 1) for line in lines for entry in re.split(" {3,}", line)]
    assert len(dict(entries)) == len(entries), "a letter is explained twice"
    return dict(entries)


@pytest.mark.parametrize("name", WITH_DIMS)
def test_every_dimension_letter_is_in_its_files_key(name):
    path = ROOT / f"{name}.py"
    key, missing = dimension_key(path), {}
    for array, dims in re.findall(r"\b([a-z]\w*_([A-Z]{1,6}\d?[A-Z]*))\b", path.read_text()):
        unknown = set(re.sub(r"\d", "", dims)) - set(key)
        missing |= dict.fromkeys(unknown, array)
    assert not missing
    for letter, meaning in key.items():
        assert meaning.startswith(COMMON.get(letter, "")), f"{letter}  {meaning}"


# ---- requirements


def pins(file: str) -> set[str]:
    """The lines `name==version` of a file of requirements, without extras and conditions."""
    found = re.findall(r"^([\w.-]+)(?:\[.*\])?==([^\s;]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {f"{name.lower()}=={version}" for name, version in found}  # pip ignores case


def test_requirements_txt_has_all_of_requirements_in_with_hashes():
    assert pins("requirements.in") <= pins("requirements.txt")
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements.txt").read_text())
    entries = [entry for entry in entries if not entry.startswith("#")]
    assert len(entries) == len(re.findall(r"^[\w.-]+==", "\n".join(entries), re.MULTILINE))
    assert all("--hash=sha256:" in entry for entry in entries)
