"""Runs the command `rollstream` as `python -m rollstream`; child processes are started in this way, with -P."""

from rollstream.pipeline.entry import main

main()
