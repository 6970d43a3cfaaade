"""Commands that start a whole run: `rollstream run` and `rollstream demo`."""
