"""A worker's mailbox, and Ray's settings, without Ray: order, urgency, signs of life, and what is missing."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline.core.config import SettingsError
from paceline.fleet.commands import Drop, Generate, Preempt, RunAhead, SequenceKey
from paceline.fleet.reports import Joined, Lost
from paceline.fleet.settings import FleetSettings
from paceline.fleet.throughput import FIRST_SPEED
from paceline.fleet.transport import ray_cluster
from paceline.fleet.transport.host import explain, find_factory
from paceline.fleet.transport.mailbox import LINGER_S, Bulletin, Mailbox, Order
from paceline.fleet.transport.wire import Parcel


def parcel(data: str) -> Parcel:
    return Parcel(data.encode(), None)


def order(serial: int) -> Order:
    return Order(serial, Generate(0, 1, (SequenceKey(2, 3),)), parcel(str(serial)))


def said(bulletin: Bulletin) -> list[str]:
    """Parcels, as text."""
    return [report.event.data.decode() for report in bulletin.reports if isinstance(report.event, Parcel)]


def reasons(mailbox: Mailbox) -> list[str]:
    return [report.event.reason for report in mailbox.collect(0, 0).reports if isinstance(report.event, Lost)]


# --- orders -----------------------------------------------------------------------------------------------------------


def test_orders_are_taken_in_their_order() -> None:
    mailbox = Mailbox()
    for serial in range(3):
        mailbox.post(order(serial))
    found = [found.payload for found in (mailbox.next(0), mailbox.next(), mailbox.next(5)) if found]
    assert found == [parcel("0"), parcel("1"), parcel("2")]
    assert mailbox.next(0) is None and mailbox.next(0.01) is None


@pytest.mark.parametrize("serials", [[1], [0, 0], [0, 2], [0, 1, 3]])
def test_an_order_that_is_missing_or_doubled_ends_the_worker(serials: list[int]) -> None:
    mailbox = Mailbox()
    for serial in serials:
        mailbox.post(order(serial))
    assert reasons(mailbox) == [f"order {serials[-1]} arrived instead of order {len(serials) - 1}"]


def test_an_urgent_order_is_known_before_it_is_taken() -> None:
    mailbox = Mailbox()
    mailbox.post(Order(0, RunAhead(0, 0, (1,))))
    assert not mailbox.is_called
    mailbox.post(Order(1, Preempt(0)))
    assert mailbox.is_called
    mailbox.next()
    assert mailbox.is_called  # the work that it is to end may begin only now
    mailbox.next()
    assert not mailbox.is_called
    mailbox.post(Order(2, Drop(0, (SequenceKey(1, 1),))))
    assert mailbox.is_called


# --- reports ----------------------------------------------------------------------------------------------------------


def test_reports_are_kept_until_they_were_read() -> None:
    mailbox = Mailbox()
    mailbox.join(FIRST_SPEED, 7)
    mailbox.report(parcel("a"))
    expected = [Joined(FIRST_SPEED, 7), parcel("a")]
    assert [(r.serial, r.event) for r in mailbox.collect(0, 0).reports] == list(enumerate(expected))
    assert [r.event for r in mailbox.collect(0, 0).reports] == expected  # the answer was lost on its way
    mailbox.report(parcel("b"))
    assert said(mailbox.collect(2, 0)) == ["b"]
    assert mailbox.collect(3, 0.01).reports == ()


def test_a_report_ends_the_wait_for_one() -> None:
    mailbox = Mailbox()
    threading.Timer(0.05, mailbox.report, [parcel("here")]).start()
    start = time.monotonic()
    assert said(mailbox.collect(0, 20)) == ["here"]
    assert time.monotonic() - start < 10


def test_what_can_wait_is_read_with_what_comes_after_it() -> None:
    mailbox = Mailbox()
    mailbox.report(parcel("a"), parcel("b"), can_wait=True)
    threading.Timer(0.02, mailbox.report, [parcel("now")]).start()
    assert said(mailbox.collect(0, 20)) == ["a", "b", "now"]
    assert said(mailbox.collect(0, 20)) == ["a", "b", "now"]  # lost on its way: no time to lose
    mailbox.report(parcel("c"), can_wait=True)
    start = time.monotonic()
    assert said(mailbox.collect(3, 20)) == ["c"]
    assert 0.9 * LINGER_S < time.monotonic() - start < 10
    assert said(mailbox.collect(3, 0)) == ["c"]  # who only looks does not wait


def test_only_the_first_failure_counts() -> None:
    mailbox = Mailbox()
    mailbox.fail("first")
    mailbox.fail("second")
    assert reasons(mailbox) == ["first"]


def test_who_waits_for_orders_is_not_quiet() -> None:
    now = [0.0]
    mailbox = Mailbox(lambda: now[0])
    now[0] = 5.0
    assert mailbox.collect(0, 0).quiet_s == 5.0
    mailbox.report(parcel("alive"))
    now[0] = 6.0
    assert mailbox.collect(1, 0).quiet_s == 1.0
    waiter = threading.Thread(target=mailbox.next)
    waiter.start()
    while mailbox.collect(1, 0).quiet_s:
        time.sleep(0.001)
    now[0] = 100.0
    assert mailbox.collect(1, 0).quiet_s == 0.0
    mailbox.post(order(0))
    waiter.join()
    now[0] = 103.0
    assert mailbox.collect(1, 0).quiet_s == 3.0


# --- Ray, as far as it is not needed ----------------------------------------------------------------------------------


def test_nothing_imports_ray_before_it_is_needed() -> None:
    code = "import sys, paceline.fleet.transport.ray_worker; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


def test_where_ray_is_missing_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    settings = FleetSettings(workers=2)
    with pytest.raises(SettingsError, match=r"pip install -e '\.\[ray\]'"), ray_cluster.open_cluster(settings):
        pass


def test_where_nobody_listens_is_found_out_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SettingsError, match=f"cannot join a Ray at {address}: .*refused"):
            ray_cluster._join(None, address)


def test_the_store_has_room_for_weights_or_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(4 * 2**30))
    assert ray_cluster.store_bytes(2**30, 1) == 3 * 2**30 + 2**29
    with pytest.raises(SettingsError, match=r"6\.5 GiB .* has 4\.0 GiB free; .*--shm-size=7g"):
        ray_cluster.store_bytes(2**31, 1)


def test_another_package_of_this_name_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ray_cluster.check_folder()
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "__init__.py").touch()
    with pytest.raises(RuntimeError, match="start from another folder"):
        ray_cluster.check_folder()


def test_the_default_is_one_worker_in_this_process() -> None:
    assert FleetSettings().workers == 1 and FleetSettings().address is None


def test_a_factory_is_known_by_its_path() -> None:
    assert find_factory("paceline.fleet.transport.mailbox:Mailbox") is Mailbox


def test_a_failure_names_its_place() -> None:
    try:
        find_factory("paceline.fleet.transport.mailbox:Desk")
    except AttributeError as error:
        assert explain(error).startswith("AttributeError: module 'paceline") and "(host.py:" in explain(error)
