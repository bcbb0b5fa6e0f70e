"""Pages that are made from the code: the config's keys, the commands, the table of names.

The page in ``docs`` holds a title, an introduction and a mark ``<!-- generated -->``, which the
text made here replaces. Links to files of the repository outside ``docs`` become links to GitHub.
"""

import ast
import dataclasses
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import public_names
import typer.main
from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

from fedshuffle._links import REPOSITORY
from fedshuffle.cli import app as commands
from fedshuffle.comparison import Comparison
from fedshuffle.config import Config, loader, schema, writer

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
MARK = "<!-- generated -->"
INCLUDED = {"changelog": ROOT / "CHANGELOG.md", "contributing": ROOT / "CONTRIBUTING.md"}
"""Pages that show a file of the repository."""


# The keys of a config ---------------------------------------------------------------------------


def config_keys() -> str:
    """Every key of a config file and of a comparison, by section."""
    sections = loader.sections_of(Config) | loader.sections_of(Comparison, "compare")
    return "\n".join(_section(name, kind) for name, kind in sections.items())


def _section(name: str, kind: Any) -> str:
    title = f"`[{name}]`" if name else "Top-level keys"
    rows = [
        f"| [`{row.key}`]{{#{anchor(name, row.key)}}} | {row.form} | {row.default} |"
        f" {row.meaning} |"
        for row in keys(kind)
    ]
    return "\n".join(
        [f"## {title}\n", "| key | value | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def anchor(section: str, key: str) -> str:
    """The anchor of a key: ``key-work-batch-size``."""
    return "-".join(["key", *section.split("."), key]).replace("--", "-").replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a config file, in Markdown."""

    key: str
    form: str
    default: str
    meaning: str


def keys(kind: Any) -> Iterator[Key]:
    """The keys of one section."""
    meanings = _meanings(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, hint in schema.keys(kind).items():
        yield Key(name, loader.form(hint), _default(fields[name]), _markdown(meanings[name]))


def _default(field: dataclasses.Field[Any]) -> str:
    """The default as it would be written; a key without one says in its meaning what happens."""
    if "add" in field.metadata:
        return "required"
    if field.default in (dataclasses.MISSING, None, (), (None,)):
        return ""
    written = " ".join(writer.toml({"key": writer.plain(field.default)}).split())
    return f"`{written.removeprefix('key = ').replace('[ ', '[').replace(', ]', ']')}`"


def _meanings(kind: Any) -> dict[str, str]:
    """What the docstrings of a dataclass say of its fields, below each field or under Args."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = _arguments(inspect.getdoc(kind) or "")
    for field, text in zip(tree.body, tree.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


def _arguments(docstring: str) -> dict[str, str]:
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    entries = re.findall(
        r"^    (\w+): ((?:.*\n)(?:     +.*\n)*)", section[1] if section else "", re.M
    )
    return {name: text[:1].upper() + text[1:] for name, text in entries}


def _markdown(text: str) -> str:
    """A docstring's text in one line of Markdown."""
    text = " ".join(text.split())
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`").replace("|", r"\|").removesuffix(".")


# The commands -----------------------------------------------------------------------------------


def command_reference() -> str:
    """Every command with its arguments and options."""
    top = typer.main.get_command(commands)
    return "\n".join(_command("fedshuffle", top, click.Context(top, info_name="fedshuffle")))


def _command(path: str, command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        if path != "fedshuffle":
            yield f"## `{path}`\n\n{_help(command)}\n"
        for name, inner in command.commands.items():
            yield from _command(f"{path} {name}", inner, click.Context(inner, context, name))
        return
    yield f"{'#' * len(path.split())} `{path}`\n\n{_help(command)}\n"
    yield f"```console\n$ {path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    rows = [_parameter(one, context) for one in command.params if not _hidden(one)]
    if rows:
        yield "\n".join(["| argument or option | default | meaning |", "|---|---|---|", *rows, ""])


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "").replace("\b\n", "")


def _hidden(parameter: click.Parameter) -> bool:
    return bool(getattr(parameter, "hidden", False))


def _parameter(parameter: click.Parameter, context: click.Context) -> str:
    if isinstance(parameter, click.Argument):
        name = f"`{parameter.make_metavar(context)}`"
    else:
        flag = getattr(parameter, "is_flag", False)
        value = "" if flag else f" {parameter.make_metavar(context)}"
        name = ", ".join(
            f"`{option}{value}`" for option in (*parameter.opts, *parameter.secondary_opts)
        )
    bar = r"\|"
    default = parameter.get_default(context, call=False)
    shown = "required" if parameter.required else ""
    if default not in (None, False, ()) and not callable(default):
        shown = f"`{default}`"
    meaning = _markdown(str(getattr(parameter, "help", None) or ""))
    return f"| {name.replace('|', bar)} | {shown} | {meaning} |"


# The table of names -----------------------------------------------------------------------------


def name_tables() -> str:
    """The names on each page of the reference, with what each is for."""
    parts = []
    for page, names in public_names.documented().items():
        title = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8").split("\n")[0]
        short = [name.removeprefix("fedshuffle.") for name in names]
        rows = [
            f"| {{py:obj}}`{shown} <{name}>` | {public_names.summary(name)} |"
            for shown, name in zip(short, names, strict=True)
        ]
        table = "\n".join(["| name | what it is |", "|---|---|", *rows])
        parts.append(f"## [{title.removeprefix('# ')}]({page}.md)\n\n{table}\n")
    return "\n".join(parts)


# Sphinx -----------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {
    "reference/config": config_keys,
    "reference/cli": command_reference,
    "reference/index": name_tables,
}


def fill(app: Sphinx, name: str, source: list[str]) -> None:
    """Complete the Markdown of a page before it is read."""
    folder = (DOCS / name).parent
    if name in PAGES:
        assert MARK in source[0], f"{name}.md has no mark {MARK}"
        source[0] = source[0].replace(MARK, PAGES[name]())
        app.env.note_reread()
    if name in INCLUDED:
        source[0] = INCLUDED[name].read_text(encoding="utf-8")
        folder = INCLUDED[name].parent
        app.env.note_dependency(str(INCLUDED[name]))
    source[0] = re.sub(
        r"(\]\()([\w./-]+)(?=[)#])",
        lambda link: link[1] + _target(link[2], folder, name),
        source[0],
    )


def trim(app: Sphinx, doctree: nodes.document) -> None:
    """Drop the blank line that ends an example with prompts; put dashes after parameters."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))  # noqa: RUF001
    for block in doctree.findall(nodes.literal_block):
        block.rawsource = block.astext().rstrip()
        block.children = [nodes.Text(block.rawsource)]


def _target(link: str, folder: Path, name: str) -> str:
    """A relative link as it reads on the page."""
    place = Path(os.path.normpath(folder / link))
    for page, file in INCLUDED.items():
        if place == file:
            place = DOCS / f"{page}.md"
    if not place.exists() or place == DOCS:
        return link
    if place.is_relative_to(DOCS):
        return Path(os.path.relpath(place, (DOCS / name).parent)).as_posix()
    return f"{REPOSITORY}/blob/main/{place.relative_to(ROOT).as_posix()}"


def setup(app: Sphinx) -> ExtensionMetadata:
    app.connect("source-read", fill)
    app.connect("doctree-read", trim)
    app.add_lexer("csv", TextLexer)  # Pygments has none
    return {"parallel_read_safe": True, "parallel_write_safe": True}
