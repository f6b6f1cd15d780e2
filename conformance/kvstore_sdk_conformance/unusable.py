"""Locations and options that nothing can be opened with, and what comes of trying."""

from __future__ import annotations

import contextlib
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit, urlunsplit

from kvstore_sdk.backend import Backend, backend_options, registry
from kvstore_sdk_conformance.callers import Callers, HungError
from kvstore_sdk_conformance.failure import ConformanceFailure
from kvstore_sdk_conformance.secrecy import takes_text
from kvstore_sdk_conformance.target import FRESH, Place, Target

__all__ = ["error_of_opening", "is_foreign", "unusable"]

NOBODY = "127.0.0.1:1"
"""Where no server listens."""
CLOSE_S = 10.0


def unusable(place: Place, target: Target) -> Iterator[tuple[str, Place]]:
    """The place with other locations, and with nonsense in one option after the other; each with what was done, in words.

    The nonsense is the path of something below a file: as a path it cannot be made, and it is no address, no number and no word.
    """
    with tempfile.NamedTemporaryFile(prefix="kvstore-conformance-") as file:
        nonsense = f"{file.name}/x"
        if place.location is not None:
            yield "a location below a file", replace(place, location=nonsense)
            yield "a NUL in its location", replace(place, location=f"{place.location}\0x")
        else:
            parts = urlsplit(place.target)
            elsewhere = parts._replace(netloc=NOBODY) if parts.netloc else parts._replace(path=nonsense)
            yield "a location that nothing is at", replace(place, target=urlunsplit(elsewhere))
            yield "a NUL in its location", replace(place, target=urlunsplit(parts._replace(path=f"{parts.path}%00x")))
        for name, option in backend_options(target.target.replace(FRESH, "x")).items():
            # Wrong secrets are another requirement's, and what stands in a URL cannot be given twice.
            if takes_text(option) and not option.secret and f"{name}=" not in urlsplit(place.target).query:
                yield f"a path below a file for {name}", replace(place, options={**place.options, name: nonsense})


def error_of_opening(place: Place, within_s: float) -> BaseException | None:
    """What opening raises. What opens is closed again.

    Raises:
        ConformanceFailure: neither in time.
    """
    callers = Callers()
    try:
        backend: Backend = callers.run(place.open, within_s)
    except HungError:
        raise ConformanceFailure(f"the backend to open, or an error, within {within_s:g} s", "neither") from None
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer
        return error
    else:
        # How it closes is judged by checks of its own.
        with contextlib.suppress(Exception):
            callers.run(backend.close, CLOSE_S)
        return None
    finally:
        callers.stop()


def is_foreign(error: BaseException) -> bool:
    """Whether the factory raised what is no error of the SDK, nor an `OSError`: then the SDK says so in its place."""
    cause = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    by_sdk = bool(frames) and frames[-1].f_globals.get("__name__") == registry.__name__
    return by_sdk and cause is not None and not isinstance(cause, OSError)
