"""A plug-in with which vLLM's processes fetch policy versions from the log. Imports vLLM and torch only when used."""
