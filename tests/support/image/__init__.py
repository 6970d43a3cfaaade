"""Images of a broker and of every role, built from files of this machine for tests where no registry is reachable."""
