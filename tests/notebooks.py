"""Runs the notebooks of the docs: ``make notebooks`` stores their outputs.

Jupyter comes with the extra ``docs``, and is imported when a notebook runs.
"""

import base64
import io
import json
import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path, folder: Path) -> dict[str, Any]:
    """The notebook, executed in a folder, with nothing in it that differs between machines."""
    nbclient: Any = import_module("nbclient")
    nbformat: Any = import_module("nbformat")
    notebook = nbformat.read(path, as_version=4)
    os.environ["IPYTHONDIR"] = str(folder / ".ipython")  # not the settings of the user
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    notebook.metadata = {"kernelspec": _KERNEL, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            cell.outputs = _cleaned(cell.outputs)
    plain: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return plain


def _cleaned(outputs: list[Any]) -> list[Any]:
    """Outputs without metadata; text in one piece, and pictures in few colours, which are small."""
    cleaned: list[Any] = []
    for output in outputs:
        before = cleaned[-1] if cleaned else None
        if output.output_type == "stream" and before and before.get("name") == output.name:
            before.text += output.text
            continue
        if "metadata" in output:
            output.metadata = {}
        if png := output.get("data", {}).get("image/png"):
            file = io.BytesIO()
            with Image.open(io.BytesIO(base64.b64decode(png))) as image:
                image.convert("RGB").quantize(256).save(file, "png", optimize=True)
            output.data["image/png"] = base64.b64encode(file.getvalue()).decode("ascii")
        cleaned.append(output)
    return cleaned


def main() -> None:
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
