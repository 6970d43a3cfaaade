"""What runs the parts: configuration, supervisor, command line, ledger, verification, demo."""
