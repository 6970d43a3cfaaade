"""The command `rollstream`: its parser, its list of commands and their output."""
