"""``python -m fedshuffle.cli``."""

from fedshuffle.cli import main

if __name__ == "__main__":
    main()
