"""A plug-in for vLLM, whose processes then fetch policy versions from the log. Imports vLLM and torch when used."""
