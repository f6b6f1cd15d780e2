"""Which folder a store may use, and how it is told from any other: decided before a byte is written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat

from kvstore_sdk.backend import BackendError, ConfigError, NoSpaceError, error_from_os
from kvstore_sdk_backends.fs.io import DirectIO, probe

__all__ = [
    "MAX_NAME_BYTES",
    "META",
    "TEMP",
    "WHERE",
    "check_direct_io",
    "check_location",
    "create_folder",
    "create_folders",
    "has_marker",
    "inspect",
    "is_cached_mount",
    "mode_of",
    "open_error",
    "write_marker",
]

WHERE = "backend fs"
META = ".kvstore"
"""Holds what is no record. A name of a record cannot begin with a dot, so the two never meet."""
TEMP = f"{META}/tmp"
MARKER = f"{META}/format.json"
PROBE = f"{META}-probe-"
"""Begins the name of a file that is there for an instant, in a folder that may have no marker yet."""
FORMAT = "kvstore-sdk folder"
VERSION = 1
MAX_NAME_BYTES = 255
"""A file name's limit on every filesystem in use; the SDK's own names have no segment longer than 139 bytes."""

_PATH_MAX = 4096
_MARKER_MAX_BYTES = 4096
# Their clients keep names that were not found for 30 to 60 s, unless they are mounted with lookupcache=none or the like.
_CACHED_MOUNTS = frozenset({"nfs", "nfs4", "cifs", "smb3", "afs"})
# What may lie in a folder without a marker: a fresh filesystem's own folder, records that were synced from elsewhere, and what a
# first opening left when it was killed.
_NEUTRAL = frozenset({META, "lost+found", "v1"})


def check_location(location: str) -> str:
    """The folder's path without a slash at its end. Looks at the text alone.

    Raises:
        ConfigError: it is no absolute path that leaves room for a record's name.
    """
    try:
        length = len(os.fsencode(location))
    except UnicodeEncodeError:
        length = 0
    if not length or "\0" in location or not location.startswith("/"):
        raise ConfigError(WHERE, "location", f"{location!r} is no absolute path of a folder; write /mnt/kv, or file:///mnt/kv as a URL")
    if length + MAX_NAME_BYTES + 2 > _PATH_MAX:
        raise ConfigError(WHERE, "location", f"a path of {length} bytes leaves no room for the names of records; use a shorter one")
    root = location.rstrip("/")
    if not root:
        raise ConfigError(WHERE, "location", "/ is the root of the system; name a folder below it")
    return root


def inspect(root: str, read_only: bool) -> bool:
    """Whether the folder carries our marker. False: it does not, but may be given one. Writes nothing.

    Raises:
        ConfigError: it is no folder, belongs to something else or to another version, or cannot be looked at.
        BackendError: the filesystem does not answer.
    """
    try:
        if not stat.S_ISDIR(os.stat(root).st_mode):
            raise ConfigError(WHERE, "location", f"{root} is not a folder; name one, it is created if need be")
        if has_marker(root):
            return True
        with os.scandir(root) as entries:
            if foreign := next((entry.name for entry in entries if entry.name not in _NEUTRAL and not entry.name.startswith(PROBE)), None):
                problem = f"{root} holds other things, {foreign!r} for one, and no {MARKER}; name an empty or a new folder"
                raise ConfigError(WHERE, "location", problem)
    except FileNotFoundError:
        parent = os.path.dirname(root)
        if read_only:
            raise ConfigError(WHERE, "location", f"{root} does not exist, and read_only creates nothing; fix the path") from None
        # Creating whole paths would turn a misspelt one, or a volume that is not mounted, into a store on the system's disk.
        if not os.path.isdir(parent):
            raise ConfigError(WHERE, "location", f"{parent} does not exist; create it, mount it, or fix the path") from None
    except OSError as cause:
        raise open_error(root, cause) from cause
    return False


def has_marker(root: str) -> bool:
    """Whether `root` is a folder of this format.

    Raises:
        ConfigError: it is one of another format or version.
        OSError: the marker cannot be read.
    """
    try:
        # A FIFO in its place must not be waited for: puts look here when the folder of temporary files is gone.
        with open(os.open(f"{root}/{MARKER}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source:
            text = source.read(_MARKER_MAX_BYTES) or b""
    except FileNotFoundError:
        return False
    # What a power cut may leave of it. Waiting for the disk instead would take seconds on a busy one.
    if not text.strip(b"\0\n "):
        return False
    try:
        found = json.loads(text)
        named, version = found["format"], found["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        problem = f"{root}/{MARKER} cannot be understood; if the folder is a store, delete that file, else name another folder"
        raise ConfigError(WHERE, "location", problem) from None
    if (named, version) != (FORMAT, VERSION):
        seen = f"{str(named)[:80]!r} version {str(version)[:20]}"
        problem = f"{root} is {seen}; this SDK reads {FORMAT!r} version {VERSION}: name another folder"
        raise ConfigError(WHERE, "location", problem)
    return True


def is_cached_mount(root: str) -> bool:
    """Whether this host may for a while not see what another host stored in `root`, because it remembers what was not there."""
    try:
        device = os.stat(root).st_dev
    except FileNotFoundError:
        device = os.stat(os.path.dirname(root)).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    # A line: id, parent, major:minor, root, mount point, options, any number of tags, "-", type, source, more options.
    with contextlib.suppress(FileNotFoundError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split(" ", 3)[2] == wanted:
                return after.split(" ", 1)[0] in _CACHED_MOUNTS
    return False


def check_direct_io(root: str, marked: bool) -> None:
    """Whether the filesystem takes O_DIRECT. Asked before the folder is created: in its parent, if it does not exist yet.

    Raises:
        ConfigError: it does not, or permission is missing. Nothing is left behind.
        BackendError: the filesystem failed; a marked folder may be full.
    """
    direct = DirectIO(root, True, warn=False)
    try:
        probe(f"{root if os.path.isdir(root) else os.path.dirname(root)}/{PROBE}{secrets.token_hex(8)}", direct)
    except OSError as cause:
        error = open_error(root, cause)
        if not (marked and isinstance(error, NoSpaceError)):
            raise error from cause
    if not direct.enabled:
        raise ConfigError(WHERE, "direct_io", f"the filesystem of {root} refuses O_DIRECT; write auto, or use another one")


def create_folders(root: str) -> None:
    """Create the folder, not its parents, and the one of temporary files."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(root)
    mode = mode_of(root)
    for folder in (META, TEMP):
        with contextlib.suppress(FileExistsError):
            create_folder(f"{root}/{folder}", mode)


def create_folder(path: str, mode: int) -> None:
    """Create `path` with exactly this mode.

    Folders of a store have the mode of its root, whatever the umask: whoever may store may store everywhere, and whoever set up the
    root decides who that is. Otherwise the first of two users would shut out the second.
    """
    os.mkdir(path)
    # A mount without permissions of its own may refuse this.
    with contextlib.suppress(OSError):
        os.chmod(path, mode)


def mode_of(folder: str) -> int:
    return stat.S_IMODE(os.stat(folder).st_mode)


def write_marker(root: str, temp_path: str) -> None:
    """Mark the folder as ours. Two that do it at once write the same."""
    text = json.dumps({"format": FORMAT, "version": VERSION}) + "\n"
    with open(temp_path, "x", encoding="ascii") as target:
        target.write(text)
    os.rename(temp_path, f"{root}/{MARKER}")


def open_error(root: str, cause: OSError) -> ConfigError | BackendError:
    """What to raise when a folder could not be opened."""
    if cause.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(WHERE, "location", f"{root}: permission denied ({cause.filename or root}); grant it, or set read_only=true")
    if cause.errno == errno.EROFS:
        return ConfigError(WHERE, "location", f"{root} lies on a read-only filesystem; remount it, or set read_only=true")
    if cause.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
        return ConfigError(WHERE, "location", f"{root} is no path of a folder ({cause.strerror}); fix the path")
    return error_from_os(f"fs open {root}", cause)
