"""Kafka clients of every role: safe settings, bounded calls, transactions, and readers that no record stops."""
