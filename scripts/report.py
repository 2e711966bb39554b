"""What the reports of the measuring commands share: the machine, what was typed, and the file."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from scripts.package import ROOT

MPS = "nvidia-cuda-mps-control"  # NVIDIA's Multi-Process Service, while its daemon runs


def machine() -> dict[str, str]:
    """What this ran on, by the names its makers gave it."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = f"{names[0]}, {len(names)} threads" if names else cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    if gpu != "none" and any(process.info["name"] == MPS for process in psutil.process_iter(["name"])):
        gpu += ", shared by MPS"
    return {"gpu": gpu, "cpu": cpu, "python": platform.python_version(), "torch": torch.__version__}


def command(name: str) -> str:
    """What was typed to make a report: the script of this name with this process's arguments."""
    return f"./scripts/{name} " + " ".join(relative(word) for word in sys.argv[1:])


def relative(word: str) -> str:
    """A path below the repository as it is typed there; other paths by their last name."""
    path = Path(word)
    if path.is_absolute():
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return word


def write_report(report: dict[str, Any], file: Path) -> None:
    """Figures as JSON, in a folder that may have to be made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
