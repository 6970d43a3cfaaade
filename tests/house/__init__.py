"""Rules for the repository's own text: imports, private names, documentation. `python -m tests.house` checks them all.

They are no tests: they ask what the files say, not what the code does. Each file is read and parsed once.
"""
