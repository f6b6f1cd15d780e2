"""Host memory to host memory: engines that serve records to each other."""

from kvstore_sdk_backends.p2p.opening import open_p2p

__all__ = ["open_p2p"]
