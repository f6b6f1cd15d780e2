"""Two machines on one: network namespaces with a link between them that can be cut, narrowed, made lossy and slow.

A namespace lives as long as the process that holds it, and that one as long as its input is open. So nothing is left behind, however a
test run ends.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

__all__ = ["Link", "Machine", "Relay", "need"]

T = TypeVar("T")

RELAY = Path(__file__).parent / "p2p_relay.py"
CLONE_NEWNET = 0x40000000
LIMIT_S = 20.0


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Machine:
    """A network of its own, with nothing but `lo`.

    Attributes:
        address: In the network of its link.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        # UCX looks devices up in /sys, which shows those of the network that it was mounted in.
        hold = "mount -t sysfs sysfs /sys && echo && exec cat"
        command = ["unshare", "--net", "--mount", "sh", "-c", hold]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"\n":
            _, why = self._holder.communicate(timeout=LIMIT_S)
            raise OSError(f"no network namespace: {why.decode().strip()}")
        self.run("ip", "link", "set", "lo", "up")

    @property
    def pid(self) -> int:
        """Of the process that holds it."""
        return self._holder.pid

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` here, in the same process."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", f"--mount=/proc/{self.pid}/ns/mnt", f"--wdns={os.getcwd()}", "--", *command]

    def run(self, *command: str) -> str:
        return run(*self.enter(command))

    def do(self, work: Callable[[], T]) -> T:
        """Call `work` on a thread that is in this network: sockets that it makes stay here."""
        results: list[T] = []

        def enter_and_work() -> None:
            with open(f"/proc/{self.pid}/ns/net") as namespace:
                # Python has it from 3.12 on.
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            results.append(work())

        thread = threading.Thread(target=enter_and_work)
        thread.start()
        thread.join()
        return results[0]

    def received_bytes(self) -> int:
        """By its end of the link."""
        [device] = json.loads(self.run("ip", "-s", "-j", "link", "show", "veth0"))
        return int(device["stats64"]["rx"]["bytes"])

    def close(self) -> None:
        """What still runs here keeps it."""
        self._holder.kill()
        self._holder.communicate(timeout=LIMIT_S)


class Link:
    """A pair of virtual Ethernet devices between two machines, `left` and `right`."""

    def __init__(self) -> None:
        self.left = Machine("10.77.0.1")
        try:
            self.right = Machine("10.77.0.2")
        except BaseException:
            self.left.close()
            raise
        try:
            ends = f"ip link add veth0 netns {self.left.pid} type veth peer name veth0 netns {self.right.pid}"
            run(*ends.split())
            for machine in self.machines:
                machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "veth0")
                machine.run("ip", "link", "set", "veth0", "up")
        except BaseException:
            self.close()
            raise

    @property
    def machines(self) -> tuple[Machine, Machine]:
        return self.left, self.right

    def cut(self, machine: Machine) -> None:
        """Take the device down at one end. Both lose the carrier, and this one its route."""
        machine.run("ip", "link", "set", "veth0", "down")

    def mend(self, machine: Machine) -> None:
        machine.run("ip", "link", "set", "veth0", "up")

    def swallow(self) -> None:
        """Everything that is sent is lost from now on, and nobody notices: both have their carriers and routes."""
        for machine, other in (self.machines, self.machines[::-1]):
            machine.run("ip", "neigh", "replace", other.address, "lladdr", "02:00:00:00:00:99", "dev", "veth0", "nud", "permanent")

    def spit_out(self) -> None:
        """The end of `swallow`."""
        for machine, other in (self.machines, self.machines[::-1]):
            machine.run("ip", "neigh", "del", other.address, "dev", "veth0")

    def lose(self, percent: int) -> None:
        """Lose that part of all packets, both ways. Needs nftables; 0 ends it."""
        for machine in self.machines:
            with suppress(OSError):
                machine.run("nft", "delete", "table", "inet", "loss")
            if percent:
                machine.run("nft", "add", "table", "inet", "loss")
                machine.run("nft", "add", "chain", "inet", "loss", "in", "{ type filter hook input priority 0; }")
                rule = f"iifname veth0 numgen random mod 100 < {percent} drop"
                machine.run("nft", "add", "rule", "inet", "loss", "in", *rule.split())

    def narrow(self, mbit_per_s: int) -> None:
        """Let no more than that through, each way, with room for 50 ms of it. Needs `tc` and the kernel's tbf."""
        for machine in self.machines:
            shape = f"tc qdisc replace dev veth0 root tbf rate {mbit_per_s}mbit burst 64kb latency 50ms"
            machine.run(*shape.split())

    def close(self) -> None:
        for machine in self.machines:
            machine.close()


class Relay:
    """A second link, of two tun devices, whose packets come late, and some of them not at all.

    Attributes:
        left: Address of the left machine on this link.
        right: Of the right one.
        device: The name of the device on both.
    """

    left, right, device = "10.78.0.1", "10.78.0.2", "tun0"

    def __init__(self, link: Link, delay_s: float, loss: float, seed: int = 1) -> None:
        """`delay_s` each way; `loss` is the part of the packets that never arrive."""
        command = [sys.executable, str(RELAY), str(link.right.pid), self.device, str(delay_s), str(loss), str(seed)]
        self._process = subprocess.Popen(link.left.enter(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert self._process.stdout is not None
            if self._process.stdout.readline() != b"ready\n":
                _, why = self._process.communicate(timeout=LIMIT_S)
                raise OSError(f"no relay: {why.decode().strip().splitlines()[-1]}")
            for machine, address in ((link.left, self.left), (link.right, self.right)):
                machine.run("ip", "address", "add", f"{address}/24", "dev", self.device)
                machine.run("ip", "link", "set", self.device, "mtu", "1500", "up")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=LIMIT_S)


@functools.cache
def missing(what: str) -> str:
    """Why this machine cannot do it; empty where it can. Tried, not guessed."""
    tools = {"namespaces": "unshare nsenter ip", "loss": "nft", "bandwidth": "tc", "relay": ""}[what].split()
    for tool in tools:
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if what != "namespaces" and (why := missing("namespaces")):
        return why
    try:
        link = Link()
    except OSError as error:
        return str(error)
    try:
        if what == "loss":
            link.lose(5)
        elif what == "bandwidth":
            link.narrow(100)
        elif what == "relay":
            Relay(link, 0.0, 0.0).close()
    except OSError as error:
        return str(error)
    finally:
        link.close()
    return ""


def need(*faults: str) -> None:
    """Skip the test where the machine lacks something that it needs: `namespaces`, `loss`, `bandwidth`, `relay`."""
    for what in faults:
        if why := missing(what):
            pytest.skip(f"{what}: {why}")
