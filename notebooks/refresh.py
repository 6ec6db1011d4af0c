"""Run notebooks at full size and keep what they show.

python notebooks/refresh.py                 # all of them
python notebooks/refresh.py quickstart

Each runs in a copy of the repository, from beginning to end, and says afterwards how long it took.
"""

import base64
import io
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUN_TIME = re.compile(r"Run time: about \d+ seconds")
PNG = "iVBORw0KGgo"  # how it begins, in base64
NEEDED = "algos", "common", "notebooks"


def copy_repository(target: Path) -> Path:
    """Copy what notebooks need of the working tree, to execute them in; returns `target`."""
    for name in NEEDED:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def execute(notebook: nbformat.NotebookNode, root: Path, environment: dict[str, str]) -> None:
    """Run all cells in the copy of the repository at `root`; the outputs stay in `notebook`.

    Raises CellExecutionError where a cell fails.
    """
    resources = {"metadata": {"path": str(root / "notebooks")}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute(
        env=environment
    )


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leave what a reader sees, in few bytes, and names that stay the same from one run to the
    next.
    """
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number:02}"
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            output.pop("transient", None)
            if "metadata" in output:
                output.metadata = {}
            picture = output.get("data", {}).get("image/png", "")
            if picture.startswith(PNG):  # a GIF may be called PNG
                output.data["image/png"] = _smaller(picture)
        cell.outputs = _joined(cell.outputs)


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Pieces of the same stream as one."""
    joined = []
    for output in outputs:
        if (
            joined
            and output.output_type == joined[-1].output_type == "stream"
            and output.name == joined[-1].name
        ):
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _smaller(picture: str) -> str:
    """A plot as PNG with 128 colours, which is a third of the bytes and looks the same; both in
    base64.
    """
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    encoded = io.BytesIO()
    image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(encoded, "PNG", optimize=True)
    return base64.b64encode(encoded.getvalue()).decode()


def refresh(path: Path) -> None:
    """Run one notebook and write it back, with its run time in its first cell."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        root = copy_repository(Path(folder) / "pmaprl")
        environment = {
            name: value for name, value in os.environ.items() if name != "PMAPRL_NOTEBOOK_SCALE"
        }
        began = time.perf_counter()
        environment["PYTHONPATH"] = str(root / "common")
        execute(
            notebook,
            root,
            environment | {"XDG_CACHE_HOME": f"{folder}/cache", "IPYTHONDIR": f"{folder}/ipython"},
        )
        seconds = time.perf_counter() - began
    tidy(notebook)
    first = notebook.cells[0]
    first.source = RUN_TIME.sub(
        f"Run time: about {5 * max(1, round(seconds / 5))} seconds", first.source
    )
    nbformat.write(notebook, path)
    print(f"{path.name}: {seconds:.0f} s, {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    for path in NOTEBOOKS:
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            refresh(path)
