"""A guide's way of sharing data: every world-size-th item; uneven shares end all the same."""

import os
import sys
from pathlib import Path

rank, size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
for count in (24, 99):
    own = list(range(rank, count, size))
    (folder / f"{count}-{rank}.txt").write_text(" ".join(map(str, own)))
