"""README and docs/: every link, name and flag in them exists, every command runs, and the code of
docs/extending.md and docs/python.md works."""

import ast
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tyro
from conftest import ROOT, on_mesh

import cli
import config
import train
from scripts import prepare_data

README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [path.name for path in DOCS]


def fenced_blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a language."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, path.read_text(), re.S | re.M)


def prose(path: Path) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.S | re.M)


# ---- links and names


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 200


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCS, ids=NAMES)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        page = (path.parent / target).resolve() if target else path
        assert page.exists() and page.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(page), link


def test_every_page_is_linked_from_readme():
    linked = re.findall(r"\]\((docs/[^)#]+\.md)", README.read_text())
    pages = {path.relative_to(ROOT).as_posix() for path in DOCS[1:]}
    assert set(linked) == pages


def code_words(path: Path) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(path))


SNIPPET_FILES = {"mine.py"}  # made in docs/extending.md


@pytest.mark.parametrize("path", DOCS, ids=NAMES)
def test_files_in_backticks_exist(path):
    for word in code_words(path):
        is_file = re.fullmatch(r"[\w/.-]+\.(py|md|toml)|(scripts|tests|docs|\.ci)/[\w/.-]*", word)
        if is_file and word not in SNIPPET_FILES:
            assert (ROOT / word).exists(), word


@cache
def top_level_names(module: Path) -> dict:
    """The names that a module defines, see names_in."""
    return names_in(ast.parse(module.read_text()).body)


def names_in(body: list) -> dict:
    """{name: {name of an attribute: ...}} of the classes, functions and variables in the body of a
    module or class; {} for what is no class."""
    names = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = names_in(node.body)
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = {}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {x.id: {} for target in targets for x in ast.walk(target) if hasattr(x, "id")}
    return names


def is_defined(dotted: str) -> bool:
    """Whether module.name, module.Class.name or section.field exists."""
    first, *rest = dotted.split(".")
    if first in config.SECTIONS and len(rest) == 1:
        section = getattr(config.Config(), first)
        if rest[0] in {f.name for f in fields(section)}:
            return True
    for module in filter(Path.exists, (ROOT / f"{first}.py", ROOT / f"scripts/{first}.py")):
        names = top_level_names(module)
        for name in rest:
            if name not in names:
                break
            names = names[name]
        else:
            return True
    return False


# A field that docs/extending.md adds, what stands for any field, and suffixes of files.
NEW_FIELDS = {"optim.power", "section.field"}
SUFFIXES = ("bin", "json", "jsonl", "md", "png", "py", "safetensors", "toml", "txt")


@pytest.mark.parametrize("path", DOCS, ids=NAMES)
def test_names_in_backticks_exist(path):
    modules = {p.stem for p in [*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py")]}
    for word in code_words(path):
        dotted = re.match(r"(\w+(?:\.\w+)+)(?:$|[( =])", word)
        if not dotted or dotted[1] in NEW_FIELDS:
            continue
        first, last = dotted[1].split(".")[0], dotted[1].split(".")[-1]
        if first[0].isupper():  # Class.method
            assert any(is_defined(f"{module}.{dotted[1]}") for module in modules), word
        elif first in modules | set(config.SECTIONS) and last not in SUFFIXES:
            assert is_defined(dotted[1]), word


@pytest.mark.parametrize("path", DOCS, ids=NAMES)
def test_flags_exist(path):
    for section, field in re.findall(r"--(\w+)\.(\w+)", path.read_text()):
        known = f"{section}.{field}" in NEW_FIELDS or is_defined(f"{section}.{field}")
        assert known, f"--{section}.{field}"


def test_the_table_of_files_has_every_file_and_the_size_is_right():
    text = README.read_text()
    first_cells = " ".join(re.findall(r"^\| (`.*?`) \|", text, re.M))
    assert {p.name for p in ROOT.glob("*.py")} <= set(first_cells.split("`"))
    sizes = re.findall(r"([\w/*]+\.py)` has ([\d,]+) lines", text)
    assert len(sizes) == 2
    for folder, n_lines in sizes:
        counted = sum(len(p.read_text().splitlines()) for p in ROOT.glob(folder))
        assert abs(int(n_lines.replace(",", "")) / counted - 1) < 0.1, (folder, counted)


def test_the_tour_names_every_file():
    text = (ROOT / "docs" / "tour.md").read_text()
    files = ROOT.glob("*.py")
    assert not [p.name for p in files if f"`{p.name}`" not in text and f"`{p.stem}." not in text]


def test_sizes_in_the_tour_are_those_of_the_demo():
    """A size of several dims in docs/tour.md is that of an array in the demo's update."""
    cfg = config.PRESETS["demo"]()
    cfg = on_mesh(cfg, cfg.mesh.sizes)
    jaxpr = train.step_jaxpr(cfg)
    traced = set(re.findall(r"[a-z]\d+\[([\d,]+)\]", str(jaxpr)))
    sizes = re.findall(r"\[(\d+(?:,\s\d+)+)\]", (ROOT / "docs" / "tour.md").read_text())
    assert len(sizes) > 6
    assert {re.sub(r"\s", "", size) for size in sizes} <= traced


# ---- commands


def commands(path: Path) -> list[tuple[str, str]]:
    """(command, why it is not run here) of every command in a page's sh blocks.

    A block that needs what a test does not have says so in a comment line, "# needs a TPU pod".
    """
    found = []
    for block in fenced_blocks(path, "sh"):
        needs = re.search(r"^# (needs .*)$", block, re.M)
        lines = block.replace("\\\n", " ").splitlines()
        lines = [line for line in lines if line.strip() and not line.startswith("#")]
        found += [(line, needs[1] if needs else "") for line in lines]
    return found


def train_words(command: str) -> list[list[str]]:
    """The words after train.py, also in a command within quotes."""
    words = shlex.split(command, comments=True)
    inner = [found for word in words if " " in word for found in train_words(word)]
    starts = [n + 1 for n, word in enumerate(words) if re.search(r"(^|/)train\.py$", word)]
    return [words[n:] for n in starts] + inner


@pytest.mark.parametrize("path", DOCS, ids=NAMES)
def test_commands_to_train_pass_the_checks_as_written(path, tmp_path, monkeypatch):
    """Those that need hardware too, which no test runs."""
    monkeypatch.chdir(tmp_path)
    for command, _ in commands(path):
        for run in re.findall(r"--config (runs/\w+)/config.json", command):
            Path(run).mkdir(parents=True, exist_ok=True)
            Path(run, "config.json").write_text(cli.to_json(config.demo()))
        for words in train_words(command):
            if "--help" not in words:
                cfg = cli.parse(words)
                has_demo = "data/demo" in cfg.data.train  # whose vocabulary the tests shorten
                assert not has_demo or cfg.model.vocab_size >= config.demo().model.vocab_size


def test_commands_that_prepare_the_same_folder_have_the_same_settings():
    """Those of a page, the Makefile, a script's --help and a recipe may follow each other, and
    other settings are refused."""
    found, others = {}, [ROOT / "Makefile", *ROOT.glob("scripts/*.py")]
    for path in (*DOCS, *others, *ROOT.glob("scripts/recipes/*.sh")):
        text = re.sub(r"\\\n", " ", path.read_text())
        text = re.sub(r"\$text|\bFILE\b", "data/shakespeare.txt", text)  # in shakespeare_char.sh
        for command in re.findall(r"prepare_data\.py (.*--out [\w./:]+)", text):
            words = [word for word in shlex.split(command) if word != "#"]
            args = tyro.cli(prepare_data.Args, args=words, use_underscores=True)
            found.setdefault(args.out, set()).add(args)
    assert len(found) > 9
    assert not {out: settings for out, settings in found.items() if len(settings) > 1}


SCRIPT = f"""#!/bin/sh
exec {shlex.quote(sys.executable)} {shlex.quote(str(ROOT / "tests/short_python.py"))} "$@"
"""
# A machine may have one core; the docs ask for the second.
TASKSET = '#!/bin/sh\nshift 2\nexec "$@"\n'
WORDS = "a run writes files, and the tests read them. it ends with a loss, and a sample of text."


def make_workspace(folder: Path) -> Path:
    """A folder that looks like a fresh clone after the installation, with texts and a model to
    convert.  Its python is tests/short_python.py."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("data", "runs", "__pycache__"):
            (folder / path.name).symlink_to(path)
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name, text in dict(python=SCRIPT, taskset=TASKSET, activate="").items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(stat.S_IRWXU)
    (binaries.parent / "installed").touch()
    (folder / "texts").mkdir()
    for n in range(20):
        (folder / f"texts/{n}.txt").write_text(f"{WORDS}\n" * (n + 1))
    return folder


def run_command(command: str, workspace: Path):
    """Run a command of the docs as a shell in the workspace would."""
    env = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "PYTEST"))}
    for name in ("JAX_NUM_CPU_DEVICES", "NPROC"):  # conftest.py has set them
        env.pop(name, None)
    env["PATH"] = f"{workspace / '.venv/bin'}:{env['PATH']}"
    shell = ["bash", "-euo", "pipefail", "-c", command]
    options = dict(cwd=workspace, env=env, capture_output=True, text=True, timeout=600)
    done = subprocess.run(shell, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def run_commands(path: Path, workspace: Path):
    for command, needs in commands(path):
        if not needs:
            run_command(command, workspace)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Path:
    """A workspace in which the commands of README have been run."""
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    run_commands(README, folder)
    return folder


def read_rows(run: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.slow
def test_commands_of_readme_run(workspace):
    for name in ("loss.png", "samples.jsonl"):
        assert (workspace / "runs/demo" / name).stat().st_size > 0
    steps = [row["step"] for row in read_rows(workspace / "runs/mine", "train")]
    assert steps == [*range(1, len(steps) + 1)] and len(steps) > 1
    n_tokens = read_rows(workspace / "runs/mine", "eval")[-1]["tokens"]
    assert len(np.load(workspace / "logprob.npy")) >= n_tokens


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCS[1:], ids=NAMES[1:])
def test_commands_of_the_docs_run(path, workspace):
    """Slow: they take 320 CPU seconds, and those of README 55."""
    if path.name == "huggingface.md":
        add_model(workspace)
    run_commands(path, workspace)


def add_model(workspace: Path):
    """A small Qwen3-0.6B with a tokenizer of its 96 ids or fewer, and the end token of Qwen's."""
    run_command("python scripts/prepare_data.py --input texts --tokenizer char --out c", workspace)
    folder = shutil.copytree(ROOT / "tests/goldens/qwen3", workspace / "Qwen3-0.6B")
    (folder / "golden.safetensors").unlink()
    text = (workspace / "c/train/tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace(config.END, "<|im_end|>"))


# ---- the code of docs/python.md

CHECKS = """
nll = utils.host_rows(nll_AMBL)[0, :n]
logprob_LV = jax.nn.log_softmax(lens[-1][0])
np.testing.assert_allclose(-logprob_LV[np.arange(n), np.array(ids[1:])], nll, atol=1e-4)
np.testing.assert_allclose([pattern.sum(-1) for pattern in patterns], 1, atol=1e-4)
assert len(patterns) == len(lens) - 1 == cfg.model.n_layers

def last_loss_of(delta_BLD):
    logit_LV = look_inside(params, jnp.array([ids]), delta_BLD, cfg)[1][-1][0]
    return -jax.nn.log_softmax(logit_LV[n - 1])[ids[-1]]

grad_LD, rows = jax.grad(last_loss_of)(zero_BLD)[0], jnp.array(ids)
grad_VD = jnp.zeros_like(params["embed_VD"]).at[rows].add(grad_LD)
np.testing.assert_allclose(grad_VD, last_grads["embed_VD"], atol=1e-4)
np.testing.assert_allclose(loss, nll.mean(), rtol=1e-4)
jax.tree.map(np.testing.assert_array_equal, arrays, jax.device_get(params))
saved = runstate.load_params("runs/patched", cfg)["layers"]["dense"]["o_HKD"]
assert (saved[1] == 0).all() and (saved[0] == params["layers"]["dense"]["o_HKD"][0]).all()
in_run = [json.loads(line) for line in open("runs/rate_0.01/metrics.jsonl")]
assert abs(in_run[2]["loss"] - metrics["loss"]) < 1e-4
"""


@pytest.mark.slow
def test_the_code_for_notebooks_runs_and_its_numbers_are_right(workspace):
    code = "\n".join(fenced_blocks(ROOT / "docs" / "python.md", "python"))
    (workspace / "notebook.py").write_text(code + CHECKS)
    run_command("python notebook.py", workspace)
    run_command("python scripts/evaluate.py --run runs/patched", workspace)


# ---- the code of docs/extending.md


def replace_lines(text: str, change: str) -> str:
    """The text with a change like that of a diff: lines with - become those with +."""
    lines = change.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(old) == 1, f"{text.count(old)} times in the file:\n{old}"
    return text.replace(old, new)


@pytest.fixture(scope="session")
def extended(tmp_path_factory) -> Path:
    """A copy of the modules with all that docs/extending.md adds to them."""
    folder = tmp_path_factory.mktemp("extended")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    page = (ROOT / "docs/extending.md").read_text()
    blocks = re.findall(r"^```(python|diff)\n# (\w+\.py)\n(.*?)^```$", page, re.S | re.M)
    assert len(blocks) == page.count("```python") + page.count("```diff")
    for language, name, code in blocks:
        file = folder / name
        text = file.read_text() if file.exists() else ""
        file.write_text(replace_lines(text, code) if language == "diff" else f"{text}\n\n{code}")
    return folder


def run_python(folder: Path, *words) -> str:
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_changes_of_extending_md_fit_the_code(extended):
    for path in extended.glob("*.py"):
        compile(path.read_text(), path, "exec")


@pytest.mark.slow
def test_all_extensions_train_alike_on_two_meshes(extended, corpus, tmp_path):
    """The new optimizer, schedule, setting, metric, attention, weight, format and source in one
    run, and the same run on one device.  The cache of the attention is tested in
    tests/test_attention.py."""
    tokens = np.concatenate([np.load(path) for path in sorted((corpus / "val").glob("*.npy"))])
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    (tmp_path / "val.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    flags = ["--optim.name", "nadamw", "--optim.schedule", "polynomial", "--optim.power", 2]
    flags += ["--optim.lr", 1e-3, "--model.attention", "gated", "--model.n_layers", 2]
    flags += ["--data.train", "noise:1000", "--data.val", tmp_path / "val.bin"]
    flags += ["--train.steps", 4, "--optim.warmup_steps", 1, "--train.eval_every", 0]
    rows = {}
    for name, mesh in (("one", (1, 1, 1)), ("eight", (2, 2, 2))):
        axes = [f"--mesh.{axis}={n}" for axis, n in zip(("dp", "pp", "tp"), mesh, strict=True)]
        words = ["--config", "tiny", "--run.dir", tmp_path, "--run.name", name, *axes, *flags]
        assert "update_norm" in run_python(extended, "train.py", *words)
        rows[name] = read_rows(tmp_path / name, "train") + read_rows(tmp_path / name, "eval")
    for field in ("loss", "grad_norm", "lr", "update_norm"):
        one, eight = ([row[field] for row in rows[name] if field in row] for name in rows)
        assert len(one) >= 4
        np.testing.assert_allclose(eight, one, rtol=1e-3, err_msg=field)
    assert rows["one"][-1]["tokens"] == len(tokens) - 1
    rates = [row["lr"] for row in rows["one"] if row["kind"] == "train"]
    assert max(rates) / min(rates) > 1.5


@pytest.mark.slow
def test_a_script_of_ones_own_trains(extended, tmp_path):
    words = ["--config", "tiny", "--optim.schedule", "inverse_sqrt", "--data.train", "noise:100"]
    words += ["--data.val", "noise:10", "--train.steps", 2, "--optim.warmup_steps", 0]
    run_python(extended, "mine.py", *words, "--model.n_layers", 2, "--run.dir", tmp_path)
    rates = [row["lr"] for row in read_rows(tmp_path / "tiny", "train")]
    assert rates == pytest.approx([0.01, 0.001 + 0.009 * 0.5**0.5])
    (row,) = read_rows(tmp_path / "tiny", "size")
    assert row["step"] == 2 and row["embed"] > 1
