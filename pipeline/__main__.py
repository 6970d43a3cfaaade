"""`python -m pipeline` is the command `rollstream`; child processes are started this way, with -P."""

import sys

from pipeline.cli import main

sys.exit(main())
