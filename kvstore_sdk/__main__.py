"""`python -m kvstore_sdk`: the command `kvstore`, where it is not on the path or must run under this very interpreter."""

import sys

from kvstore_sdk.cli import main

if __name__ == "__main__":
    sys.exit(main())
