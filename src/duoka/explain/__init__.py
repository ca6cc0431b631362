"""Words for `duoka explain`: keys, codes and topics in English and Chinese, with the numbers of the user's own config.

The texts are data files beside this one. Called by the command line only; knows no torch and starts nothing.
"""
