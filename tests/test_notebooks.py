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

PNG, GIF = "iVBORw", "R0lGOD"  # how they begin, in base64
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
    "populations": r"^\+    total \+= hp.kl_coef \* ",
}


def load(name: str) -> NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_outputs(name: str, notebook: NotebookNode) -> str:
    """The pictures and the numbers that a notebook is there for; returns all that it has printed."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    data = [output.get("data", {}) for output in outputs]
    pictures = [one["image/png"][:6] for one in data if "image/png" in one]
    assert (pictures.count(PNG), pictures.count(GIF)) == PICTURES[name]
    printed = "\n".join([output.get("text", "") for output in outputs] + [one.get("text/plain", "") for one in data])
    assert re.search(PRINTED.get(name, ""), printed, re.MULTILINE)
    return printed


def test_kept_outputs():
    """They come from one run of the whole notebook, are small, and show nothing of the machine that it ran on."""
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == PICTURES.keys()
    for name in PICTURES:
        notebook = load(name)
        printed, cells = check_outputs(name, notebook), code_cells(notebook)
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), name
        assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < 300_000, name
        everything = printed + "".join(cell.source for cell in notebook.cells)
        assert not re.search(r"/(tmp|work|root|home|Users|content)\b", everything), name
        assert cells[0].source == load("quickstart").cells[1].source, "all begin with the same cell"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["anatomy_of_ppo", "fork_an_algorithm", "populations"])  # others show what tests run
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
    assert {path: digest for path, digest in fingerprint(root).items() if not path.startswith("runs/")} == before


class Colab:
    """What the first cell needs of IPython on Colab, and which commands it has run."""

    def __init__(self, names: dict[str, Any]):
        self.names, self.commands = names, []

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
    assert str(Path.cwd()) == sys.path[0] == str(tmp_path / "pmaprl")
