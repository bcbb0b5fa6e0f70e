"""The README says it in five seconds: a picture early, few words."""

from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_is_short_and_begins_with_the_message() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= 450
    before, picture, _ = text.partition("](docs/images/message.png)")
    assert picture
    assert len(before.split()) <= 80
    for command in ("make demo", "make test", "pip install fedshuffle"):
        assert command in text
