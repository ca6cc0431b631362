"""Files of other tools, read as they are: one table of rows per dialect, one engine for all.

`layers.py` asks `recognise` for every file that it reads, and `translate` for those that are in somebody else's words.
"""
