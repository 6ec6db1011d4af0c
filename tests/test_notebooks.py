"""The notebooks: what they keep, and that they run, at a twentieth of their size."""

import re
from pathlib import Path

import nbformat
import pytest
from cli_helpers import FAST_COMPILER, ROOT, environment, fingerprint
from nbformat import NotebookNode

from notebooks.refresh import RUN_TIME, copy_repository, execute

PNG, GIF = "iVBORw", "R0lGOD"  # how they begin, in base64
PICTURES = {  # plots and animations
    "quickstart": (1, 2),
    "anatomy_of_ppo": (5, 0),
    "fork_an_algorithm": (2, 0),
    "sac_and_many_seeds": (5, 1),
}
WORDS = {
    "quickstart": [
        "by hand +-?[0-9.]+ ",
        r"ten +\(10, 6\) -> \[\d( \d){9}\]",
        "greedy return -?[0-9.]+ in 128 episodes",
    ],
    "anatomy_of_ppo": [
        "the file's differ by at most  [0-9.]+e-0[6-9]|by at most  0.0e",
        "in new units +[0-9.]+ = ",
        "to the last bit: True",
    ],
    "fork_an_algorithm": [r"^\+    return -jnp.mean\(ratio", r"LayerNorm", r"ppo_with_layer_norm .*seed:( \d+){8}"],
    "sac_and_many_seeds": [r"each seed:( -\d+){8}", "eight agents +[0-9.]+ s to compile", "torque upright"],
}


def reduced(tmp_path: Path) -> dict[str, str]:
    """The environment of a notebook: a small size, a fast compiler, and nothing written into the home directory."""
    folder = str(tmp_path / "ipython")
    return environment(PMAPRL_NOTEBOOK_SCALE="0.05", XLA_FLAGS=FAST_COMPILER, IPYTHONDIR=folder)


@pytest.fixture(autouse=True)
def jupyter_runtime(tmp_path, monkeypatch):
    """Connection files of kernels go to a temporary folder."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))


def load(name: str) -> NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def printed(notebook: NotebookNode) -> str:
    """All text of the outputs."""
    streams = [output.text for output in outputs(notebook) if output.output_type == "stream"]
    return "\n".join(streams + [output.data.get("text/plain", "") for output in outputs(notebook) if "data" in output])


def check_outputs(name: str, notebook: NotebookNode) -> None:
    """The pictures and the numbers that a notebook is there for."""
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    pictures = [output.data["image/png"][:6] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert (pictures.count(PNG), pictures.count(GIF)) == PICTURES[name]
    for pattern in WORDS[name]:
        assert re.search(pattern, printed(notebook), re.MULTILINE), pattern


def test_all_notebooks_are_tested():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == PICTURES.keys()


@pytest.mark.parametrize("name", PICTURES)
def test_kept_outputs(name):
    """They come from one run of the whole notebook, are small, and show nothing of the machine that it ran on."""
    notebook = load(name)
    check_outputs(name, notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < 300_000
    everything = printed(notebook) + "".join(cell.source for cell in notebook.cells)
    assert not re.search(r"/(tmp|work|root|home|Users|content)\b", everything)
    assert "warning" not in printed(notebook).lower()


@pytest.mark.parametrize("name", PICTURES)
def test_first_cells(name):
    """Text with the run time and the variable for the size, then the cell that all notebooks have in common."""
    text, setup = load(name).cells[:2]
    assert RUN_TIME.search(text.source)
    assert "PMAPRL_NOTEBOOK_SCALE" in text.source
    assert setup.cell_type == "code"
    assert setup.source == load("quickstart").cells[1].source


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_runs(name, tmp_path):
    """It runs from beginning to end in a fresh process, and leaves nothing behind but runs."""
    root = copy_repository(tmp_path / "pmaprl")
    before = fingerprint(root)
    notebook = load(name)
    for cell in code_cells(notebook):
        cell.outputs = []
    execute(notebook, root, reduced(tmp_path))
    check_outputs(name, notebook)
    assert {path: digest for path, digest in fingerprint(root).items() if not path.startswith("runs/")} == before


COLAB = """
import shutil, sys, types

def system(command):
    print("system", shell.var_expand(command))
    if "clone" in command:
        shutil.copytree("../pmaprl", "pmaprl")

shell = get_ipython()
colab = sys.modules["google.colab"] = types.ModuleType("google.colab")
colab.output = None  # JAX imports it
shell.system = system
"""


@pytest.mark.slow
def test_setup_on_colab(tmp_path):
    """On Colab the first cell clones and installs, once, and goes to the repository."""
    copy_repository(tmp_path / "pmaprl")
    (tmp_path / "content" / "notebooks").mkdir(parents=True)
    setup = load("quickstart").cells[1].source
    sources = COLAB, "import os; os.chdir('..')", setup, setup, "import algos.ppo_pmap; print(os.getcwd())"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    execute(notebook, tmp_path / "content", reduced(tmp_path))
    lines = printed(notebook).split("\n")
    assert [line for line in lines if line.startswith("system")] == [
        "system git clone --quiet https://github.com/pmaprl/pmaprl pmaprl",
        "system pip install --quiet --editable pmaprl",
    ]
    assert sum(line.endswith("computes on 2 x cpu") for line in lines) == 2
    assert str(tmp_path / "content" / "pmaprl") in lines
