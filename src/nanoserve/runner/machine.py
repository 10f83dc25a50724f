"""What this machine gives the process: memory and cores, within its control group's limits."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int:
    """Free memory of the device that this process may use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = _read("/proc/meminfo")
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            found = [int(line.split()[1]) * 1024]
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        stat = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
        cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))  # given up where memory is short
        found.append(max(int(limit) - int(used) + cached, 0))
    return min(found)


def available_cores() -> int:
    """Cores that this process may keep busy, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, -(-int(quota) // int(period)))
    return max(cores, 1)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
