"""The gateway: captures the model calls of any agent that speaks OpenAI's protocol, and writes them as rollouts."""
