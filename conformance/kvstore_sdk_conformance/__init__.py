"""The conformance suite: `pytest --pyargs kvstore_sdk_conformance --kvstore-backend=TARGET`, or `kvstore conformance TARGET`."""

__all__: list[str] = []
