"""The reference is complete: every public name, every key of a config, every option."""

import dataclasses
import inspect
import sys
from typing import Any

import click
import pytest
import typer.main

from fedshuffle.cli import app
from fedshuffle.comparison import Comparison
from fedshuffle.config import Config, loader, schema
from tests.docs.conftest import ROOT
from tests.docs.html import Page

sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import generated_pages
import public_names

NAMES = [name for names in public_names.documented().values() for name in names]

NO_EXAMPLE = {
    "returned, not made": """
        auditing.Finding auditing.PrivacyAudit auditing.ClippingReport auditing.adapters.Replies
        callbacks.TrainingContext engines.choose methods.Family methods.RatioOfSums
        methods.LocalPlan methods.OwnModels
        methods.Reported methods.StepCoefficients methods.FullGradient methods.RoundContext
        methods.CohortMoments sampling.Cohorts transforms.Message transforms.ClientContext
        transforms.ServerContext privacy.Mechanism engines.Choice testing.CheckResult
        testing.ConformanceError theory.Advice theory.StepAdvice theory.SamplingAdvice
        theory.EstimatedConstants theory.Validity theory.StepLimit data.Store
        theory.exact.ConstantsOptions tuning.Trial tuning.TunedStepSizes
    """,
    "a guide shows how to write one": """
        auditing.adapters.Aggregator auditing.async_servers.AsyncServer
        methods.Normaliser methods.Direction methods.ServerOptimiser
        transforms.Transform transforms.Channel transforms.Compressor engines.Engine
    """,
    "made by engines.make": """
        engines.ReferenceEngine engines.SequentialEngine engines.VectorizedEngine
        engines.ThreadsEngine engines.ProcessesEngine engines.RayEngine
    """,
    "needs a download, a server or a service": """
        auditing.adapters.FlowerAggregator auditing.async_adapters.appfl_server
        auditing.async_adapters.flsim_server auditing.async_adapters.nvflare_server
        callbacks.MLflow callbacks.WandB data.datasets.get
        data.datasets.cifar100 data.datasets.femnist data.datasets.load data.datasets.shakespeare
        flower.Client flower.local.Deployment
    """,
    "needs a run or the results of one": """
        auditing.clipping_report config.resume reports.comparison.write
        reports.comparison.warnings.annotate theory.AdvisedRun
    """,
}
"""Classes and functions without an example of their own, and why."""


def test_every_public_name_is_in_the_reference() -> None:
    documented = {id(public_names.resolve(name)) for name in NAMES}
    missing = [
        name
        for name, found in public_names.public().items()
        if name not in NAMES and id(found) not in documented
    ]
    assert missing == []


@pytest.mark.parametrize("name", NAMES)
def test_every_name_says_what_it_is(name: str, pages: dict[str, Page]) -> None:
    assert public_names.summary(name)
    page = next(page for page, names in public_names.documented().items() if name in names)
    assert {name, f"module-{name}"} & pages[f"reference/{page}.html"].ids
    assert f"{page}.html#" in " ".join(pages["reference/index.html"].links)


def test_every_class_and_function_has_an_example() -> None:
    excused = {f"fedshuffle.{name}" for names in NO_EXAMPLE.values() for name in names.split()}
    without = {
        name
        for name in NAMES
        if inspect.isroutine(found := public_names.resolve(name)) or inspect.isclass(found)
        if ">>>" not in public_names.docstring(name)
    }
    assert without - excused == set()
    assert excused - without == set(), "these have an example by now"


def keys() -> list[tuple[str, Any, str]]:
    sections = loader.sections_of(Config) | loader.sections_of(Comparison, "compare")
    return [(section, kind, key) for section, kind in sections.items() for key in schema.keys(kind)]


@pytest.mark.parametrize(("section", "kind", "key"), keys())
def test_every_key_of_a_config_is_explained(
    section: str, kind: Any, key: str, pages: dict[str, Page]
) -> None:
    row = {found.key: found for found in generated_pages.keys(kind)}[key]
    assert row.meaning
    assert row.form
    assert generated_pages.anchor(section, key) in pages["reference/config.html"].ids
    field = next(field for field in dataclasses.fields(kind) if field.name == key)
    assert (row.default == "required") == ("add" in field.metadata)


def commands(
    command: click.Command, path: tuple[str, ...] = ("fedshuffle",)
) -> list[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        inner = command.commands.items()
        return [found for name, one in inner for found in commands(one, (*path, name))]
    return [(" ".join(path), command)]


@pytest.mark.parametrize(("path", "command"), commands(typer.main.get_command(app)))
def test_every_command_and_option_is_explained(
    path: str, command: click.Command, pages: dict[str, Page]
) -> None:
    page = pages["reference/cli.html"]
    assert path in page.headings
    start = page.text.index(f"$ {path} ")
    part = page.text[start : page.text.find("\n$ fedshuffle", start + 1)]
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{path} {parameter.name} has no help"
        argument = isinstance(parameter, click.Argument)
        for shown in [parameter.human_readable_name] if argument else parameter.opts:
            assert shown in part, f"{path}: {shown}"
