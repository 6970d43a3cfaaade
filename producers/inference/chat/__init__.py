"""Conversations as tokens: chat templates, tool calls, and the turns that are continued from their tokens."""
