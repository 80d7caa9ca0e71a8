"""``python -m classwise``."""

from classwise.cli import main

if __name__ == "__main__":
    main()
