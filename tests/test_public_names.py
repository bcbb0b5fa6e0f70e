"""The public names: few, documented by example, and imported when they are used."""

import subprocess
import sys
from types import ModuleType

import pytest

import fedshuffle

NAMES = [name for name in fedshuffle.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_runnable_example(name: str) -> None:
    found = getattr(fedshuffle, name)
    parts = [found]
    if isinstance(found, ModuleType):  # its own example, or one of what it defines
        parts += [p for p in vars(found).values() if getattr(p, "__module__", "") == found.__name__]
    assert any(">>>" in (part.__doc__ or "") for part in parts)


def test_there_are_about_thirty_public_names() -> None:
    assert len(NAMES) <= 35
    assert set(NAMES) <= set(dir(fedshuffle))
    assert fedshuffle.__version__
    with pytest.raises(AttributeError, match="nothing"):
        fedshuffle.nothing  # noqa: B018


def test_the_import_is_light() -> None:
    heavy = ["torch", "numpy", "scipy", "rich", "pandas", "matplotlib", "safetensors"]
    code = f"import sys, fedshuffle; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_an_audit_needs_no_torch() -> None:
    code = (
        "import sys, fedshuffle as f;"
        "f.audit(f.Federation.from_sizes([1, 2]), 'fedavg'); print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
