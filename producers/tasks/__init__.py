"""The tasks that come with rollstream: prompts with stable ids and splits, and their verifiers."""
