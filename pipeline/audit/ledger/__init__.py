"""The conservation proof: every record of `rollouts` is in exactly one place, read from the topics alone."""

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.dead_letters import REDRIVEN
from rollstream.pipeline.audit.ledger.live import LiveLedger
from rollstream.pipeline.audit.ledger.proof import ledger

__all__ = ["REDRIVEN", "Ledger", "LiveLedger", "ledger"]
