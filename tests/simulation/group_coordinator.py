"""The coordinator of a consumer group: static members of the classic protocol, rebalances, committed offsets.

KIP-345 (static membership) and KIP-447 (offsets of a transaction name the member and its generation). Joining and
synchronising are one step here: the leader of a group never fails between the two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from confluent_kafka import KafkaError

from tests.simulation.partition_log import Refusal

Place = tuple[str, int]
REBALANCE_TIMEOUT_S = 300.0


class Committed(NamedTuple):
    """A committed offset."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


NOTHING = Committed(-1001)


class MemberMetadata(NamedTuple):
    """Identity, in a transaction, of the member whose offsets it sends; an outsider has no name."""

    group: str
    generation: int = -1
    member: str = ""
    instance: str = ""


@dataclass(eq=False)
class Member:
    """A member of a group."""

    name: str
    instance: str
    session_s: float
    healthy: Callable[[], bool]
    """Whether its heartbeats arrive."""
    seen_s: float
    assignment: tuple[int, ...] = ()


@dataclass
class Group:
    """Members, offsets and pending offsets of a group; `topic` is what its members read."""

    topic: str = ""
    partitions: int = 0
    generation: int = 0
    rebalancing: bool = False
    members: dict[str, Member] = field(default_factory=dict)
    by_instance: dict[str, str] = field(default_factory=dict)
    joined: set[str] = field(default_factory=set)
    offsets: dict[Place, Committed] = field(default_factory=dict)
    pending: dict[int, dict[Place, Committed]] = field(default_factory=dict)
    """Offsets of open transactions, by producer id."""
    checking: bool = True
    """Whether a transaction's member and generation are compared; a broken broker for tests of the judge."""
    _count: int = 0
    _rebalance_by_s: float = 0.0

    # ------------------------------------------------------------------ members

    def join(self, instance: str, session_s: float, healthy: Callable[[], bool], now_s: float) -> str:
        """JoinGroup of a member without a name; returns its name. It replaces the member of the same instance."""
        self._count += 1
        member = Member(f"{instance}-{self._count}", instance, session_s, healthy, now_s)
        old = self.members.pop(self.by_instance.get(instance, ""), None)
        self.members[member.name] = member
        self.by_instance[instance] = member.name
        if old is not None and not self.rebalancing:
            member.assignment = old.assignment  # a static member that comes back moves nothing
        else:
            if old is not None:
                self.joined.discard(old.name)
            self._rebalance(now_s)
            self.joined.add(member.name)
            self._complete()
        return member.name

    def rejoin(self, name: str, instance: str) -> None:
        """JoinGroup of a member in a rebalance."""
        self.validate(name, instance)
        self.joined.add(name)
        self._complete()

    def validate(self, name: str, instance: str) -> Member:
        """Return a member. Raises Refusal if it was replaced, or is no member any more."""
        if self.by_instance.get(instance, name) != name:
            raise Refusal(KafkaError.FENCED_INSTANCE_ID)
        if name not in self.members:
            raise Refusal(KafkaError.UNKNOWN_MEMBER_ID)
        return self.members[name]

    def settled(self, name: str) -> bool:
        """Whether a member that joined has its assignment."""
        return name not in self.members or not self.rebalancing

    @property
    def served(self) -> bool:
        """Whether every partition belongs to a member that is well."""
        owned = sum(len(member.assignment) for member in self.members.values() if member.healthy())
        return not self.rebalancing and owned == self.partitions

    def _rebalance(self, now_s: float) -> None:
        if not self.rebalancing:
            self.rebalancing, self._rebalance_by_s = True, now_s + REBALANCE_TIMEOUT_S
            self.joined = set()

    def _complete(self) -> None:
        if not self.rebalancing or not self.joined >= self.members.keys():
            return
        self.rebalancing = False
        self.generation += 1
        names = sorted(self.members, key=lambda name: self.members[name].instance)
        share, more = divmod(self.partitions, max(1, len(names)))
        first = 0
        for place, name in enumerate(names):
            count = share + (place < more)
            self.members[name].assignment = tuple(range(first, first + count))
            first += count

    def expire(self, now_s: float) -> float:
        """Expel members whose session ended, or who did not join a rebalance; return when the next one may be due."""
        coming = float("inf")
        gone: list[Member] = []
        for member in self.members.values():
            if member.healthy():
                member.seen_s = now_s
            elif member.seen_s + member.session_s <= now_s:
                gone.append(member)
            else:
                coming = min(coming, member.seen_s + member.session_s)
        if self.rebalancing and self._rebalance_by_s <= now_s:
            gone += [m for m in self.members.values() if m.name not in self.joined and m not in gone]
        for member in gone:
            del self.members[member.name]
            self.by_instance.pop(member.instance, None)
            self.joined.discard(member.name)
        if gone:
            self._rebalance(now_s)
            self._complete()
        return min(coming, self._rebalance_by_s) if self.rebalancing else coming

    # ------------------------------------------------------------------ offsets

    def commit_pending(self, producer_id: int, who: MemberMetadata, offsets: dict[Place, Committed]) -> None:
        """TxnOffsetCommit: offsets wait for the end of their transaction."""
        if self.checking and (who.member or who.generation >= 0):
            self.validate(who.member, who.instance)
            if who.generation != self.generation:
                raise Refusal(KafkaError.ILLEGAL_GENERATION)
        self.pending.setdefault(producer_id, {}).update(offsets)

    def mark(self, producer_id: int, commit: bool) -> None:
        """Write the marker that ends a transaction."""
        offsets = self.pending.pop(producer_id, {})
        if commit:
            self.offsets.update(offsets)

    def fetch(self, place: Place) -> Committed | None:
        """OffsetFetch that requires stable offsets; None while one is pending."""
        if any(place in offsets for offsets in self.pending.values()):
            return None
        return self.offsets.get(place, NOTHING)
