"""A plug-in for vLLM: its processes fetch policy versions from the log themselves. Imports vLLM and torch when used."""
