"""Callables that an operator names as `module:factory`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from kvstore_sdk.errors import ConfigError, text_of

__all__ = ["is_factory_name", "load_factory"]

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_factory_name(text: str) -> bool:
    """Whether `text` has the form `module:factory`."""
    return _FACTORY.fullmatch(text) is not None


def load_factory(where: str, field: str, name: str) -> Callable[..., Any]:
    """Import what `module:factory` names; the factory may be an attribute of an attribute.

    Args:
        where: Whose setting it is, for errors.
        field: Name of the setting.
        name: `module:factory`.

    Raises:
        ConfigError: it cannot be imported, or is nothing that can be called.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as cause:
        missing = cause.name or module
        if module == missing or module.startswith(f"{missing}."):
            problem = f"module {missing!r} cannot be imported ({text_of(cause)}); install it, put its folder on PYTHONPATH, or fix the name"
        else:
            problem = f"module {module!r} imports {missing!r}, which cannot be imported ({text_of(cause)}); install what it needs"
        raise ConfigError(where, field, problem) from cause
    except KeyboardInterrupt:
        raise
    except BaseException as cause:
        # Importing runs a vendor's code, which may fail in any way.
        problem = f"importing module {module!r} raised {type(cause).__name__} ({text_of(cause)}); that is for its vendor to fix"
        raise ConfigError(where, field, problem) from cause
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(where, field, f"module {module!r} has no factory {path!r}")
    factory: Callable[..., Any] = found
    return factory
