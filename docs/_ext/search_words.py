"""Words that readers search for, and the page that should come first for each."""

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

WORDS = {
    "how-to/import-data": ("csv", "parquet", "hdf5", "pandas"),
    "how-to/engines": ("gpu", "cuda"),
    "how-to/fine-tune": ("lora", "peft", "transformers"),
    "how-to/resume": ("resume", "checkpoint"),
    "explanation/methods/adaptive": ("adam",),
    "citing": ("bibtex",),
}


def add(app: Sphinx, name: str, source: list[str]) -> None:
    """Put index entries before the title of a page: search ranks them like titles."""
    for word in WORDS.get(name, ()):
        source[0] = f"```{{index}} ! {word}\n```\n\n{source[0]}"


def setup(app: Sphinx) -> ExtensionMetadata:
    app.connect("source-read", add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
