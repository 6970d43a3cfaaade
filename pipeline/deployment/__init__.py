"""The description of a run, and the compose files and charts that run it in containers, without `rollstream run`."""
