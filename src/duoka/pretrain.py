"""`python -m duoka.pretrain`, also under torchrun: the same as `duoka pretrain`."""

import sys

from duoka.cli import main

if __name__ == "__main__":
    main(["pretrain", *sys.argv[1:]])
