"""`python -m duoka.pretrain`, also under torchrun: the same as `duoka pretrain`."""

import sys

from duoka.cli import main

if __name__ == "__main__":
    words = sys.argv[1:]
    main(["pretrain", *(words[1:] if words[:1] == ["--"] else words)])
