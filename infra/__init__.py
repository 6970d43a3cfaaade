"""What a run stands on: a local Kafka broker in one command."""
