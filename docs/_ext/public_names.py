"""The public names of the package, where the reference documents them, and links to them."""

import ast
import inspect
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from docutils import nodes
from numpy.typing import ArrayLike, NDArray
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.typing import ExtensionMetadata, stringify_annotation

from fedshuffle._arrays import FloatArray, IntArray

REFERENCE = Path(__file__).parents[1] / "reference"
MODULES = (
    "fedshuffle",
    "fedshuffle.auditing",
    "fedshuffle.auditing.adapters",
    "fedshuffle.availability",
    "fedshuffle.comparison",
    "fedshuffle.config",
    "fedshuffle.data",
    "fedshuffle.data.datasets",
    "fedshuffle.data.partition",
    "fedshuffle.engines",
    "fedshuffle.evaluation",
    "fedshuffle.finetuning",
    "fedshuffle.flower",
    "fedshuffle.flower.local",
    "fedshuffle.losses",
    "fedshuffle.methods",
    "fedshuffle.models",
    "fedshuffle.privacy",
    "fedshuffle.reports.comparison",
    "fedshuffle.sampling",
    "fedshuffle.schedules",
    "fedshuffle.testing",
    "fedshuffle.theory",
    "fedshuffle.timing",
    "fedshuffle.training",
    "fedshuffle.training.callbacks",
    "fedshuffle.transforms",
    "fedshuffle.tuning",
)
"""The public modules: each lists its names in ``__all__``."""

_ALIASES = [
    (alias, stringify_annotation(kind, "smart"))
    for alias, kind in {
        "ArrayLike": ArrayLike,
        "FloatArray": FloatArray,
        "IntArray": IntArray,
        "BoolArray": NDArray[np.bool_],
    }.items()
]

_DIRECTIVE = re.compile(r"^\.\. auto(?:class|data|exception|function|module):: ([\w.]+)$", re.M)


def public() -> dict[str, Any]:
    """All public names with what they stand for; the same thing may have several names."""
    return {
        f"{module}.{name}": getattr(import_module(module), name)
        for module in MODULES
        for name in import_module(module).__all__
        if name != "__version__"
    }


@cache
def documented() -> dict[str, list[str]]:
    """The names that each page of the reference documents, in order."""
    pages = {page.stem: page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md")}
    order = re.findall(r"^([\w-]+)$", pages["index"], re.MULTILINE)
    found = {page: _DIRECTIVE.findall(pages[page]) for page in order if page in pages}
    return {page: names for page, names in found.items() if names}


def resolve(name: str) -> Any:
    """What a dotted name stands for; None if nothing does."""
    first, *parts = name.split(".")
    found: Any = sys.modules.get(first)
    path = first
    for part in parts:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = import_module(path)
            except (ImportError, ValueError):
                return None
    return found


def docstring(name: str) -> str:
    """The docstring of a name; that of data stands below it."""
    found = resolve(name)
    if isinstance(found, ModuleType) or inspect.isclass(found) or inspect.isroutine(found):
        return inspect.cleandoc(found.__doc__ or "")
    module, _, attribute = name.rpartition(".")
    while True:  # data may be defined in a module below
        comments = ModuleAnalyzer.for_module(module).find_attr_docs()
        if ("", attribute) in comments:
            return inspect.cleandoc("\n".join(comments["", attribute]))
        source = Path(str(import_module(module).__file__)).read_text(encoding="utf-8")
        imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
        origins = [node.module for node in imports for a in node.names if a.name == attribute]
        if not origins:
            return ""
        module = str(origins[0])


def summary(name: str) -> str:
    """The first sentence of a docstring as Markdown, for a table."""
    text = " ".join(docstring(name).split("\n\n")[0].split())
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return re.split(r"(?<=\w[.)`])\s(?=[A-Z`])", text)[0].replace("|", r"\|").rstrip(".:")


@cache
def _by_identity() -> dict[int, str]:
    names = [name for page in documented().values() for name in page]
    return {id(resolve(name)): name for name in reversed(names)}


def link(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """A link to a name by another of its import paths, such as ``evaluation.SetMetric``."""
    if node["refdomain"] != "py":
        return None
    for name in _candidates(node):
        owner, _, member = name.rpartition(".")
        for whole, rest in ((name, ""), (owner, f".{member}")):
            known = _by_identity().get(id(resolve(whole)))
            if known is None:
                continue
            page, domain = node.get("refdoc", env.docname), env.domains.python_domain
            found = domain.resolve_xref(env, page, app.builder, "obj", known + rest, node, content)
            if found is not None:
                return found
    return content if _in_signature(node) else None  # types need not be public


def _in_signature(node: pending_xref) -> bool:
    return "refwarn" not in node  # which roles have


def _candidates(node: pending_xref) -> list[str]:
    """Whole names that a reference may mean, by where it stands."""
    target, module = node["reftarget"], node.get("py:module") or "fedshuffle"
    owner = resolve(f"{module}.{node['py:class']}") if node.get("py:class") else None
    places = [module, getattr(owner, "__module__", module)]
    everywhere = [name for page in documented().values() for name in page]
    same = [name for name in everywhere if name.endswith(f".{target}")]
    whole = [target, *(f"{place}.{target}" for place in places)]
    return whole if _in_signature(node) else [*whole, *same[:1]]


_raw: dict[str, list[str]] = {}


def keep(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Keep a docstring as it stands in the code."""
    _raw[name] = [*docstring(name).split("\n"), ""] if what == "data" else lines.copy()


def restore(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Undo what napoleon does to attributes and data: it takes words before a colon for a type."""
    if what in ("attribute", "data", "property"):
        lines[:] = _raw[name]


def shorten(
    app: Sphinx,
    what: str,
    name: str,
    found: Any,
    options: Any,
    arguments: str | None,
    result: str | None,
) -> tuple[str | None, str | None]:
    """Name types in signatures as the code does, instead of writing them out."""
    for alias, written in _ALIASES:
        arguments = arguments and arguments.replace(written, alias)
        result = result and result.replace(written, alias)
    # A default that is a whole object says little: ServerProperties(linear=None, ...)
    arguments = arguments and re.sub(r"= (\w+)\([^()]{60,}\)", r"= \1(...)", arguments)
    return arguments, result


def skip(app: Sphinx, what: str, name: str, found: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out what only repeats the name of a field."""
    return True if (getattr(found, "__doc__", "") or "").startswith("Alias for field") else None


def setup(app: Sphinx) -> ExtensionMetadata:
    app.connect("autodoc-process-docstring", keep, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", restore, priority=600)  # and after it
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-skip-member", skip)
    app.connect("missing-reference", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
