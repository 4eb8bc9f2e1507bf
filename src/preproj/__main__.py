"""Entry point of the command `preproj`."""

import sys


def main() -> None:
    """Run the command line, or say in one sentence what to install for it."""
    try:
        from preproj.cli import app

        app()
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "preproj":
            raise
        sys.exit(f"preproj: this command needs {error.name}; install it with `pip install 'preproj[probe]'`.")


if __name__ == "__main__":
    main()
