"""Checks what a role can see and do on the brokers, and names a remedy for each fault."""
