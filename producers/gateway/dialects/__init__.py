"""Dialects of agents beside OpenAI's chat: requests become chat requests, and chat answers become theirs. Pure."""
