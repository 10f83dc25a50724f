"""nanoserve pull"""

from __future__ import annotations

import argparse

from nanoserve.cli.progress import Progress
from nanoserve.loading.pull import pull


def pull_model(arguments: argparse.Namespace) -> int:
    with Progress() as progress:
        print(pull(arguments.name, revision=arguments.revision, progress=progress))
    return 0
