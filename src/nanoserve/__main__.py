"""python -m nanoserve"""

import sys

from nanoserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
