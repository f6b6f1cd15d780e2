"""What follows from what checks found, whatever they found and in whatever order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk_conformance.failure import ConformanceFailure
from kvstore_sdk_conformance.finding import findings_of
from kvstore_sdk_conformance.outcome import Result, Status, Verdict, judge, verdict
from kvstore_sdk_conformance.requirement import Level, Profile
from kvstore_sdk_conformance.requirements import BY_ID, REQUIREMENTS, below

BROKEN = (Status.FAIL, Status.DEVIATION)
MUSTS = [requirement for requirement in REQUIREMENTS if requirement.level is Level.MUST]


@st.composite
def findings(draw: st.DrawFn) -> list[Result]:
    """What the checks of all requirements may have found, those that were not run left out."""
    found = []
    for requirement in REQUIREMENTS:
        statuses = [Status.PASS] * 6 + [Status.NOT_RUN, Status.NOT_APPLICABLE, Status.BLOCKED, Status.ERROR]
        statuses += [Status.FAIL, Status.DEVIATION] if requirement.level is Level.MUST else [Status.ADVISORY]
        status = draw(st.sampled_from(statuses))
        if status is Status.NOT_RUN:
            continue
        own = Result(requirement, status, check="own", seconds=1.0)
        found.append(own)
        if status is Status.BLOCKED:
            other = draw(st.sampled_from(MUSTS))
            own.blockers = (other.id,)
            if draw(st.booleans()):
                broken = draw(st.sampled_from(BROKEN))
                found.append(Result(other, broken, check="other", met_by=requirement.id))
    return found


def statuses(results: dict[str, Result]) -> dict[str, Status]:
    return {id_: result.status for id_, result in results.items()}


def verdicts(results: dict[str, Result]) -> dict[Profile, Verdict]:
    return {profile: verdict(profile, results)[0] for profile in Profile}


def all_passed(*except_for: str) -> list[Result]:
    return [Result(requirement, Status.PASS) for requirement in REQUIREMENTS if requirement.id not in except_for]


@given(findings(), st.integers())
def test_the_order_of_what_was_found_does_not_matter(found: list[Result], seed: int) -> None:
    one = judge(found)
    random.Random(seed).shuffle(found)
    other = judge(found)
    assert statuses(one) == statuses(other)
    assert {id_: result.blockers for id_, result in one.items()} == {id_: result.blockers for id_, result in other.items()}
    assert verdicts(one) == verdicts(other)


@given(findings())
def test_what_was_found_is_not_changed_by_judging_it(found: list[Result]) -> None:
    before = deepcopy(found)
    judge(found)
    assert found == before


@given(findings())
def test_what_does_not_apply_never_fails(found: list[Result]) -> None:
    results = judge(found)
    for result in found:
        if result.status is Status.NOT_APPLICABLE:
            assert results[result.requirement.id].status is Status.NOT_APPLICABLE


@given(findings())
def test_conformant_is_what_was_checked_as_a_whole_and_holds(found: list[Result]) -> None:
    results = judge(found)
    for profile, said in verdicts(results).items():
        musts = [results[requirement.id].status for requirement in MUSTS if requirement.profile is profile]
        assert (said is Verdict.CONFORMANT) == (set(musts) <= {Status.PASS, Status.NOT_APPLICABLE} and Status.PASS in musts)
        assert (said is Verdict.NOT_CLAIMED) == (set(musts) <= {Status.NOT_APPLICABLE})
        if Status.FAIL in musts:
            assert said is Verdict.NOT


@given(st.sampled_from(MUSTS), st.sampled_from([Status.NOT_RUN, Status.ERROR]))
def test_a_run_that_leaves_a_must_out_is_incomplete(left_out, status: Status) -> None:  # type: ignore[no-untyped-def]
    results = judge([*all_passed(left_out.id), Result(left_out, status)])
    assert verdict(left_out.profile, results)[0] is Verdict.INCOMPLETE


@given(findings())
def test_what_is_blocked_names_what_is_broken_and_not_blocked_itself(found: list[Result]) -> None:
    results = judge(found)
    broken = {id_ for id_, result in results.items() if result.status in BROKEN}
    for id_, result in results.items():
        if result.status is Status.BLOCKED and (set(result.blockers) | below(id_)) & broken:
            assert set(result.blockers) <= broken
        # A failure that follows from another is not counted as one.
        if result.status is Status.FAIL:
            own = {
                one.requirement.id
                for one in found
                if not one.met_by and one.status in BROKEN and results[one.requirement.id].status in BROKEN
            }
            assert not below(id_) & own


@given(findings())
def test_something_that_was_found_broken_is_shown_as_broken(found: list[Result]) -> None:
    if any(result.status is Status.FAIL for result in found):
        assert {Status.FAIL, Status.DEVIATION} & set(statuses(judge(found)).values())


CHAIN = ("KV-CORE-01", "KV-CORE-10", "KV-CORE-13")


def test_a_chain_is_blocked_by_its_first_broken_link() -> None:
    results = judge([*all_passed(*CHAIN), *(Result(BY_ID[id_], Status.FAIL) for id_ in reversed(CHAIN))])
    assert [results[id_].status for id_ in CHAIN] == [Status.FAIL, Status.BLOCKED, Status.BLOCKED]
    assert [results[id_].blockers for id_ in CHAIN[1:]] == [["KV-CORE-01"]] * 2


def test_what_a_declared_deviation_blocks_is_not_judged_at_any_distance() -> None:
    links = (Status.DEVIATION, Status.FAIL, Status.FAIL)
    results = judge([*all_passed(*CHAIN), *(Result(BY_ID[id_], status) for id_, status in zip(CHAIN, links, strict=True))])
    found, note = verdict(Profile.CORE, results)
    assert found is Verdict.INCOMPLETE
    assert note.startswith("2 of ")


def test_what_was_met_on_the_way_is_told_once_its_own_check_held() -> None:
    found = [*all_passed("KV-ATOM-01"), Result(BY_ID["KV-ATOM-01"], Status.BLOCKED, blockers=("KV-CORE-02",))]
    found.append(Result(BY_ID["KV-CORE-02"], Status.FAIL, expected="a list", met_by="KV-ATOM-01"))
    results = judge(found)
    assert (results["KV-CORE-02"].status, results["KV-CORE-02"].expected) == (Status.FAIL, "a list")
    assert results["KV-ATOM-01"].blockers == ["KV-CORE-02"]


# What a check raises that breaks another requirement.


def found_by(id_: str, breaks: str, *, lacks: Sequence[str]) -> dict[str, Result]:
    failure = ConformanceFailure("a record", "none", breaks=breaks)
    found = findings_of(BY_ID[id_], failure, str, lambda requirement: requirement.id not in lacks)
    own = [Result(BY_ID[other], Status.NOT_APPLICABLE) for other in lacks]
    return judge([*all_passed(id_, *lacks), *own, *found])


def test_it_fails_that_requirement_where_that_applies() -> None:
    results = found_by("KV-DUR-05", "KV-SHARE-01", lacks=[])
    assert (results["KV-DUR-05"].status, results["KV-SHARE-01"].status) == (Status.BLOCKED, Status.FAIL)


def test_it_fails_the_one_that_was_checked_where_the_other_does_not_apply() -> None:
    results = found_by("KV-DUR-05", "KV-SHARE-01", lacks=["KV-SHARE-01"])
    assert (results["KV-DUR-05"].status, results["KV-SHARE-01"].status) == (Status.FAIL, Status.NOT_APPLICABLE)
    assert results["KV-DUR-05"].expected == "a record"


@pytest.mark.parametrize("first", [True, False])
def test_it_does_so_as_well_when_that_comes_out_later(first: bool) -> None:
    found = [
        Result(BY_ID["KV-SHARE-01"], Status.NOT_APPLICABLE),
        Result(BY_ID["KV-DUR-05"], Status.BLOCKED, blockers=("KV-SHARE-01",)),
        Result(BY_ID["KV-SHARE-01"], Status.FAIL, seen="none", met_by="KV-DUR-05"),
    ]
    results = judge(found if first else found[::-1])
    assert (results["KV-DUR-05"].status, results["KV-DUR-05"].seen) == (Status.FAIL, "none")
    assert results["KV-SHARE-01"].status is Status.NOT_APPLICABLE
