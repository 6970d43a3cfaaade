"""The conservation proof: every record of `rollouts` is in exactly one place, read from the topics alone."""

from pipeline.ledger.book import Ledger
from pipeline.ledger.letters import REDRIVEN
from pipeline.ledger.proof import ledger

__all__ = ["REDRIVEN", "Ledger", "ledger"]
