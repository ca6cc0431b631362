"""The names beside `Accelerator` that loops written for Hugging Face Accelerate use: plugins, states, functions.

Each works, or is refused by name with what to write instead (offered.py has the list).
"""
