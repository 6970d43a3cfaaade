"""`python -m pipeline` is the command `rollstream`; child processes are started this way, with -P."""

from pipeline.entry import main

main()
