"""The index of a run: its rollouts, groups, steps and versions in one SQLite file, filled from topics or an archive."""
