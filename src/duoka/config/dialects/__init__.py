"""Files of other tools, read as they are: one table of rows per dialect, one engine for all.

`overlays.py` asks `recognize` for every file that it reads, and `translate` for those in other tools' words.
"""
