"""What every process of a run needs: Ctrl-C, the contract with its supervisor, its metrics port."""
