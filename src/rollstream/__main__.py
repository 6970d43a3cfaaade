"""Runs the command `rollstream` as `python -m rollstream`; child processes are started in this way, with -P."""

from rollstream.pipeline.command_line.entry import main

main()
