"""Run-ahead as an investment: what never pays is stopped and probed now and then, what pays goes on."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from paceline.rollout.run_ahead.account import PROBE, TOLERATED, Account

OFFERED = 100
"""Tokens of run-ahead text that a call is offered."""


def calls(
    account: Account, gain: float, num_calls: int, cost: float = 10.0, has_text: bool = False, ms: float = 50.0
) -> list[bool]:
    """Calls of so long that run ahead whenever they may, each for the next one, which gets `gain` for it.

    Returns in which of them it ran.
    """
    ran = []
    for _ in range(num_calls):
        ran.append(account.may_run)
        for _ in range(10):
            account.pass_time(ms / 10)
        if account.may_run:
            for _ in range(5):
                account.charge(cost / 5)
        if has_text:
            for _ in range(4):
                account.credit(gain / 4)
        account.close_call(OFFERED if has_text else 0)
        has_text = ran[-1]
    return ran


@pytest.mark.parametrize("gain", [-20.0, 0.0, 9.0])
def test_what_never_pays_stops_and_is_probed(gain: float) -> None:
    ran = calls(Account(), gain, 10 * PROBE)
    first = ran.index(False)
    assert first <= 2, "a call or two"
    probes = [number for number in range(first, len(ran)) if ran[number]]
    assert len(probes) >= 8
    assert all(later - earlier <= PROBE + 2 for earlier, later in itertools.pairwise(probes))
    assert sum(ran[first:]) <= len(ran) / (PROBE - 2), "a probe is one call"


@pytest.mark.parametrize("gain", [10.5, 40.0])
def test_what_pays_goes_on(gain: float) -> None:
    assert all(calls(Account(), gain, 100))


@pytest.mark.parametrize("loss", [0.5, 2.0])
def test_a_loss_is_tolerated_while_it_is_a_small_share_of_the_time(loss: float) -> None:
    """Text that is too short to pay yet may grow longer."""
    ms = 1.0 / TOLERATED
    assert all(calls(Account(), 10.0 - loss, 60, ms=ms)) == (loss < 1.0)


def test_it_is_tried_until_something_is_known() -> None:
    """Without text that came back there is nothing to judge."""
    account = Account()
    for _ in range(5):
        account.charge(10.0)
        account.close_call(0)
        assert account.may_run


def test_a_single_bad_call_does_not_stop_what_paid_much_before() -> None:
    account = Account()
    calls(account, 40.0, 10)
    assert all(calls(account, 0.0, 1, has_text=True))
    assert account.may_run
    assert not all(calls(account, 0.0, 10, has_text=True)), "but several do"


def test_a_probe_that_pays_takes_it_up_again() -> None:
    account = Account()
    assert not all(calls(account, 0.0, 6))
    ran = calls(account, 200.0, 3 * PROBE)
    assert True in ran and all(ran[ran.index(True) + 2 :]), "from the call on in which the probe's text came back"


def test_what_is_spent_now_is_compared_with_what_comes_back_next() -> None:
    """A call that spends much is not blamed before its text has come."""
    account = Account()
    calls(account, 12.0, 6)
    account.charge(1000.0)
    account.credit(12.0)
    account.close_call(OFFERED)
    assert account.may_run
    account.charge(10.0)
    account.credit(12.0)
    account.close_call(OFFERED)
    assert not account.may_run


@pytest.mark.parametrize("gain", [0.0, 30.0])
def test_a_state_holds_what_was_learned(gain: float) -> None:
    account, again = Account(), Account()
    calls(account, gain, 5)
    again.restore(json.loads(json.dumps(account.state())))
    assert again.state() == account.state() and again.may_run == account.may_run == (gain > 10)
    # It goes on in the same way: what paid goes on, what did not is probed no later than after a full wait.
    later = calls(again, gain, 2 * PROBE)
    assert all(later) if gain > 10 else True in later[: PROBE + 1] and not all(later)


def test_a_call_without_its_text_in_between_forgives_nothing() -> None:
    """An evaluation between two calls of a training neither spends nor requests anything."""
    account = Account()
    for _ in range(4):
        account.charge(1000.0)
        account.credit(12.0)
        account.close_call(OFFERED)
        account.close_call(0)
    assert not account.may_run


def test_a_fresh_state_runs() -> None:
    account = Account()
    account.restore(Account().state())
    assert account.may_run and all(math.isfinite(float(value)) for value in account.state().values())
