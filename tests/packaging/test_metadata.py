"""What the files about the package say agrees with the package."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedshuffle
from fedshuffle._links import REPOSITORY, SITE
from fedshuffle.errors import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GITHUB = sorted((ROOT / ".github").rglob("*.yml"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def requirements(extra: str) -> set[str]:
    """The names of the packages of an extra, also of those within it."""
    names = set[str]()
    for line in PROJECT["optional-dependencies"][extra]:
        name, within = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", line).groups()  # type: ignore[union-attr]
        if name == "fedshuffle":
            names = names.union(*map(requirements, within.split(",")))
        else:
            names.add(name)
    return names


def test_one_version_everywhere() -> None:
    assert fedshuffle.__version__ == PROJECT["version"] == CITATION["version"]


def test_the_citation_has_what_the_format_requires() -> None:
    assert CITATION["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license", "repository-code"} <= CITATION.keys()
    paper = CITATION["preferred-citation"]
    assert {"type", "title", "authors", "journal", "year", "url"} <= paper.keys()
    assert paper["authors"][0]["family-names"] == "Horváth"


def test_every_extra_for_users_can_be_asked_for_by_a_message() -> None:
    packages = {"sklearn": "scikit-learn", "dp_accounting": "dp-accounting"}
    packages |= {"mlflow": "mlflow-skinny", "PIL": "pillow", "flwr_datasets": "flwr-datasets"}
    for extra, modules in EXTRAS.items():
        assert {packages.get(name, name) for name in modules} <= requirements(extra), extra
    others = PROJECT["optional-dependencies"].keys() - EXTRAS.keys()
    assert others == {"all", "docs", "dev"}
    assert requirements("all") == set().union(*map(requirements, EXTRAS))


def test_what_tests_run_with_is_pinned() -> None:
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    named = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}  # type: ignore[index]
    named |= requirements("all") | requirements("docs")
    assert named <= set(pinned)


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_the_files_of_github_can_be_read(path: Path) -> None:
    content: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.parent.name == "workflows":
        assert {"name", "permissions", "jobs"} <= content.keys()
        for job in content["jobs"].values():
            assert job["runs-on"]
            assert all(step.keys() & {"uses", "run"} for step in job["steps"])
    elif path.name != "config.yml":
        assert {"name", "description", "body"} <= content.keys()


def test_ci_runs_on_every_python_of_the_classifiers() -> None:
    listed = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if ":: 3." in one]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == listed


def test_one_home_and_one_site_everywhere() -> None:
    assert PROJECT["urls"]["Homepage"] == CITATION["repository-code"] == REPOSITORY
    assert PROJECT["urls"]["Documentation"] == CITATION["url"] == SITE


def test_no_action_runs_on_a_node_that_runners_no_longer_have() -> None:
    """GitHub removed Node 20 in 2026; these are the first versions that run on Node 24."""
    first = {"checkout": 5, "setup-python": 6, "upload-artifact": 6, "download-artifact": 7}
    first |= {"upload-pages-artifact": 5, "deploy-pages": 5}
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for name, version in re.findall(r"uses: actions/([\w-]+)@v(\d+)", path.read_text()):
            assert int(version) >= first[name], (path.name, name)
