"""``entwine doctor``: what this machine has for the fused kernels, and what is missing."""

import argparse
import json
import platform
from typing import Any

import jax

from .. import _core, _obstacles, _tuned
from ._usage import subcommand

_PACKAGES = ("entwine_jax", "jax", "jaxlib", "jax-cuda13-plugin", "nvidia-nccl-cu13")


def examine() -> dict[str, Any]:
    """All findings, as JSON can hold them; ``obstacles`` lists why strategies "fused" and "resident" can't run on GPUs
    here, and is empty if they can, ``signal_obstacles`` why "signal" can't."""
    devices = [
        {
            "id": device.id,
            "platform": device.platform,
            "kind": device.device_kind,
            "process": device.process_index,
            "compute_capability": getattr(device, "compute_capability", None),
        }
        for device in jax.devices()
    ]
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _tuned.installed(name) for name in _PACKAGES},
        "cuda_built": _core.cuda_built(),
        "devices": devices,
        "nccl": None,
        "nvlink_domains": None,
        "host_executor": any(device["platform"] == "cpu" for device in devices),
    }
    found["obstacles"] = _fused_obstacles(found)
    found["signal_obstacles"] = _signal_obstacles(found)
    return found


def _fused_obstacles(found: dict[str, Any]) -> list[str]:
    obstacles = []
    if not found["cuda_built"]:
        obstacles.append("entwine_jax was built without CUDA: reinstall it where nvcc 13 is on the path")
    gpus = [device for device in found["devices"] if device["platform"] in ("gpu", "cuda")]
    if not gpus:
        obstacles.append("JAX sees no GPU: install jax[cuda13], and look at what nvidia-smi says")
    elif len(gpus) == 1:
        obstacles.append("JAX sees one GPU: a team needs two or more")
    if gpus and found["cuda_built"]:
        version, where, why = _core.nccl()
        found["nccl"] = {"version": version, "library": where}
        obstacles += [why] if why else []
        found["nvlink_domains"] = len(set(_obstacles.domains()))
        peers = _obstacles.peer_obstacle()
        obstacles += [peers] if peers else []
    return obstacles


def _signal_obstacles(found: dict[str, Any]) -> list[str]:
    """Of strategy "signal", which needs no peer access."""
    if not found["cuda_built"] or not any(device["platform"] in ("gpu", "cuda") for device in found["devices"]):
        return [*found["obstacles"][:2]]
    peers, hopper = _obstacles.peer_obstacle(), _obstacles.hopper_obstacle()
    return [each for each in found["obstacles"] if each != peers] + ([hopper] if hopper else [])


def _told(found: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version or 'missing'}" for name, version in found["packages"].items())
    lines = [
        f"python {found['python']}, {packages}",
        f"CUDA kernels: {'built' if found['cuda_built'] else 'not built'}",
    ]
    for device in found["devices"]:
        capability = f", compute capability {device['compute_capability']}" if device["compute_capability"] else ""
        lines.append(f"device {device['id']}: {device['platform']}, {device['kind']}{capability}")
    if found["nccl"] is not None:
        lines.append(f"NCCL: {found['nccl']['version'] or 'none'} {found['nccl']['library']}".rstrip())
    if (found["nvlink_domains"] or 1) > 1:
        lines.append(f"NVLink domains: {found['nvlink_domains']}; a team that keeps within one can be fused")
    lines += [f"strategies 'fused' and 'resident' on GPUs: no, {obstacle}" for obstacle in found["obstacles"]]
    if not found["obstacles"]:
        lines.append("strategies 'fused' and 'resident' on GPUs: yes")
    lines += [f"strategy 'signal' on GPUs: no, {obstacle}" for obstacle in found["signal_obstacles"]]
    if not found["signal_obstacles"]:
        lines.append("strategy 'signal' on GPUs: yes")
    if found["host_executor"]:
        lines.append(
            "strategy 'fused' on CPU devices: yes, the host executor (slow: for tests); 'resident', 'signal' likewise"
        )
    lines.append("strategy 'xla': always")
    return "\n".join(lines)


def add_to(commands: Any) -> None:
    subcommand(
        commands,
        "doctor",
        run,
        "what this machine has for the fused kernels, and what is missing",
        "entwine doctor --json",
    )


def run(options: argparse.Namespace) -> int:
    """Exit status 0 if the GPU kernels can run here, 1 if not."""
    found = examine()
    print(json.dumps(found, indent=1) if options.json else _told(found))
    return 1 if found["obstacles"] else 0
