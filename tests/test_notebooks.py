"""The notebooks: what they keep, and that they run, at a hundredth of their size."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import nbformat
import pytest
from cli_helpers import ROOT, environment, fingerprint
from IPython.core.inputtransformer2 import TransformerManager
from IPython.utils.text import DollarFormatter
from nbformat import NotebookNode

from notebooks.refresh import copy_repository, execute

PNG = "iVBORw"  # how they begin, in base64
GIF = "R0lGOD"
PICTURES = {  # plots and animations
    "quickstart": (1, 2),
    "anatomy_of_ppo": (5, 0),
    "fork_an_algorithm": (2, 0),
    "sac_and_many_seeds": (5, 1),
    "memory": (2, 0),
    "populations": (5, 0),
}
PRINTED = {  # what a notebook is there for
    "anatomy_of_ppo": "the file's differ by at most  [0-9.]+e-0[6-9]|by at most  0.0e",
    "fork_an_algorithm": r"^\+    return -ratio \* advantage",
    "populations": r"^\+        \+ hparams.kl_coef \* ",
}


def load(name: str) -> NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_outputs(name: str, notebook: NotebookNode) -> str:
    """The pictures and the numbers that a notebook is there for; returns all that it has
    printed.
    """
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    data = [output.get("data", {}) for output in outputs]
    pictures = [one["image/png"][:6] for one in data if "image/png" in one]
    assert (pictures.count(PNG), pictures.count(GIF)) == PICTURES[name]
    printed = "\n".join(
        [output.get("text", "") for output in outputs] + [one.get("text/plain", "") for one in data]
    )
    assert re.search(PRINTED.get(name, ""), printed, re.MULTILINE)
    return printed


def test_kept_outputs():
    """They come from one run of the whole notebook, are small, and show nothing of the machine that
    it ran on.
    """
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == PICTURES.keys()
    for name in PICTURES:
        notebook = load(name)
        printed = check_outputs(name, notebook)
        cells = code_cells(notebook)
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), name
        assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < 400_000, name
        everything = printed + "".join(cell.source for cell in notebook.cells)
        assert not re.search(r"/(tmp|work|root|home|Users|content)\b", everything), name
        assert cells[0].source == load("quickstart").cells[1].source, "all begin with the same cell"


SOURCES = [*(ROOT / "algos").glob("*.py"), *(ROOT / "common").rglob("*.py")]
FOLDERS = "benchmarks|notebooks|pmaprl"  # of modules
RUN_FILES = ROOT / "docs" / "runs.md"  # has a table of what is in a run directory


def missing_in(text: str, code: str) -> list[str]:
    """Find what a notebook's text names and there is not, which has this `code`.

    That is: files, headings of pages, flags, modules, sections of the notebook, and names in
    backticks.
    """
    return [
        *_missing_files(text, code),
        *_missing_headings(text),
        *(
            f"section {number}"
            for number in re.findall(r"section (\d+)", text)
            if f"## {number}. " not in text
        ),
        *(word for word in re.findall(r"(?<!\w)--[a-z][\w-]*", text) if not _is_flag(word)),
        *(
            name
            for name in re.findall(rf"\b(?:{FOLDERS})\.\w+(?:\.\w+)*", text)
            if not _is_module(name)
        ),
        *_missing_names(text, code),
    ]


def _missing_files(text: str, code: str) -> list[str]:
    copied = re.findall(r"\bcp \S+ ([\w/.]+)", text)  # by a command that the text shows
    paths = set(re.findall(r"(?<![\w*/])[\w./-]+\.(?:py|md|ipynb|toml|jsonl?|png|gif)\b", text)) - {
        *copied
    }
    places = ROOT, ROOT / "notebooks"
    unknown = [
        path
        for path in paths
        if not any((place / path).exists() for place in places) and path not in code
    ]
    return [path for path in unknown if "/" in path or f"`{path}`" not in RUN_FILES.read_text()]


def _missing_headings(text: str) -> list[str]:
    """Headings in quotation marks, in the sentence that names their page before them."""
    named = re.findall(r'([\w/-]+\.md)`?(?:(?!\. |\.\n)[^"])*"([^"]+)"', text)
    wanted = [(page, " ".join(heading.split())) for page, heading in named]
    return [
        f"{page}: {heading}" for page, heading in wanted if not _has_heading(ROOT / page, heading)
    ]


def _has_heading(page: Path, heading: str) -> bool:
    return (
        page.exists()
        and re.search(rf"^#+ {re.escape(heading)}$", page.read_text(), re.MULTILINE) is not None
    )


def _is_flag(word: str) -> bool:
    if word == "--help":
        return True
    names = [
        word.removeprefix("--").replace("-", "_"),
        word.removeprefix("--no-").replace("-", "_"),
    ]
    return any(
        re.search(rf"^    {name}: ", path.read_text(), re.MULTILINE)
        for path in SOURCES
        for name in names
    )


def _is_module(name: str) -> bool:
    """Tell if it is one, or what one has."""
    *parents, last = name.split(".")
    places = {("pmaprl", "algos"): ROOT / "algos"}
    folder = places.get(
        tuple(parents),
        (ROOT / "common" if parents[0] == "pmaprl" else ROOT).joinpath(*parents),
    )
    owner = folder.with_suffix(".py")
    return (folder / f"{last}.py").exists() or (owner.exists() and last in owner.read_text())


def _missing_names(text: str, code: str) -> list[str]:
    """Python's names and metrics in backticks that neither the kit's code nor the notebook's
    has.
    """
    known = code + "".join(path.read_text() for path in SOURCES)
    names = re.findall(
        r"`([A-Za-z_][\w./]*)`",
        re.sub(r"`[\w./-]+\.(?:py|md|ipynb|jsonl?|png|gif)`", "", text),
    )
    return [
        name for name in names if not re.search(rf"\b{re.escape(name.split('.')[-1])}\b", known)
    ]


@pytest.mark.parametrize("name", PICTURES)
def test_what_texts_name_is_there(name):
    notebook = load(name)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    code = "\n".join(cell.source for cell in code_cells(notebook))
    assert missing_in("\n\n".join(texts), code) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see `algos/gone.py`", "algos/gone.py"),
        ("`gone.ipynb` shows it", "gone.ipynb"),
        ("every row is in `gone.jsonl`", "gone.jsonl"),
        ('`docs/ppo.md` says under "Gone" how', "docs/ppo.md: Gone"),
        ('README.md has a table, "Fork the\nfile"', "README.md: Fork the file"),
        ("as `--gone-flag 3` does", "--gone-flag"),
        ("`python -m pmaprl.gone RUN`", "pmaprl.gone"),
        ("`pmaprl.policy.gone` loads it", "pmaprl.policy.gone"),
        ("section 2 is about it\n## 1. Rollout\n", "section 2"),
        ("the function `gone_function` does", "gone_function"),
    ],
)
def test_what_texts_name_and_is_gone_is_found(text, missing):
    assert missing_in(text, "") == [missing]


def test_what_texts_name_and_is_there_is_not_found():
    text = """`algos/ppo_pmap.py`, `metrics.jsonl`, `anatomy_of_ppo.ipynb`,
    `docs/ppo.md` ("Fork the file"), section 1, `--no-tuned`, `--num-envs 4`,
    `python -m pmaprl.play RUN`, `load_policy`, `Args.from_run`, `pbt/source`,
    `pmaprl.policy.load_policy`, `--help`, `cp algos/ppo_pmap.py algos/my_ppo.py`,
    `own.py`\n## 1. Rollout\n"""
    assert missing_in(text, "Path('own.py')") == []


@pytest.mark.slow
# Others show what tests run
@pytest.mark.parametrize("name", ["anatomy_of_ppo", "fork_an_algorithm", "populations"])
def test_runs(name, tmp_path, monkeypatch):
    """It runs from beginning to end in a fresh process, and leaves nothing behind but runs."""
    root = copy_repository(tmp_path / "pmaprl")
    before = fingerprint(root)
    notebook = load(name)
    for cell in code_cells(notebook):
        cell.outputs = []
    folder = str(tmp_path / "jupyter")  # nothing is written into the home directory
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", folder)
    execute(notebook, root, environment(PMAPRL_NOTEBOOK_SCALE="0.01", IPYTHONDIR=folder))
    check_outputs(name, notebook)
    assert {
        path: digest for path, digest in fingerprint(root).items() if not path.startswith("runs/")
    } == before


class Colab:
    """The part of IPython that the first cell needs on Colab, and the commands that it has run."""

    def __init__(self, names: dict[str, Any]):
        self.names = names
        self.commands = []

    def system(self, command: str) -> None:
        self.commands.append(DollarFormatter().vformat(command, (), self.names))
        if "clone" in command:
            copy_repository(Path("pmaprl"))

    def run_line_magic(self, *words: str) -> None:
        pass


def test_on_colab_the_first_cell_clones_and_installs_once(tmp_path, monkeypatch):
    names: dict[str, Any] = {}
    colab = Colab(names)
    names["get_ipython"] = lambda: colab
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    source = TransformerManager().transform_cell(load("quickstart").cells[1].source)
    with plt.rc_context():
        exec(source, names)
        exec(source, names)
    clone = "GIT_TERMINAL_PROMPT=0 git clone --quiet https://github.com/pmaprl/pmaprl pmaprl"
    assert colab.commands == [clone, f"pip install --quiet --editable {tmp_path}/pmaprl"]
    assert Path.cwd() == tmp_path / "pmaprl"
