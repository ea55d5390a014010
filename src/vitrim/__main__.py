"""``python -m vitrim``: the command line, for launchers that start modules."""

from vitrim.cli import main

if __name__ == "__main__":
    main()
