"""`python -m rollstream` is the command `rollstream`; child processes are started this way, with -P."""

from rollstream.pipeline.entry import main

main()
