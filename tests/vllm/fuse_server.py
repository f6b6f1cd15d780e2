"""A FUSE filesystem that shows a folder, until it stops answering: SIGUSR1 hangs it, for good. Run as root.

    python fuse_server.py <folder> <mount point>

It speaks the kernel's protocol itself: https://www.kernel.org/doc/html/latest/filesystems/fuse.html, <linux/fuse.h>, version 7.31. Prints
`ready` once it is mounted. Ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import struct
import sys
from collections.abc import Callable

HEADER_IN = struct.Struct("<IIQQIIIHH")
HEADER_OUT = struct.Struct("<IiQ")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
MAX_WRITE = 1 << 20

LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE, STATFS, RELEASE = (
    1, 2, 3, 4, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18,
)  # fmt: skip
FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, CREATE, INTERRUPT, DESTROY, BATCH_FORGET, RENAME2 = (
    20, 25, 26, 27, 28, 29, 30, 35, 36, 38, 42, 45,
)  # fmt: skip
FATTR_MODE, FATTR_SIZE = 1, 8
NO_ANSWER = {FORGET, BATCH_FORGET, INTERRUPT}


class Server:
    """Answers one request after another. Node numbers stand for paths."""

    def __init__(self, root: str) -> None:
        self.paths = {1: root}
        self.nodes = {root: 1}
        self.next = 2
        self.answers: dict[int, Callable[[int, bytes], bytes]] = {
            INIT: lambda _, body: struct.pack("<IIIIHHIIHH28x", 7, 31, 1 << 20, 0, 12, 10, MAX_WRITE, 1, 256, 0),
            LOOKUP: lambda node, body: self.entry(self.child(node, body)),
            GETATTR: lambda node, body: self.attributes(self.paths[node]),
            SETATTR: self.setattr,
            MKDIR: self.mkdir,
            UNLINK: lambda node, body: self.done(os.unlink(self.child(node, body))),
            RMDIR: lambda node, body: self.done(os.rmdir(self.child(node, body))),
            RENAME: lambda node, body: self.rename(node, struct.unpack_from("<Q", body)[0], body[8:]),
            RENAME2: lambda node, body: self.rename(node, struct.unpack_from("<Q", body)[0], body[16:]),
            LINK: self.link,
            OPEN: self.open,
            CREATE: self.create,
            READ: lambda node, body: os.pread(*self.where(body)),
            WRITE: self.write,
            STATFS: self.statfs,
            RELEASE: lambda node, body: self.done(os.close(struct.unpack_from("<Q", body)[0])),
            FSYNC: lambda node, body: b"",
            FLUSH: lambda node, body: b"",
            OPENDIR: lambda node, body: struct.pack("<QII", 0, 0, 0),
            READDIR: self.readdir,
            RELEASEDIR: lambda node, body: b"",
            FSYNCDIR: lambda node, body: b"",
            DESTROY: lambda node, body: b"",
        }

    def answer(self, opcode: int, node: int, body: bytes) -> tuple[int, bytes]:
        if opcode not in self.answers:
            return -errno.ENOSYS, b""
        try:
            return 0, self.answers[opcode](node, body)
        except OSError as problem:
            return -(problem.errno or errno.EIO), b""
        except KeyError:
            return -errno.ESTALE, b""

    def done(self, nothing: None) -> bytes:
        return b""

    def child(self, node: int, name: bytes) -> str:
        return os.path.join(self.paths[node], os.fsdecode(name.split(b"\0", 1)[0]))

    def node(self, path: str) -> int:
        if path not in self.nodes:
            self.nodes[path], self.paths[self.next] = self.next, path
            self.next += 1
        return self.nodes[path]

    def attr(self, path: str) -> bytes:
        found = os.lstat(path)
        return ATTR.pack(
            found.st_ino, found.st_size, found.st_blocks, int(found.st_atime), int(found.st_mtime), int(found.st_ctime),
            0, 0, 0, found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def entry(self, path: str) -> bytes:
        attributes = self.attr(path)
        return struct.pack("<QQQQII", self.node(path), 0, 0, 0, 0, 0) + attributes

    def attributes(self, path: str) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self.attr(path)

    def setattr(self, node: int, body: bytes) -> bytes:
        valid, size, mode = struct.unpack_from("<I", body)[0], struct.unpack_from("<Q", body, 16)[0], struct.unpack_from("<I", body, 68)[0]
        if valid & FATTR_SIZE:
            os.truncate(self.paths[node], size)
        if valid & FATTR_MODE:
            os.chmod(self.paths[node], mode & 0o7777)
        return self.attributes(self.paths[node])

    def mkdir(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body[8:])
        os.mkdir(path, struct.unpack_from("<I", body)[0] & 0o7777)
        return self.entry(path)

    def link(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body[8:])
        os.link(self.paths[struct.unpack_from("<Q", body)[0]], path)
        return self.entry(path)

    def rename(self, node: int, target: int, names: bytes) -> bytes:
        old, new = self.child(node, names), self.child(target, names.split(b"\0", 2)[1])
        os.rename(old, new)
        for path, number in list(self.nodes.items()):
            if path == new:
                del self.nodes[path]
            elif path == old or path.startswith(old + "/"):
                moved = new + path[len(old) :]
                del self.nodes[path]
                self.nodes[moved], self.paths[number] = number, moved
        return b""

    def open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        return struct.pack("<QII", os.open(self.paths[node], flags), 0, 0)

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = self.child(node, body[16:])
        fd = os.open(path, (flags & ~os.O_DIRECT) | os.O_CREAT, mode & 0o7777)
        return self.entry(path) + struct.pack("<QII", fd, 0, 0)

    def where(self, body: bytes) -> tuple[int, int, int]:
        fd, offset, size = struct.unpack_from("<QQI", body)
        return fd, size, offset

    def write(self, node: int, body: bytes) -> bytes:
        fd, size, offset = self.where(body)
        return struct.pack("<II", os.pwrite(fd, body[40 : 40 + size], offset), 0)

    def statfs(self, node: int, body: bytes) -> bytes:
        found = os.statvfs(self.paths[1])
        return struct.pack(
            "<QQQQQIII28x", found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree, found.f_bsize, 255, found.f_frsize
        )

    def readdir(self, node: int, body: bytes) -> bytes:
        _, size, offset = self.where(body)
        result = b""
        for number, name in enumerate(sorted(os.listdir(self.paths[node]))[offset:], offset + 1):
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", number, number, len(raw), 0) + raw
            entry += bytes(-len(entry) % 8)
            if len(result) + len(entry) > size:
                break
            result += entry
        return result


def main(folder: str, where: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,max_read={1 << 20}".encode()
    if libc.mount(b"kvstore-test", os.fsencode(where), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    hung = []
    signal.signal(signal.SIGUSR1, lambda *_: hung.append(True))
    server = Server(folder)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        ready, _, _ = select.select([device, sys.stdin], [], [], 0.05)
        if sys.stdin in ready:
            return
        if device not in ready or hung:
            continue
        with contextlib.suppress(OSError):
            request = os.read(device, MAX_WRITE + 65536)
            _, opcode, unique, node, *_ = HEADER_IN.unpack_from(request)
            status, body = server.answer(opcode, node, request[HEADER_IN.size :])
            if opcode not in NO_ANSWER:
                os.write(device, HEADER_OUT.pack(HEADER_OUT.size + len(body), status, unique) + body)


if __name__ == "__main__":
    main(*sys.argv[1:])
