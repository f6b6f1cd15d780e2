"""What every eviction policy promises, whatever its order; and how one is opened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from policy_models import PlainLRU

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.host.arc import ARC
from kvstore_sdk.host.lru import LRU
from kvstore_sdk.host.policies import open_policy
from kvstore_sdk.host.policy import EvictionPolicy

NAMES = ("lru", "arc")
CHAIN = [b"c%d" % number for number in range(10)]


def store(policy: EvictionPolicy, keys: list[bytes]) -> None:
    """What a host tier does for a batch that a request stores."""
    for key in keys:
        policy.miss(key)
        policy.insert(key)
    policy.unpin(keys)


def evict(policy: EvictionPolicy, count: int) -> list[bytes]:
    """Evict up to `count` keys."""
    gone: list[bytes] = []
    while len(gone) < count and (key := policy.victim()) is not None:
        policy.evict(key)
        gone.append(key)
    return gone


# --- chains ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_survives_of_a_chain_is_its_prefix_when_its_head_was_used_last(name: str) -> None:
    policy = open_policy(name, 10)
    store(policy, CHAIN[:5])
    store(policy, CHAIN[5:])
    policy.used(CHAIN[:5])
    assert set(CHAIN) - set(evict(policy, 3)) == set(CHAIN[:7])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batches", [[(0, 5), (5, 10)], [(0, 10)], [(0, 1), (1, 9), (9, 10)]])
def test_what_survives_of_a_chain_that_was_told_is_its_prefix(name: str, batches: list[tuple[int, int]]) -> None:
    policy = open_policy(name, 10)
    for start, end in batches:
        store(policy, CHAIN[start:end])
    policy.used(CHAIN)
    assert evict(policy, 10) == CHAIN[::-1]


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
def test_pins_that_end_after_the_chain_was_told_leave_its_order(name: str, data: st.DataObject) -> None:
    """Copies to slow tiers end batch by batch, in any order, long after the request."""
    policy = open_policy(name, 10)
    cut = data.draw(st.integers(1, 9))
    store(policy, CHAIN[:cut])
    store(policy, CHAIN[cut:])
    held = data.draw(st.lists(st.sampled_from(CHAIN), unique=True))
    for key in held[: data.draw(st.integers(0, len(held)))]:
        policy.pin(key)
    for _ in range(data.draw(st.integers(1, 3))):
        policy.used(CHAIN)
    for key in held:
        policy.pin(key)
    went = evict(policy, data.draw(st.integers(0, 3)))
    for key in data.draw(st.permutations(held)):
        policy.unpin([key])
    left = [key for key in CHAIN if key not in went]
    assert evict(policy, 10) == left[::-1]


@pytest.mark.parametrize("name", NAMES)
def test_of_a_batch_that_no_request_told_the_tail_goes_first(name: str) -> None:
    policy = open_policy(name, 10)
    store(policy, CHAIN)
    assert evict(policy, 10) == CHAIN[::-1]


# --- pins and protection ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_being_filled_is_no_victim(name: str) -> None:
    policy = open_policy(name, 2)
    policy.insert(b"a")
    policy.used([b"a"])
    assert policy.victim() is None
    with pytest.raises(ValueError, match="61"):
        policy.evict(b"a")
    policy.unpin([b"a"])
    assert policy.victim() == b"a"


@pytest.mark.parametrize("name", NAMES)
def test_when_everything_is_protected_nothing_goes_and_the_order_stays(name: str) -> None:
    policy = open_policy(name, 10)
    store(policy, CHAIN)
    policy.used(CHAIN)
    for _ in range(3):
        assert policy.victim({*CHAIN, b"another"}) is None
    assert evict(policy, 10) == CHAIN[::-1]


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_are_not_there_are_refused_except_as_used(name: str) -> None:
    policy = open_policy(name, 2)
    store(policy, [b"a"])
    policy.used([b"x", b"a", b"y"])
    for call in (policy.pin, policy.evict, policy.remove, lambda key: policy.unpin([key])):
        with pytest.raises(KeyError, match="x"):
            call(b"x")
    with pytest.raises(ValueError, match="61"):
        policy.insert(b"a")
    assert evict(policy, 2) == [b"a"]


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_was_passed_over_while_pinned_may_be_pinned_again(name: str) -> None:
    policy = open_policy(name, 10)
    store(policy, CHAIN[:4])
    policy.pin(CHAIN[3])
    assert policy.victim() == CHAIN[2]
    policy.unpin([CHAIN[3]])
    policy.pin(CHAIN[3])
    assert evict(policy, 10) == [CHAIN[2], CHAIN[1], CHAIN[0]]
    policy.unpin([CHAIN[3]])
    assert evict(policy, 10) == [CHAIN[3]]


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_were_passed_over_while_pinned_go_by_their_last_use(name: str) -> None:
    """`a` and `b` are passed over, let go, and passed over again after another use: their old places must not count."""
    policy = open_policy(name, 10)
    for key in (b"a", b"b", b"c"):
        store(policy, [key])
        policy.used([key])
    for order in ((b"a", b"b"), (b"b", b"a")):
        for key in order:
            policy.pin(key)
        for key in (b"c", *order):
            policy.used([key])
        assert policy.victim() == b"c"
        policy.pin(b"c")
        assert policy.victim() is None
        policy.unpin([b"c", *order])
    assert evict(policy, 10) == [b"c", b"b", b"a"]


def test_pinning_the_same_key_again_and_again_takes_no_memory() -> None:
    policy = LRU(10)
    store(policy, CHAIN)
    policy.pin(CHAIN[9])
    assert policy.victim() == CHAIN[8]
    for _ in range(1000):
        policy.unpin([CHAIN[9]])
        policy.pin(CHAIN[9])
    policy.unpin([CHAIN[9]])
    assert len(policy._keys._heap) < 50
    assert policy.victim() == CHAIN[9]


class PolicyMachine(RuleBasedStateMachine):
    """Random calls, as a host tier may make them, beside the set of keys that must be there."""

    name = ""
    capacity = 6

    def __init__(self) -> None:
        super().__init__()
        self.policy = open_policy(self.name, self.capacity)
        self.resident: set[bytes] = set()
        self.pinned: set[bytes] = set()

    names = st.integers(0, 9).map(lambda number: b"k%d" % number)
    chains = st.lists(names, unique=True, max_size=6)

    @rule(key=names, protected=st.frozensets(names, max_size=6))
    def bring_in(self, key: bytes, protected: frozenset[bytes]) -> None:
        if key in self.resident:
            return
        self.policy.miss(key)
        if len(self.resident) == self.capacity and not self.evict_a_victim(protected):
            return
        self.policy.insert(key)
        self.resident.add(key)
        self.pinned.add(key)

    @rule(protected=st.frozensets(names, max_size=6))
    def evict_one(self, protected: frozenset[bytes]) -> None:
        self.evict_a_victim(protected)

    def evict_a_victim(self, protected: frozenset[bytes]) -> bool:
        key = self.policy.victim(protected)
        free = self.resident - self.pinned - protected
        assert (key in free) if free else (key is None)
        if key is None:
            return False
        assert self.policy.victim(protected) == key
        self.policy.evict(key)
        self.resident.remove(key)
        return True

    @rule(keys=chains)
    def use(self, keys: list[bytes]) -> None:
        self.policy.used(keys)

    @rule(keys=chains)
    def pin(self, keys: list[bytes]) -> None:
        for key in self.resident.intersection(keys):
            self.policy.pin(key)
            self.pinned.add(key)

    @rule(keys=chains)
    def unpin(self, keys: list[bytes]) -> None:
        """Keys that are not pinned among them: a host tier's bad luck, not the policy's end."""
        known = [key for key in keys if key in self.resident]
        self.policy.unpin(known)
        self.pinned.difference_update(known)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.resident)))
        self.policy.remove(key)
        self.resident.remove(key)
        self.pinned.discard(key)

    @rule()
    def clear(self) -> None:
        self.policy.clear()
        self.resident.clear()
        self.pinned.clear()

    @invariant()
    def ghosts_are_bounded(self) -> None:
        """Not to be seen from outside: names alone, which nobody is told."""
        if isinstance(self.policy, ARC):
            once = len(self.policy._once) + len(self.policy._once_ghosts)
            again = len(self.policy._again) + len(self.policy._again_ghosts)
            assert once <= self.capacity
            assert once + again <= 2 * self.capacity
            assert self.policy._unnamed <= self.resident

    def teardown(self) -> None:
        """Everything resident is there exactly once."""
        self.policy.unpin(sorted(self.pinned))
        assert sorted(evict(self.policy, 100)) == sorted(self.resident)


class LRUMachine(PolicyMachine):
    name = "lru"


class ARCMachine(PolicyMachine):
    name = "arc"


for machine in (LRUMachine, ARCMachine):
    machine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestLRUMachine = LRUMachine.TestCase
TestARCMachine = ARCMachine.TestCase


# --- LRU -------------------------------------------------------------------------------------------------------------------------------

KEYS = st.integers(0, 8).map(lambda number: b"k%d" % number)
CALLS = st.one_of(
    st.tuples(st.sampled_from(["insert", "pin", "remove"]), KEYS),
    st.tuples(st.sampled_from(["used", "unpin"]), st.lists(KEYS, unique=True)),
    st.tuples(st.just("victim"), st.sets(KEYS)),
    st.tuples(st.just("clear"), st.none()),
)


@settings(max_examples=400)
@given(st.lists(CALLS, max_size=80))
def test_lru_takes_the_victims_that_a_search_through_a_plain_list_finds(calls: list[tuple[str, object]]) -> None:
    policy, model = LRU(9), PlainLRU()
    for name, argument in calls:
        if name == "victim":
            key = model.victim(argument)  # type: ignore[arg-type]
            assert policy.victim(argument) == key  # type: ignore[arg-type]
            if key is not None:
                policy.evict(key)
                model.remove(key)
        elif name == "clear":
            policy.clear()
            model.clear()
        elif name == "used":
            policy.used(argument)  # type: ignore[arg-type]
            model.used(argument)  # type: ignore[arg-type]
        elif name == "unpin":
            keys = [key for key in argument if key in model.resident]  # type: ignore[attr-defined]
            policy.unpin(keys)
            model.unpin(keys)
        elif (name == "insert") != (argument in model.resident):
            getattr(policy, name)(argument)
            getattr(model, name)(argument)
    while (key := model.victim(set())) is not None:
        assert policy.victim() == key
        policy.evict(key)
        model.remove(key)
    assert policy.victim() is None


# --- opening ---------------------------------------------------------------------------------------------------------------------------


def test_policies_open_by_name() -> None:
    assert isinstance(open_policy("lru", 3), LRU)
    assert isinstance(open_policy("arc", 3), ARC)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_policies.py").write_text(
        "from kvstore_sdk.host.lru import LRU\n"
        "class MostRecent(LRU):\n"
        "    def victim(self, protected=()):\n        return list(self._keys._order)[-1]\n"
        "class Namespace:\n    open_most_recent = MostRecent\n"
        "def open_broken(*, capacity):\n    raise RuntimeError(f'no {capacity}')\n"
        "def open_exit(*, capacity):\n    raise SystemExit(capacity)\n"
        "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\n"
        "def open_mute(*, capacity):\n    raise Mute\n"
        "def open_list(*, capacity):\n    return []\n"
        "value = 1\n"
    )
    (tmp_path / "acme_lacks.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "acme_raises.py").write_text("1 / 0\n")
    (tmp_path / "acme_exits.py").write_text("raise SystemExit(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_policies", raising=False)


@pytest.mark.usefixtures("module")
def test_a_policy_of_ones_own_opens_as_module_and_factory() -> None:
    policy = open_policy("acme_policies:Namespace.open_most_recent", 3)
    for number in range(3):
        policy.insert(bytes([number]))
        policy.unpin([bytes([number])])
    assert policy.victim() == bytes([2])


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "capacity", "field", "said"),
    [
        ("mru", 3, "policy", "is not known; there are arc, lru; or write module:factory"),
        ("", 3, "policy", "is not known"),
        ("lru", 0, "capacity", "is 0; it must be at least 1"),
        ("acme_missing:open", 3, "policy", "module 'acme_missing' cannot be imported"),
        ("acme_lacks:open", 3, "policy", "module 'acme_lacks' imports 'not_installed_anywhere', which cannot be imported"),
        ("acme_raises:open", 3, "policy", "importing module 'acme_raises' raised ZeroDivisionError"),
        ("acme_exits:open", 3, "policy", "importing module 'acme_exits' raised SystemExit (2)"),
        ("acme_policies:nothing", 3, "policy", "module 'acme_policies' has no factory 'nothing'"),
        ("acme_policies:value", 3, "policy", "module 'acme_policies' has no factory 'value'"),
        ("acme_policies:open_broken", 3, "policy", "the factory raised RuntimeError (no 3)"),
        ("acme_policies:open_exit", 3, "policy", "the factory raised SystemExit (3)"),
        ("acme_policies:open_mute", 3, "policy", "the factory raised Mute ((its text cannot be had))"),
        ("acme_policies:open_list", 3, "policy", "the factory returned a list, which lacks miss, used, pin, unpin, victim, evict"),
    ],
)
def test_what_cannot_be_opened_is_refused_in_words(name: str, capacity: int, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_policy(name, capacity)
    assert caught.value.field == field
    assert caught.value.where == f"eviction policy {name}"
    assert said in caught.value.problem
    assert "\n" not in str(caught.value)
