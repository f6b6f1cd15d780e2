"""`python -m kvstore_sdk.cli`, for processes that must run under this very interpreter."""

import sys

from kvstore_sdk.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
