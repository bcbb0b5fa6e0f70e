"""``python -m fedshuffle`` is the command ``fedshuffle``."""

from fedshuffle.cli import main

if __name__ == "__main__":
    main()
