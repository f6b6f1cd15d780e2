"""Carries packets between two tun devices in two network namespaces: late, and not all of them.

    p2p_relay.py PID DEVICE DELAY_S LOSS SEED

Makes DEVICE here and in the namespace of process PID, says `ready`, and ends with its input.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MAX_WAITING = 2000
"""Packets on their way; more are lost, as in a router."""


def open_tun(device: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
    return fd


def enter_network_of(pid: str) -> None:
    with open(f"/proc/{pid}/ns/net") as namespace:
        # Python has it from 3.12 on.
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def carry(ends: tuple[int, int], delay_s: float, loss: float, draw: random.Random) -> None:
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([sys.stdin, *ends], [], [], wait_s)
        if sys.stdin in ready:
            return
        for end in ready:
            # Some at a time, so that neither direction waits for the other.
            for _ in range(64):
                try:
                    packet = os.read(end, 65536)
                except BlockingIOError:
                    break
                if draw.random() >= loss and len(waiting) < MAX_WAITING:
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + delay_s, count, other[end], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(waiting)
            try:
                os.write(end, packet)
            except OSError:
                # The device is down, or its queue is full: lost.
                continue


def main() -> None:
    pid, device, delay_s, loss, seed = sys.argv[1:]
    left = open_tun(device)
    enter_network_of(pid)
    right = open_tun(device)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry((left, right), float(delay_s), float(loss), random.Random(int(seed)))


if __name__ == "__main__":
    main()
