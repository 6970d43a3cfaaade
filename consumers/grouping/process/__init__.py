"""Processes of the grouping consumer group: transactions, restoration and marks around the fold."""
