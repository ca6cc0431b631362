"""`python -m duoka`: the same as `duoka`."""

from duoka.cli import main

if __name__ == "__main__":
    main()
