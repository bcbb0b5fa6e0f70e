"""Where the project lives, and the address of a page of its documentation."""

REPOSITORY = "https://github.com/fedshuffle/fedshuffle"
SITE = "https://fedshuffle.github.io/fedshuffle/"


def page(name: str, heading: str = "") -> str:
    """The address of a page, such as ``explanation/theory``, or of a heading on it.

    >>> page("explanation/theory", "the-step-size-limit")
    'https://fedshuffle.github.io/fedshuffle/explanation/theory.html#the-step-size-limit'
    """
    return f"{SITE}{name}.html" + (f"#{heading}" if heading else "")
